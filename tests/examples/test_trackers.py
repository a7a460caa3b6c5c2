"""Where the second example's scalars go: Weights & Biases, and packages that are missing."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from polyshard.errors import ConfigError
from processes import importing_from

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"


@pytest.fixture(autouse=True)
def example() -> Iterator[None]:
    with importing_from(EXAMPLE):
        yield


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_before_ranks_do_anything(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    from ranks import Ranks
    from settings import load_settings
    from train import parse_arguments, train

    monkeypatch.setitem(sys.modules, package, None)
    asked = ["output.tensorboard=false", f"output.{package}=true"]
    settings = load_settings(EXAMPLE / "llama_toy.toml", asked, environ={})
    # Rank 1 of two that never met: it would wait for rank 0's tokens.
    with pytest.raises(ConfigError, match=f"output.{package} is true, but the package '{package}' is not installed"):
        train(settings, Ranks(1, 2, torch.device("cpu")), parse_arguments([]))


def test_weights_and_biases_get_the_scalars_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from metrics import Memory, Speed
    from report import Trained, make_reporter
    from settings import Output
    from trackers import make_trackers

    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    run = SimpleNamespace(log=lambda scalars, step: rows[step].update(scalars), finish=lambda: None)
    package = SimpleNamespace(init=lambda **given: run, Settings=lambda **given: None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    output = Output(folder=str(tmp_path / "run"), tensorboard=False, wandb=True)
    losses = [3.25, 2.125]
    with make_reporter(4, 0, make_trackers(output, {"training.seed": 7}, 0)) as reporter:
        for first in (1, 3):
            speed, memory = Speed(1000.0, 0.5, None), Memory(2**30, 0, 0)
            reporter.trained(Trained(first + 1, losses, [], [1.5, 1.75], 0.01, speed, memory))
        reporter.evaluated(4, 2.75)
    assert {step: row["loss/train"] for step, row in rows.items()} == {1: 3.25, 2: 2.125, 3: 3.25, 4: 2.125}
    assert rows[4] == {
        "loss/train": 2.125,
        "gradient_norm": 1.75,
        "learning_rate": 0.01,
        "speed/tokens_per_second": 1000.0,
        "speed/seconds_per_step": 0.5,
        "memory/peak_GiB": 1.0,
        "memory/allocator_retries": 0,
        "loss/held_out": 2.75,
    }
