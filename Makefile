# Everything here works from a fresh clone: what a target needs is installed into .venv first.

PYTHON ?= python3

# Another torch than that of constraints.txt, in an environment of its own: TORCH="torch==2.15.*" is in .venv-2.15, and
# TORCH=torch, the newest, in .venv-torch.
TORCH ?=

VENV := .venv$(if $(TORCH),-$(subst .*,,$(subst torch==,,$(TORCH))))
STAMP := $(VENV)/.installed

# `make test-gpu PY=python3` uses an interpreter that has everything already, and installs nothing.
ifeq ($(origin PY),undefined)
PY := $(VENV)/bin/python
READY := $(STAMP)
endif

# Two ranks share a small machine; more threads than cores slow each other down.
export OMP_NUM_THREADS ?= 1

# Tests start hundreds of processes, each of which would compile all modules anew where bytecode is not written.
export PYTHONDONTWRITEBYTECODE =

# Tests run in processes that take files over from each other, one more than cores: tests of ranks that are processes,
# of time limits and of failures wait for a third of their time. WORKERS=0 for one process alone.
WORKERS ?= $$(( $$(getconf _NPROCESSORS_ONLN) + 1 ))
PARALLEL = -n $(WORKERS) --maxprocesses 8 --dist worksteal

# Of the example; options for torchrun itself in LAUNCH="...".
RANKS ?= $$($(PY) -c 'import torch; print(torch.cuda.device_count() or 2)')

.DEFAULT_GOAL := help
.PHONY: help demo pretrain moe rollout test coverage check static quick test-nightly test-faults test-downstream test-gpu bench clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  make %-9s %s\n' "$$name" "$$text"; done

demo: $(READY)  ## train the example: 2 CPU ranks, or one rank per GPU; RANKS=3, options in ARGS="..."
	$(PY) -m torch.distributed.run --standalone --nproc-per-node "$(RANKS)" $(LAUNCH) \
	    examples/byte_lm/train.py --config examples/byte_lm/run.toml $(ARGS)

pretrain: $(READY)  ## pretrain a toy Llama: 2 CPU ranks, or one rank per GPU; RANKS=4, options in ARGS="..."
	$(PY) -m torch.distributed.run --standalone --nproc-per-node "$(RANKS)" $(LAUNCH) \
	    examples/pretrain/train.py --config examples/pretrain/llama_toy.toml $(ARGS)

moe: $(READY)  ## train a toy mixture of experts: 2 CPU ranks, or one rank per GPU; RANKS=4, options in ARGS="..."
	$(PY) -m torch.distributed.run --standalone --nproc-per-node "$(RANKS)" $(LAUNCH) \
	    examples/pretrain/train.py --config examples/moe/mixtral_toy.toml $(ARGS)

rollout: $(READY)  ## train, and hand weights to a generator: two trainers and a generator; options in ARGS="..."
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 3 examples/rollout/train.py $(ARGS)

test: $(READY)  ## run all tests that need no GPU; options for pytest in ARGS="..."
	$(PY) -m pytest -m "not gpu and not nightly and not faults and not downstream" --ignore tests/gpu $(PARALLEL) $(ARGS)

# Ranks that are forked processes are not measured: what they alone run counts as not run.
coverage: $(READY)  ## run the same tests, and show the lines that none of them runs
	$(PY) -m pytest -m "not gpu and not nightly and not faults and not downstream" --ignore tests/gpu $(PARALLEL) \
	    --cov --cov-report=term-missing:skip-covered $(ARGS)

# What uses one core runs beside each other, then the tests, which use all.
check: $(READY)  ## run the static checks and the quick tests, build `docs` and `package`
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target static docs package
	$(MAKE) --no-print-directory quick

# Programs whose files have the same names are no part of one run of mypy.
static: $(READY)  ## run ruff, mypy and import-linter
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib $$(git ls-files | grep -vE '^tests/|\.(svg|json|ipynb)$$')
	MYPYPATH=benchmarks:examples/rollout:examples/acme/src:examples/quarry/src $(PY) -m mypy \
	    benchmarks/*.py examples/rollout/*.py examples/acme/src/acme/*.py examples/acme/tests/*.py \
	    examples/quarry/src/quarry/*.py examples/quarry/tests/*.py
	MYPYPATH=examples/recipes:examples/pretrain $(PY) -m mypy examples/recipes/*.py examples/pretrain/*.py
	MYPYPATH=examples/byte_lm $(PY) -m mypy examples/byte_lm/*.py
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo

# None of them waits: more processes than cores would only collect once more.
quick: WORKERS = $(shell getconf _NPROCESSORS_ONLN)
quick: $(READY)  ## run the tests that are quick
	$(PY) -m pytest -m "not gpu and not slow and not nightly and not faults and not downstream" --ignore tests/gpu -q $(PARALLEL) $(ARGS)

test-nightly: $(READY)  ## run the tests that take minutes each
	$(PY) -m pytest -m "nightly and not gpu and not faults and not downstream" --ignore tests/gpu $(PARALLEL) $(ARGS)

test-faults: $(READY)  ## make each fault happen many times, and write tests/faults/figures.md; takes half an hour
	$(PY) -m pytest tests/faults -m "not gpu" $(ARGS)
	$(PY) tests/faults/draw_figures.py

# Each in an environment of its own: what they pin does not fit together.
TRAINERS ?= torchtitan torchtune trl verl olmo_core

test-downstream: $(TRAINERS:%=.venv-downstream-%/.installed)  ## train with trainers of others beside torch; some alone by TRAINERS=trl
	set -e; for trainer in $(TRAINERS); do \
	    .venv-downstream-$$trainer/bin/python -m pytest -m downstream tests/downstream/test_$$trainer.py $(ARGS); done

# Every file with such tests, or of these every second one from the first or the second on.
HALF ?=
GPU_FILES = $$(ls tests/fsdp/test_*.py tests/gpu/test_*.py | awk 'NR % 2 == $(HALF:%/2=%) % 2')

test-gpu: $(READY)  ## run the tests that need GPUs; in two parts by HALF=1/2 and HALF=2/2
	$(PY) -m pytest -m gpu $(if $(HALF),$(GPU_FILES)) $(ARGS)

bench: $(READY)  ## run every benchmark in benchmarks/
	set -e; for script in benchmarks/*.py; do echo "== $$script"; $(PY) "$$script" $(ARGS); done

.PHONY: docs package changelog release

docs: $(READY)  ## build the pages as a site, build/site/index.html; warnings are errors
	$(PY) -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/site
	@echo build/site/index.html

package: $(READY)  ## build sdist and wheel into dist/, install them in a bare environment, and try them
	$(PY) tests/support/built_package.py

changelog: $(READY)  ## move the files of changes/ below Unreleased in CHANGELOG.md
	$(PY) -m towncrier build --yes --version unreleased

release: $(READY)  ## `package`, then the demo with what it built, and what to do next; uploads nothing, refuses a dirty tree
	$(PY) tests/support/release.py

clean:  ## remove caches and build outputs; .venv, those of other torches, and runs/ stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Torch 2.11 takes no setuptools as new as that of constraints.txt.
$(STAMP): pyproject.toml constraints.txt core/polyshard/_version.py
	$(PYTHON) -c 'import sys; sys.exit("polyshard needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); torch is large, so the first time takes minutes."
	grep -vE '^($(if $(TORCH),torch|setuptools,none))==' constraints.txt > $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c $(VENV)/constraints.txt \
	    -e '.[train,test,dev,docs]' $(if $(TORCH),'$(TORCH)')
	touch $@

.venv-downstream-%/.installed: tests/downstream/%.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -r $< -e .
	touch $@
