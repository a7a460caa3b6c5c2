"""Where the second example's scalars go: Weights & Biases offline, and packages that are missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

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
