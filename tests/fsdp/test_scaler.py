"""The sharded gradient scaler: ranks agree on which steps are skipped, and on the scale."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.models import DummyProcessGroup
from fsdp_parity.ranks import Pools, Ranks
from polyshard_fsdp.sharded_grad_scaler import ShardedGradScaler
from torch import nn


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


def alone(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler("cpu", process_group=DummyProcessGroup(0, 1), **{"init_scale": 2.0, **options})


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


def test_one_rank_behaves_as_the_unsharded_scaler() -> None:
    def run(scaler: torch.amp.GradScaler) -> list[tuple[float, float, list[float]]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        seen = []
        for step in range(8):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3)).square().mean()
            scaler.scale(loss).backward()
            if step == 3:
                assert model.bias.grad is not None
                model.bias.grad[0] = float("nan")
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), norm.nan_to_num(-1.0).item(), model.weight.flatten().tolist()))
        return seen

    options: dict[str, Any] = {"init_scale": 16.0, "growth_interval": 3}
    ours, torchs = run(alone(**options)), run(torch.amp.GradScaler("cpu", **options))
    assert [scale for scale, _, _ in ours] == [16.0, 16.0, 32.0, 16.0, 16.0, 16.0, 32.0, 32.0]
    assert ours == torchs


def test_outputs_of_any_nesting_are_scaled_in_their_own_dtype() -> None:
    scaler = alone(init_scale=4.0)
    four = torch.full((1,), 4.0)
    half = torch.tensor(0.5, dtype=torch.float16)
    first, pair, (third, inner) = scaler.scale([four, (four, half), [four, iter([half])]])  # type: ignore[list-item]
    assert first.item() == 16.0
    assert isinstance(pair, tuple)
    assert [tensor.item() for tensor in (*pair, third, *inner)] == [16.0, 2.0, 16.0, 2.0]
    assert pair[1].dtype is torch.float16
    assert scaler.scale(torch.tensor(1.0, dtype=torch.bfloat16)).dtype is torch.bfloat16


@torch.sparse.check_sparse_tensor_invariants()  # Or torch 2.11 warns that nobody decided about it.
def test_sparse_gradients_are_unscaled_and_checked() -> None:
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])

    def step(values: list[float], dtype: torch.dtype) -> tuple[bool, torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
        parameter.grad = torch.sparse_coo_tensor(indices, values, (2, 3), dtype=dtype)
        scaler = alone()
        scaler.scale(torch.ones(()))
        scaler.step(torch.optim.SGD([parameter], lr=1.0))
        return bool(parameter.abs().sum() > 0), parameter.grad.to_dense()

    # Said here once, or torch 2.11 warns of the first sparse tensor of a process.
    with torch.sparse.check_sparse_tensor_invariants():
        stepped, gradient = step([16.0, 32.0, 64.0], torch.float32)
        assert stepped
        assert gradient.tolist() == [[0.0, 0.0, 8.0], [16.0, 0.0, 32.0]]
        assert not step([16.0, 32.0, math.inf], torch.float32)[0]
        indices = torch.tensor([[1, 1, 1], [0, 0, 2]])
        largest = torch.finfo(torch.float16).max
        # Two of fp16's largest numbers at one place are finite each, and their sum is not.
        assert not step([largest, largest, 0.0], torch.float16)[0]


def test_calls_out_of_order_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = alone()
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update\."):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since the last"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)\."):
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(3.0)  # type: ignore[call-overload]
    # The refused calls have changed nothing: one gradient of 1, divided by the scale of 2.
    assert parameter.tolist() == [-0.5, -0.5]
    scaler.update()
    scaler.unscale_(optimizer)


def test_half_precision_gradients_are_refused_on_request() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        alone()._unscale_grads_(torch.optim.SGD([parameter]), torch.ones(1), torch.zeros(1), False)


def test_a_disabled_scaler_does_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), float("inf"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = ShardedGradScaler("cpu", enabled=False)
    outputs = [torch.ones(1)]
    assert scaler.scale(outputs) is outputs
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [-math.inf, -math.inf]
    assert scaler.get_scale() == 1.0


def test_the_scale_is_saved_and_restored() -> None:
    scaler = alone(init_scale=32.0)
    scaler.scale(torch.ones(()))
    other = alone()
    other.load_state_dict(scaler.state_dict())
    assert other.scale(torch.ones(())).item() == 32.0
