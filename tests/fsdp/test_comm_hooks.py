"""Communication hooks: PyTorch's own in the place of the reduction, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.models import wrap_fsdp
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import subtests
from fsdp_parity.training import ddp, full_parameters
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import MixedPrecision, ShardingStrategy
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
COMPRESSED = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}


def _plain(ranks: Ranks) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(ranks.device)


def _wrapped(ranks: Ranks, **settings: Any) -> FSDP:
    model = _plain(ranks)
    model[2] = wrap_fsdp(model[2], **settings)
    return wrap_fsdp(model, **settings)


def _input(ranks: Ranks, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + ranks.rank)
    return torch.randn(5, 4, generator=generator).to(ranks.device)


def _train(ranks: Ranks, model: nn.Module, accumulates: bool) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(2):
        if accumulates and isinstance(model, FSDP | nn.parallel.DistributedDataParallel):
            with model.no_sync():
                model(_input(ranks, step + 10)).square().mean().backward()
        loss = model(_input(ranks, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@across(1, 3)
@subtests(
    strategy=STRATEGIES,
    compressed=[None, torch.float16, torch.bfloat16],
    accumulates=[False, True],
    use_orig_params=[False, True],
)
def test_hooks_against_ddp(
    ranks: Ranks, strategy: ShardingStrategy, compressed: torch.dtype | None, accumulates: bool, use_orig_params: bool
) -> None:
    """PyTorch's default hooks average as DDP does, over several steps, with and without ``no_sync``."""
    settings = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    hooked, reference = _wrapped(ranks, **settings), ddp(ranks, _plain(ranks))
    state: default_hooks.DefaultState
    if compressed is None:
        state = default_hooks.DefaultState(ranks.group)
        whole = hooked.sharding_strategy is ShardingStrategy.NO_SHARD
        hook = default_hooks.allreduce_hook if whole else default_hooks.reduce_scatter_hook
        built_in = _wrapped(ranks, **settings)
    else:
        state = default_hooks.LowPrecisionState(ranks.group)
        hook = COMPRESSED[compressed]
        built_in = _wrapped(ranks, mixed_precision=MixedPrecision(reduce_dtype=compressed), **settings)
    hooked.register_comm_hook(state, hook)
    # The compressing hooks of PyTorch record streams, which the CPU's do not have in any release up to 2.13.
    records = mock.patch.object(torch.Tensor, "record_stream") if ranks.on_cpu else nullcontext()
    with records:
        losses = [_train(ranks, each, accumulates) for each in (hooked, reference, built_in)]
    # bf16 keeps 8 bits of a gradient; ranks add in different orders in fp16 and bf16.
    rough = {None: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[compressed]
    torch.testing.assert_close(losses[0], losses[1], rtol=rough, atol=rough)
    mine, theirs = full_parameters(hooked), full_parameters(built_in)
    for name, parameter in reference.module.named_parameters():
        torch.testing.assert_close(mine[name], parameter.detach(), rtol=rough, atol=rough)
        torch.testing.assert_close(mine[name], theirs[name], rtol=rough, atol=rough)


@across(2)
@subtests(strategy=STRATEGIES, use_orig_params=[False, True])
def test_gradients_by_hand(ranks: Ranks, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """A hook sees the whole unreduced gradient once a backward, and what it writes is the gradient."""
    model = wrap_fsdp(
        nn.Linear(1, 6, bias=False, device=ranks.device), sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    seen: list[torch.Tensor] = []

    def hook(state: dict[str, float], gradient: torch.Tensor, shard: torch.Tensor | None = None) -> None:
        seen.append(gradient.clone())
        if shard is None:
            gradient.fill_(state["value"])
        else:
            shard.fill_(state["value"])

    state = {"value": 4.0}
    model.register_comm_hook(state, hook)
    for step in range(2):
        model.zero_grad()
        state["value"] = 4.0 + step
        model(torch.full((1,), 1.0 + ranks.rank, device=ranks.device)).sum().backward()
        assert len(seen) == step + 1
        assert torch.equal(seen[-1][:6], torch.full((6,), 1.0 + ranks.rank, device=ranks.device))
        gradient = model._handle.flat_param.grad
        assert gradient is not None
        assert gradient.unique().tolist() == [4.0 + step]


@across(2)
@subtests(strategy=STRATEGIES, use_orig_params=[False, True])
def test_registration(ranks: Ranks, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """Every instance has the hook and its state; another hook, and a registration further in, are refused."""

    def hook(state: object, gradient: torch.Tensor) -> None:
        raise AssertionError("nothing runs here")

    settings = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model = _wrapped(ranks, **settings)
    state = object()
    assert [each._comm_hook for each in FSDP.fsdp_modules(model)] == [None, None]
    assert model.check_is_root()
    with pytest.raises(AssertionError) as inner:
        model[2].register_comm_hook(state, hook)
    assert str(inner.value) == "register_comm_hook can only be called on a root instance."
    assert f"'2' (rank {ranks.rank})" in inner.value.__notes__[0]
    with pytest.raises(ValueError, match="must be callable"):
        model.register_comm_hook(state, "hook")
    model.register_comm_hook(state, hook)
    for each in FSDP.fsdp_modules(model):
        assert each._comm_hook is hook
        assert each._comm_hook_state is state
    with pytest.raises(AssertionError) as again:
        model.register_comm_hook(state, hook)
    assert str(again.value) == "A communication hook is already registered"
    assert f"(rank {ranks.rank})" in again.value.__notes__[0]
    other = _wrapped(ranks, **settings)
    other[2]._comm_hook = hook
    with pytest.raises(AssertionError, match=r"^A communication hook is already registered"):
        other.register_comm_hook(state, hook)
    assert other._comm_hook is None


@across(2)
def test_hybrid_is_refused(ranks: Ranks) -> None:
    """Hybrid strategies reduce twice, and take no hook."""
    whole = dist.new_group()
    alone, _ = dist.new_subgroups(1)
    model = wrap_fsdp(
        nn.Linear(2, 2, device=ranks.device), (whole, alone), sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
    with pytest.raises(AssertionError, match="Communication hook is not supported for hybrid strategies"):
        model.register_comm_hook(None, print)
