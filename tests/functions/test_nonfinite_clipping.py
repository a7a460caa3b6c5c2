"""``polyshard.clip_grad_norm_(error_if_nonfinite=True)``: all ranks raise alike, and nothing was scaled."""

from __future__ import annotations

import math
from typing import Any

import polyshard
import pytest
import torch
from parity import WAYS, Block, Net, backward, local, on_ranks, one_by_one, seeded, sharded_copy, threaded, units_of
from polyshard.errors import NonFiniteError, PolyshardError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

#: What is ignored here is trained, and its gradients are averaged by hand or not at all.
pytestmark = pytest.mark.filterwarnings("ignore:Nothing averages the gradients of")

BLOCKS = {"policy": units_of(Block)}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def spoil(model: nn.Module, prefix: str, value: float) -> None:
    """Change one element of the gradient that this rank has of the parameters under ``prefix``."""
    held = [local(p.grad) for name, p in model.named_parameters() if name.startswith(prefix) and p.grad is not None]
    next(each for each in held if each.numel()).view(-1)[0] = value


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k].nan_to_num(7), other[k].nan_to_num(7)) for k in one)


@one_by_one("world_size, settings", WAYS, "order", [2.0, math.inf], "bad", [math.inf, math.nan])
def test_one_rank_that_is_not_finite_is_an_error_on_all(
    world_size: int, settings: dict[str, Any], order: float, bad: float
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        backward(model, rank)
        if rank == 1:
            spoil(model, "blocks.1", bad)
        before = gradients(model)
        with pytest.raises(NonFiniteError) as caught:
            polyshard.clip_grad_norm_(model, 0.01, order, error_if_nonfinite=True)
        assert same(gradients(model), before)
        # The ranks are still together.
        for parameter in model.parameters():
            if parameter.grad is not None:
                local(parameter.grad).nan_to_num_(0.0, 0.0, 0.0)
        assert polyshard.clip_grad_norm_(model, 0.01, order, error_if_nonfinite=True).isfinite()
        return str(caught.value)

    for rank, message in enumerate(on_ranks(world_size, on_rank)):
        assert "The gradient of unit 'blocks.1' is not finite on ranks [1] " in message
        assert f"(rank {rank})" in message


def test_torchs_own_functions_raise_on_all_ranks_too() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        backward(model, rank)
        if rank == 1:
            spoil(model, "blocks.1", math.inf)
        before = gradients(model)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], error_if_nonfinite=True)
        assert same(gradients(model), before)

    on_ranks(2, on_rank)


def test_the_first_unit_in_module_order_is_named_with_all_its_ranks() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        backward(model, rank)
        spoil(model, "blocks.1", math.nan)
        if rank != 1:
            spoil(model, "blocks.0", math.inf)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        with pytest.raises(RuntimeError) as caught:
            polyshard.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        assert isinstance(caught.value, PolyshardError)
        return str(caught.value)

    for message in on_ranks(3, on_rank):
        assert "unit 'blocks.0' is not finite on ranks [0, 2], and 1 more" in message


def test_a_norm_that_overflows_is_told_apart() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        backward(model, rank)
        spoil(model, "blocks.0", 1e308 if next(model.parameters()).dtype == torch.float64 else 3e38)
        with pytest.raises(NonFiniteError) as caught:
            polyshard.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        return str(caught.value)

    for message in on_ranks(2, on_rank):
        assert "overflows although each gradient is finite" in message


class WithLoose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.loose = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * self.loose
        return result


def test_a_parameter_outside_of_units_counts_though_other_ranks_do_not_see_it() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = seeded(WithLoose)
        config = threaded(world, rank)
        polyshard.shard(model, config, ignored_parameters=[model.loose])
        backward(model, rank)
        assert model.loose.grad is not None
        if rank == 1:
            model.loose.grad[0] = math.nan
        with pytest.raises(NonFiniteError) as caught:
            polyshard.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        return str(caught.value)

    for message in on_ranks(2, on_rank):
        assert "a parameter outside of units is not finite on ranks [1]" in message


def test_finite_gradients_are_clipped_as_without_it_and_the_wrapper_passes_it_on() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        norms = []
        for strict in (False, True):
            config = threaded(world, rank, **BLOCKS)
            model = polyshard.FullyShardedDataParallel(seeded(Net), config)
            backward(model, rank)
            norms.append(model.clip_grad_norm_(0.01, error_if_nonfinite=strict))
            norms.append(model.clip_grad_norm_(0.01))
        spoil(model, "", math.nan)
        with pytest.raises(NonFiniteError):
            model.clip_grad_norm_(0.01, error_if_nonfinite=True)
        return norms

    for first, after, strict, strict_after in on_ranks(2, on_rank):
        assert torch.equal(first, strict)
        assert torch.equal(after, strict_after)


def test_without_it_the_norm_is_returned() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> float:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        backward(model, rank)
        if rank == 0:
            spoil(model, "blocks.0", math.nan)
        return polyshard.clip_grad_norm_(model, 1.0).item()

    assert all(math.isnan(norm) for norm in on_ranks(2, on_rank))
