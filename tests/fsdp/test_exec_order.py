"""What PyTorch's FSDP tests ask of the execution-order checks under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.models import wrap_fsdp
from fsdp_parity.ranks import Pools, Ranks, across
from fsdp_parity.training import assert_same_parameters, ddp, full_parameters
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy
from polyshard_fsdp.wrap import ModuleWrapPolicy
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
@pytest.mark.parametrize(
    ("right", "words"),
    [
        (wide, r"rank 0 is all-gathering parameters for \['left.weight'\] while rank 1 .* for \['right.weight'\]"),
        (narrow, r"rank 0 .* for \['left.weight'\] while rank 1 .* for \['right.0.weight', 'right.1.weight'\]"),
    ],
)
@across(2)
def test_invalid_first_iter_order(
    ranks: Ranks, strategy: ShardingStrategy, right: Callable[[], nn.Module], words: str
) -> None:
    """All ranks raise, before anything is gathered wrongly, and train rightly once they agree."""
    with detailed():
        model = fork(ranks, strategy, right())
        model.module.goes_right = ranks.rank != 0
        with pytest.raises(RuntimeError, match=f"^Forward order differs across ranks: {words}"):
            train(ranks, model, 0)
        model.module.goes_right = False
        loss = train(ranks, model, 0)
    other = right()
    torch.manual_seed(0)
    plain = Fork(other).to(ranks.device)
    torch.manual_seed(0)
    torch.testing.assert_close(loss, plain(torch.randn(8, 5, device=ranks.device)).sum().detach())


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
            assert "Expected to all-gather for [['left.weight']] but trying to all-gather" in seen[0]
            assert seen[0].endswith("[['right.weight']]")
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


LAYERS = 6


@contextmanager
def _counted(name: str) -> Iterator[list[int]]:
    """The number of calls of ``torch.distributed.<name>``, which go through."""
    # The name that newer versions of torch prefer, where the old one would warn.
    newer = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
    original: Callable[..., Any] = getattr(dist, newer, None) or getattr(dist, name)
    calls = [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    with mock.patch(f"torch.distributed.{name}", counting):
        yield calls


def gathers_under_no_sync(ranks: Ranks, strategy: str) -> list[tuple[int, int]]:
    """(gathers, reduce-scatters) of each of five iterations; the first two are under ``no_sync``.

    The parameters after every synchronising iteration's step are DDP's.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(LAYERS))).to(ranks.device)
    sharded = wrap_fsdp(
        copy.deepcopy(plain),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
    )
    reference = ddp(ranks, plain)
    models = (sharded, reference)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    generator = torch.Generator().manual_seed(1 + ranks.rank)
    seen = []
    for turn in range(5):
        x = torch.randn(4, 3, generator=generator).to(ranks.device)
        with _counted("all_gather_into_tensor") as gathers, _counted("reduce_scatter_tensor") as reductions:
            _run(sharded, x, turn < 2)
            seen.append((gathers[0], reductions[0]))
        _run(reference, x, turn < 2)
        if turn >= 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_parameters(full_parameters(sharded), dict(plain.named_parameters()))
    return seen


def _run(model: Any, x: torch.Tensor, without_sync: bool) -> None:
    if without_sync:
        with model.no_sync():
            model(x).square().sum().backward()
    else:
        model(x).square().sum().backward()


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # Six units; the root, whose parameters would stay, has none.
        ("FULL_SHARD", [(12, 0), (12, 0), (12, 6), (12, 6), (12, 6)]),
        # Kept from one iteration under no_sync to the next forward.
        ("SHARD_GRAD_OP", [(6, 0), (0, 0), (0, 6), (6, 6), (6, 6)]),
        ("NO_SHARD", [(0, 0)] * 5),
    ],
)
def test_gathers_under_no_sync(ranks: Pools, strategy: str, expected: list[tuple[int, int]]) -> None:
    assert ranks.run(2, gathers_under_no_sync, strategy) == [expected, expected]
