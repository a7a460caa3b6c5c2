"""What PyTorch's FSDP tests ask of the execution-order checks under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.ranks import Pools, Ranks, across
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy
from torch import nn

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
strategies = pytest.mark.parametrize("strategy", STRATEGIES)
DIFFERS = "Forward order differs from that of the first iteration on rank"


class Fork(nn.Module):
    """Two units of 36 elements, whose collectives would be matched silently; a forward takes one of them."""

    def __init__(self, right: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.left: nn.Module = nn.Linear(6, 6, bias=False)
        self.right = right
        self.goes_right = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        result: torch.Tensor = (self.right if self.goes_right else self.left)(x)
        return result


def narrow() -> nn.Module:
    """36 elements in two parameters."""
    return nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 6, bias=False))


def wide() -> nn.Module:
    """36 elements in one parameter."""
    return nn.Linear(6, 6, bias=False)


def fork(ranks: Ranks, strategy: ShardingStrategy, right: nn.Module) -> FSDP:
    """A wrapped `Fork`, the same on all ranks."""
    torch.manual_seed(0)
    model = Fork(right).to(ranks.device)
    model.left = FSDP(model.left, sharding_strategy=strategy)
    model.right = FSDP(model.right, sharding_strategy=strategy)
    return FSDP(model, sharding_strategy=strategy)


@contextmanager
def detailed() -> Iterator[None]:
    """The debug level that asks for checks."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def train(ranks: Ranks, model: FSDP, step: int) -> torch.Tensor:
    """One iteration; returns the loss."""
    torch.manual_seed(step)
    loss: torch.Tensor = model(torch.randn(8, 5, device=ranks.device)).sum()
    loss.backward()
    return loss.detach()


def messages(ranks: Ranks, model: FSDP, step: int) -> list[str]:
    """What one iteration warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ranks, model, step)
    return [str(each.message) for each in caught if str(each.message).startswith("Forward order")]


@strategies
@across(2)
def test_invalid_first_iter_order(ranks: Ranks, strategy: ShardingStrategy) -> None:
    """All ranks raise, before anything is gathered wrongly, and train rightly once they agree."""
    with detailed():
        model = fork(ranks, strategy, wide())
        model.module.goes_right = ranks.rank != 0
        words = (
            r"^Forward order differs across ranks: rank 0 is all-gathering parameters for \['left.weight'\] while rank "
            r"1 is all-gathering parameters for \['right.weight'\]"
        )
        with pytest.raises(RuntimeError, match=words):
            train(ranks, model, 0)
        model.module.goes_right = False
        loss = train(ranks, model, 0)
    right = wide()
    torch.manual_seed(0)
    plain = Fork(right).to(ranks.device)
    torch.manual_seed(0)
    torch.testing.assert_close(loss, plain(torch.randn(8, 5, device=ranks.device)).sum().detach())


@strategies
@across(2)
def test_number_of_parameters_differs(ranks: Ranks, strategy: ShardingStrategy) -> None:
    """The message says how many parameters each gathers where that differs."""
    with detailed():
        model = fork(ranks, strategy, narrow())
        model.module.goes_right = ranks.rank != 0
        words = (
            "^Forward order differs across ranks: rank 0 is all-gathering 1 parameters while rank 1 is all-gathering 2 "
            "parameters"
        )
        with pytest.raises(RuntimeError, match=words):
            train(ranks, model, 0)


@strategies
@pytest.mark.parametrize("iterations", [1, 3])
@across(2)
def test_invalid_later_iter_order(ranks: Ranks, strategy: ShardingStrategy, iterations: int) -> None:
    """A rank that departs from its own first iteration warns in that iteration alone; the others do not."""
    with detailed():
        model = fork(ranks, strategy, wide())
        for step in range(iterations):
            assert messages(ranks, model, step) == []
        model.module.goes_right = ranks.rank != 0
        seen = messages(ranks, model, iterations)
        if ranks.rank == 0:
            assert seen == []
        else:
            assert len(seen) == 1
            assert seen[0].startswith(f"{DIFFERS} {ranks.rank}. Collectives are unchecked and may give incorrect")
            assert "Expected to all-gather for ['left.weight'] but trying to all-gather" in seen[0]
            assert seen[0].endswith("['right.weight']")
        assert messages(ranks, model, iterations + 1) == []


@across(2)
def test_more_gathers_than_at_first(ranks: Ranks) -> None:
    """A second forward before the backward is more than the first iteration had."""
    with detailed():
        model = fork(ranks, ShardingStrategy.FULL_SHARD, wide())
        train(ranks, model, 0)
        x = torch.ones(8, 5, device=ranks.device)
        first = model(x)
        with pytest.warns(UserWarning, match="Expected to not all-gather any more parameters in the forward") as caught:
            second = model(x)
        (first + second).sum().backward()
        assert len(caught) == 2


@strategies
@across(2)
def test_train_eval(ranks: Ranks, strategy: ShardingStrategy) -> None:
    """Forwards in eval mode, or without gradients, end no iteration and belong to none."""
    with detailed():
        model = fork(ranks, strategy, wide())
        for epoch in range(2):
            for step in range(3):
                assert messages(ranks, model.train(), 3 * epoch + step) == []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.module.goes_right = True
                model.eval()(torch.ones(8, 5, device=ranks.device))
                with torch.no_grad():
                    model.train()(torch.ones(8, 5, device=ranks.device))
                model.module.goes_right = False
            assert not [each for each in caught if str(each.message).startswith("Forward order")]


def gathers(ranks: Ranks) -> tuple[list[int], list[int]]:
    """All-gathers in the forwards of three iterations: without checks, and with them."""

    def count() -> list[int]:
        model = fork(ranks, ShardingStrategy.SHARD_GRAD_OP, wide())
        counts = []
        for step in range(3):
            name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
            with patch(f"torch.distributed.{name}", side_effect=getattr(dist, name)) as gather:
                train(ranks, model, step)
            counts.append(gather.call_count)
        return counts

    unchecked = count()
    with detailed():
        return unchecked, count()


def test_checks_cost_two_gathers_a_unit_in_the_first_iteration_alone(ranks: Pools) -> None:
    # Two units run in a forward: the root and one of the two paths.
    assert ranks.run(2, gathers) == [([2, 2, 2], [6, 2, 2])] * 2
