"""When FSDP gathers and lets go, in calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.models import wrap_fsdp
from fsdp_parity.ranks import Pools, Ranks
from fsdp_parity.training import assert_same_parameters, ddp, full_parameters
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy, _runtime_utils
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn

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


def ends_of_backward(ranks: Ranks, inputs_require_grad: bool) -> list[int]:
    """How often a unit's own backward let go of it: with the first unit frozen, then trained."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3).to(ranks.device) for _ in range(LAYERS)]
    for parameter in layers[0].parameters():
        parameter.requires_grad_(False)
    model: FSDP = wrap_fsdp(
        nn.Sequential(*(wrap_fsdp(layer, use_orig_params=True) for layer in layers)), use_orig_params=True
    )
    seen = []
    for trained in (False, True):
        for parameter in model.module[0].parameters():
            parameter.requires_grad_(trained)
        original = _runtime_utils._post_backward_reshard
        with mock.patch.object(
            _runtime_utils, "_post_backward_reshard", side_effect=original, autospec=True
        ) as post_backward:
            x = torch.randn(2, 3, device=ranks.device, requires_grad=inputs_require_grad)
            model(x).sum().backward()
            seen.append(post_backward.call_count)
    return seen


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


@pytest.mark.parametrize(("inputs_require_grad", "expected"), [(True, [6, 6]), (False, [5, 6])])
def test_ends_of_backward(ranks: Pools, inputs_require_grad: bool, expected: list[int]) -> None:
    """A frozen unit whose inputs want no gradient is let go of when the whole backward ends."""
    assert ranks.run(2, ends_of_backward, inputs_require_grad) == [expected, expected]
