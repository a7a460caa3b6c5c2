"""What the sharded gradient scaler does on every rank."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from polyshard_fsdp.sharded_grad_scaler import ShardedGradScaler

from .ranks import Ranks


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
