"""The drop-in over polyshard's own collectives: ranks that are threads, and one pretended rank of a thousand."""

from __future__ import annotations

import copy
import math
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded, train_reference
from polyshard.errors import StateError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import MixedPrecision
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


class _Asked(nn.MultiheadAttention):
    """Its superclass asks this before it takes its packed path."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> Any:
        assert query is key
        assert key is value
        return super().forward(query, key, value, **kwargs)


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.attention = _Asked(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        output: torch.Tensor = self.attention(x, key=x, value=x)[0]
        return output


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("casts", [False, True])
def test_one_tensor_given_several_times_stays_one(casts: bool, use_orig_params: bool) -> None:
    model = seeded(_Attends)
    precision = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True) if casts else None

    def step(mine: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = mine(draw(2, 4, 3, turn=turn, rank=rank)).square().mean()
        loss.backward()
        return [loss.detach().double()]

    reference = train_reference(model, step, 2, 1)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(model)
            if casts:
                # A cast between the two instances, too.
                mine.first.register_forward_hook(lambda module, args, output: output.double())
            policy = ModuleWrapPolicy({nn.MultiheadAttention})
            group = ThreadedCollectives(CONTEXT, world=world, rank=rank)
            sharded = FSDP(
                mine, group, auto_wrap_policy=policy, mixed_precision=precision, use_orig_params=use_orig_params
            )
        return step(sharded, 0, rank)

    tolerance = 1e-5 if casts else 1e-12
    for rank, values in enumerate(on_ranks(2, on_rank)):
        torch.testing.assert_close(values, reference.observed[0][rank], rtol=tolerance, atol=tolerance)
