"""What the forge and a contributor's git run: files that name make targets, versions and paths which are there."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z]+) \??=", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def cells(job: dict[str, Any]) -> list[dict[str, str]]:
    """What each run of a job's matrix is given. As here, an ``include`` changes no other run."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    included = matrix.pop("include", [])
    return [dict(zip(matrix, each, strict=True)) for each in itertools.product(*matrix.values())] + included


def commands(job: dict[str, Any]) -> list[list[str]]:
    """The words of each ``run`` line, in each run of the matrix."""
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    fill = r"\$\{\{ matrix\.(\w+) \}\}"
    return [shlex.split(re.sub(fill, lambda name: cell[name[1]], line)) for cell in cells(job) for line in lines]  # noqa: B023


def made(*words: str, dry: bool = True) -> list[str]:
    """What ``make`` prints for ``words``, of what it would do where ``dry``."""
    asked = ["make", "--no-print-directory", *(["--dry-run"] if dry else ["--silent"]), *words]
    # Without the variables of a `make` that runs this test.
    environ = {"PATH": os.environ["PATH"]}
    return subprocess.run(asked, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_make_targets_and_nothing_else(path: Path) -> None:
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        assert commands(job)
        for make, target, *settings in commands(job):
            assert make == "make"
            assert target in TARGETS
            assert {setting.partition("=")[0] for setting in settings} <= VARIABLES


def test_the_matrix_has_every_python_and_the_torches_that_the_page_says_are_run() -> None:
    runs = cells(read(".github/workflows/check.yml")["jobs"]["test"])
    prefix = "Programming Language :: Python :: "
    versions = {each.removeprefix(prefix) for each in PROJECT["classifiers"] if each.startswith(f"{prefix}3.")}
    assert {run["python"] for run in runs} == versions
    assert PROJECT["requires-python"] == f">={min(versions)}"
    (lowest,) = [each.partition(">=")[2] for each in PROJECT["dependencies"] if each.startswith("torch>=")]
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    first, pinned, *newer = re.findall(r"^\| (2\.\d+)\.\d+ \| 3\.", page, re.MULTILINE)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert first == lowest
    assert f"\ntorch=={pinned}." in constraints
    assert {run["torch"] for run in runs} == {f"torch=={each}.*" for each in (first, *newer)} | {"", "torch"}


@pytest.mark.parametrize(
    ("torch", "folder"), [("", ".venv"), ("torch==2.15.*", ".venv-2.15"), ("torch==2.14.1", ".venv-2.14.1")]
)
def test_each_torch_has_an_environment_of_its_own(torch: str, folder: str) -> None:
    lines = made("--always-make", "test", f"TORCH={torch}")
    assert f"python3 -m venv {folder}" in lines
    assert f"touch {folder}/.installed" in lines
    (tests,) = [line for line in lines if "-m pytest" in line]
    assert tests.startswith(f"{folder}/bin/python ")


def test_the_halves_of_gpu_tests_are_all_files_that_have_some() -> None:
    halves = [made("test-gpu", "PY=echo", f"HALF={half}/2", dry=False)[-1].split()[4:] for half in (1, 2)]
    have = {
        str(path.relative_to(ROOT))
        for folder in ("fsdp", "gpu")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
    }
    assert sorted(halves[0] + halves[1]) == sorted(have)
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    # Tests of the former folder are marked by its fixtures.
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")}
    assert {str(path.relative_to(ROOT)) for path in marked} <= have | {"tests/docs/test_workshop.py"}


def test_everything_that_help_lists_is_run_somewhere() -> None:
    run = {
        words[1]
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for words in commands(job)
    }
    # `check` and `quick` are parts of others; `changelog` changes files, `bench` needs GPUs to itself.
    assert TARGETS - run == {"help", "check", "quick", "bench", "clean", "changelog"}


def test_changes_are_entries_that_the_changelog_takes(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "changes", tmp_path / "changes")
    (tmp_path / "changes" / "12.change.md").write_text("First line,\nsecond line.\n")
    before = (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = len(list((tmp_path / "changes").glob("*.change.md")))
    subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--yes", "--version", "unreleased"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert {path.name for path in (tmp_path / "changes").iterdir()} == {"README.md", "template.jinja"}
    after = (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")
    head, _, old = before.partition("## [Unreleased]\n")
    added = after.removeprefix(head + "## [Unreleased]\n").removesuffix(old.lstrip("\n"))
    assert added.startswith("\n- ")
    assert added.count("\n- ") == entries
    assert "\n- First line,\n  second line.\n" in added


def test_owners_are_named_for_paths_that_are_there() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    paths = [line.split()[0] for line in lines if not line.startswith("#")]
    assert paths[0] == "*"
    assert all((ROOT / path.strip("/")).exists() for path in paths[1:])
