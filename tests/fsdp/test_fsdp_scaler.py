"""The sharded gradient scaler: ranks agree on which steps are skipped, and on the scale."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from fsdp_parity import scaling as bodies
from fsdp_parity.ranks import Pools
from polyshard_fsdp.sharded_grad_scaler import ShardedGradScaler
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler


class OneRank:
    """A dummy group of one rank, with which nothing need be exchanged."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def alone(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler("cpu", process_group=OneRank(), **{"init_scale": 2.0, **options})


def test_the_signature_is_that_of_pytorch() -> None:
    # The default group is None on both sides until there is one.
    ours = [(p.name, p.default) for p in inspect.signature(ShardedGradScaler).parameters.values()]
    theirs = [(p.name, p.default) for p in inspect.signature(TorchScaler).parameters.values()]
    assert ours == theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_ranks_infinity_skips_the_step_of_all(
    ranks: Pools, world_size: int, value: float, dtype: torch.dtype
) -> None:
    # Step 2 is skipped: the scale is backed off from 8 to 8 * 0.25 = 2, and the count of good steps starts again.
    # Steps 3 and 4 are good, two in a row, and the scale grows to 2 * 4 = 8.
    expected = [(-1.0, 8.0), (-1.0, 2.0), (-2.0, 2.0), (-3.0, 8.0)]
    assert ranks.run(world_size, bodies.scales_after_steps, world_size - 1, dtype, value) == [expected] * world_size


def test_a_rank_without_gradients_takes_part(ranks: Pools) -> None:
    assert ranks.run(3, bodies.skips_without_gradients) == [[False, True]] * 3


def test_an_optimizer_that_checks_for_itself_skips_on_all_ranks(ranks: Pools) -> None:
    assert ranks.run(2, bodies.fused_optimizer_skips) == [[0.0, -1.0]] * 2


def test_offloaded_gradients_skip_the_step_of_all(ranks: Pools) -> None:
    assert ranks.run(2, bodies.skips_with_offloaded_gradients) == [[(0.0, 0.0), (-1.0, -1.0)]] * 2


def test_each_optimizer_takes_one_exchange(ranks: Pools) -> None:
    assert ranks.run(2, bodies.count_exchanges) == [2, 2]


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
