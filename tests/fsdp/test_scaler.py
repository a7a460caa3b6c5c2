"""The sharded gradient scaler: ranks agree on which steps are skipped, and on the scale."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.ranks import Pools, Ranks
from polyshard_fsdp.sharded_grad_scaler import ShardedGradScaler


def _scaler(ranks: Ranks, *, init_scale: float = 8.0, growth_interval: int = 2) -> ShardedGradScaler:
    return ShardedGradScaler(
        ranks.device.type,
        init_scale=init_scale,
        backoff_factor=0.25,
        growth_factor=4.0,
        growth_interval=growth_interval,
        process_group=ranks.group,
    )


def scales_after_steps(ranks: Ranks, bad_rank: int, dtype: torch.dtype, value: float) -> list[tuple[float, float]]:
    """Four steps, of which ``bad_rank`` alone has a gradient of ``value`` in the second; (parameter, scale) after each.

    The learning rate is 1 and each gradient 1 after unscaling.
    """
    scaler = _scaler(ranks)
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype, device=ranks.device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    seen = []
    for step in range(4):
        loss = scaler.scale(torch.ones((), dtype=dtype, device=ranks.device))
        parameter.grad = torch.full_like(parameter, loss.item())
        if step == 1 and ranks.rank == bad_rank:
            parameter.grad[1] = value
        scaler.step(optimizer)
        scaler.update()
        assert len(set(parameter.tolist())) == 1, f"step {step}: {parameter}"
        seen.append((parameter[0].item(), scaler.get_scale()))
    return seen


def skips_without_gradients(ranks: Ranks) -> list[bool]:
    """Whether each of two steps was taken: rank 0 has no gradients at all, the last rank an infinity in the first."""
    scaler = _scaler(ranks)
    parameter = torch.nn.Parameter(torch.zeros(2, device=ranks.device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    taken = []
    for step in range(2):
        scaler.scale(torch.ones((), device=ranks.device))
        if ranks.rank > 0:
            bad = step == 0 and ranks.rank == ranks.world_size - 1
            parameter.grad = torch.full_like(parameter, float("inf") if bad else 1.0)
        with mock.patch.object(optimizer, "step", wraps=optimizer.step) as stepped:
            scaler.step(optimizer)
        taken.append(stepped.call_count == 1)
        scaler.update()
    return taken


def fused_optimizer_skips(ranks: Ranks) -> list[float]:
    """A parameter after each of two steps of an optimizer that looks at the scale itself; rank 1's first is NaN."""
    scaler = _scaler(ranks)
    parameter = torch.nn.Parameter(torch.zeros(2, device=ranks.device))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    seen = []
    for step in range(2):
        scaler.scale(torch.ones((), device=ranks.device))
        bad = step == 0 and ranks.rank == 1
        parameter.grad = torch.full_like(parameter, float("nan") if bad else scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        seen.append(parameter[0].item())
    return seen


def count_exchanges(ranks: Ranks) -> int:
    """All-reduces of one step of two optimizers."""
    scaler = _scaler(ranks)
    pair = [torch.nn.Parameter(torch.zeros(2, device=ranks.device)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in pair]
    scaler.scale(torch.ones((), device=ranks.device))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for parameter, optimizer in zip(pair, optimizers, strict=True):
            parameter.grad = torch.ones_like(parameter)
            scaler.step(optimizer)
        scaler.update()
    return all_reduce.call_count


def skips_with_offloaded_gradients(ranks: Ranks) -> list[tuple[float, float]]:
    """(offloaded, resident) parameters after each of two steps, where rank 1's offloaded gradient is first infinite."""
    scaler = _scaler(ranks)
    offloaded = torch.nn.Parameter(torch.zeros(2))
    resident = torch.nn.Parameter(torch.zeros(2, device=ranks.device))
    optimizer = torch.optim.SGD([offloaded, resident], lr=1.0)
    seen = []
    for step in range(2):
        scaler.scale(torch.ones((), device=ranks.device))
        for parameter in (offloaded, resident):
            parameter.grad = torch.full_like(parameter, scaler.get_scale())
        if step == 0 and ranks.rank == 1:
            assert offloaded.grad is not None
            offloaded.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        seen.append((offloaded[1].item(), resident[0].item()))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_ranks_infinity_skips_the_step_of_all(ranks: Pools, value: float, dtype: torch.dtype) -> None:
    # Step 2 is skipped: the scale is backed off from 8 to 8 * 0.25 = 2, and the count of good steps starts again.
    # Steps 3 and 4 are good, two in a row, and the scale grows to 2 * 4 = 8.
    expected = [(-1.0, 8.0), (-1.0, 2.0), (-2.0, 2.0), (-3.0, 8.0)]
    assert ranks.run(3, scales_after_steps, 2, dtype, value) == [expected] * 3


def test_a_rank_without_gradients_takes_part(ranks: Pools) -> None:
    assert ranks.run(3, skips_without_gradients) == [[False, True]] * 3


def test_an_optimizer_that_checks_for_itself_skips_on_all_ranks(ranks: Pools) -> None:
    assert ranks.run(2, fused_optimizer_skips) == [[0.0, -1.0]] * 2


def test_offloaded_gradients_skip_the_step_of_all(ranks: Pools) -> None:
    assert ranks.run(2, skips_with_offloaded_gradients) == [[(0.0, 0.0), (-1.0, -1.0)]] * 2


def test_each_optimizer_takes_one_exchange(ranks: Pools) -> None:
    assert ranks.run(2, count_exchanges) == [2, 2]
