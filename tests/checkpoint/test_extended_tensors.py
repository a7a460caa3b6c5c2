"""Checkpoints of tensor subclasses that say themselves how they are gathered: the tensors that they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from checkpoints import tensors_in
from extended_models import IN, OUT, Layer, adamw, seeded, trained
from parity import on_ranks, sharded_copy, units_of, warns_for
from polyshard import checkpoint
from polyshard.errors import ConfigError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

UNITS = {"policy": units_of(Layer)}


def test_checkpoints_go_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    source, other = seeded(0), seeded(1)

    def saves(rank: int, world: ThreadedWorld) -> list[float]:
        model = sharded_copy(source, rank, world, **UNITS)
        optimizer = adamw(model)
        trained(model, optimizer)
        checkpoint.save(tmp_path, 1, model, optimizer)
        return trained(model, optimizer)

    wanted = on_ranks(3, saves)[0]
    directory = tmp_path / "step-00000001"
    written = tensors_in(directory)
    kinds = {name: (each.dtype, tuple(each.shape)) for name, each in written.items() if "layer.weight" in name}
    assert kinds == {
        "model.layer.weight.high": (torch.int8, (OUT, IN)),
        "model.layer.weight.low": (torch.float16, (OUT, IN)),
    }
    assert torch.equal(written["model.layer.weight.high"], source.layer.weight.high)  # type: ignore[arg-type]

    def loads(rank: int, world: ThreadedWorld) -> list[float]:
        model = sharded_copy(other, rank, world, **UNITS)
        optimizer = adamw(model)
        checkpoint.load(directory, model, optimizer)
        return trained(model, optimizer)

    for number in (1, 2, 5):
        with warns_for(number):
            for found in on_ranks(number, loads):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)


def test_a_checkpoint_of_plain_weights_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """And what is not finite inside of a parameter is found under its name."""
    source, plain = seeded(0), seeded(0)
    plain.layer.weight = nn.Parameter(torch.ones(OUT, IN, dtype=torch.float64), requires_grad=False)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(source, rank, world, **UNITS)
        other = sharded_copy(plain, rank, world, **UNITS)
        checkpoint.save(tmp_path, 1, other)
        before = polyshard.local_state_dict(model)["layer.weight"].high.clone()
        with pytest.raises(ConfigError, match=r"has no 'layer\.weight\.high', 'layer\.weight\.low'"):
            checkpoint.load(tmp_path / "step-00000001", model)
        assert torch.equal(model.layer.weight.high, before)
        if rank == 1:
            model.layer.weight.low[0, 0] = float("nan")
        checkpoint.save(tmp_path, 2, model)

    with pytest.warns(UserWarning, match=r"infinite or no number: 'layer\.weight'\. Whoever"):
        on_ranks(2, on_rank)
