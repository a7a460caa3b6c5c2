"""The example that hands weights to a generator: its processes, beside an unsharded model in this one."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from polyshard.errors import ConfigError
from processes import KeptRanks, importing_from, run_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollout"
RANKS = KeptRanks()
TINY = (
    "steps=30",
    "every=10",
    "batch=8",
    "context=16",
    "width=32",
    "layers=2",
    "lr=1e-2",
    "dtype=fp64",
    "sample=24",
    "verify=true",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path() -> Iterator[None]:
    with importing_from(EXAMPLE):
        yield


def part(name: str) -> ModuleType:
    """The example's module ``name``."""
    return importlib.import_module(name)


def texts_of_one_process() -> list[str]:
    """What an unsharded model writes at each hand-over."""
    train, model = part("train"), part("model")
    settings = train.load_settings(EXAMPLE / "run.toml", TINY)
    plain = train.built(settings)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=settings.lr)
    texts = []
    for step in range(1, settings.steps + 1):
        model.loss_of(plain, model.batch_of(train.TEXT, step, settings.batch, settings.context)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % settings.every == 0:
            texts.append(model.written(plain, settings.prompt.encode(), settings.sample))
    return texts


@pytest.mark.parametrize("way", ["memory", pytest.param("broadcast", marks=pytest.mark.nightly)])
def test_the_generator_has_the_trainers_weights_and_writes_what_one_process_would(tmp_path: Path, way: str) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings = [word for each in (*TINY, f"way={way}", f"output={tmp_path}") for word in ("--set", each)]
    done = run_script(3, EXAMPLE / "train.py", settings, environ)
    assert not any(done.codes), done.output + done.errors
    history: list[dict[str, Any]] = json.loads((tmp_path / "history.json").read_text())
    assert [entry["step"] for entry in history] == [10, 20, 30]
    # Digests of names and bits.
    assert [entry["arrived"] for entry in history] == [entry["sent"] for entry in history]
    assert len({entry["sent"] for entry in history}) == 3
    expected = texts_of_one_process()
    assert [entry["text"] for entry in history] == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("setting", ["way=pipe", "dtype=int8", "stepps=3"])
def test_settings_that_do_not_exist_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        part("train").load_settings(EXAMPLE / "run.toml", [setting])
