"""The drop-in over polyshard's own collectives: ranks that are threads, and one pretended rank of a thousand."""

from __future__ import annotations

import copy
import math
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from parity import Block, Net, draw, seeded
from polyshard.errors import StateError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn

CONTEXT = PluginContext("test", torch.device("cpu"), timeout=timedelta(seconds=10))


def _wrapped(model: nn.Module, group: Any, **settings: Any) -> FSDP:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
        return FSDP(model, group, auto_wrap_policy=ModuleWrapPolicy({Block}), **settings)


def test_one_pretended_rank_of_many_takes_a_step() -> None:
    """Every pretended rank sends what this one does, so the gradient's mean is this rank's own."""
    world_size = 1024
    group = FakeCollectives(CONTEXT, rank=0, world_size=world_size)
    model = seeded(Net)
    sharded = _wrapped(copy.deepcopy(model), group)
    held = {
        len(unit.params) and unit.params[0].numel(): sum(p.numel() for p in block.parameters())
        for unit, block in zip(FSDP.fsdp_modules(sharded)[1:], model.blocks, strict=True)
    }
    assert held == {math.ceil(77 / world_size): 77}
    loss = sharded(draw(4, 3)).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.numel() == p.numel() for p in sharded.parameters())


def test_a_dummy_group_of_several_ranks_refuses_to_compute() -> None:
    class Dummy:
        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 2

    sharded = _wrapped(seeded(Net), Dummy())
    assert (sharded.rank, sharded.world_size) == (1, 2)
    with pytest.raises(StateError, match="dummy"):
        sharded(draw(4, 3))
