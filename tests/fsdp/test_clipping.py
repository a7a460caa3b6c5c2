"""Clipping by the norm over all shards: that of ``torch.nn.utils.clip_grad_norm_`` on an unsharded model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fsdp_parity.models import group_of_own, wrap_fsdp
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import subtests
from fsdp_parity.training import ddp
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import MixedPrecision, ShardingStrategy
from torch import nn

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
ORDERS = [1.0, 2.0, 3.0, float("inf")]


def _plain(ranks: Ranks) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.Linear(5, 3)).to(ranks.device)


def _input(ranks: Ranks) -> torch.Tensor:
    generator = torch.Generator().manual_seed(ranks.rank)
    return (torch.randn(4, 6, generator=generator) * (1 + ranks.rank)).to(ranks.device)


def _wrapped(ranks: Ranks, inner: ShardingStrategy, strategy: ShardingStrategy, **settings: Any) -> FSDP:
    model = _plain(ranks)
    model[2] = wrap_fsdp(model[2], sharding_strategy=inner, **settings)
    return wrap_fsdp(model, sharding_strategy=strategy, **settings)


@across(3)
@subtests(order=ORDERS, use_orig_params=[False, True])
def test_an_expert_of_each_rank(ranks: Ranks, order: float, use_orig_params: bool) -> None:
    """Of modules over groups of one rank the largest counts, on all: one factor for all pieces of what they share."""
    model, reference = _plain(ranks), _plain(ranks)
    for each in (model, reference):
        torch.manual_seed(ranks.rank)
        each[3] = nn.Linear(5, 3).to(ranks.device)
    model[3] = wrap_fsdp(model[3], group_of_own(ranks.group), use_orig_params=use_orig_params)
    model = wrap_fsdp(model, use_orig_params=use_orig_params)
    for each in (model, reference):
        each(_input(ranks)).square().sum().backward()
    for name, parameter in reference.named_parameters():
        if not name.startswith("3"):
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= ranks.world_size
    expert_norm = nn.utils.get_total_norm([p.grad for p in reference[3].parameters() if p.grad is not None], order)
    torch.distributed.all_reduce(expert_norm, op=torch.distributed.ReduceOp.MAX)
    dense = [p.grad for name, p in reference.named_parameters() if not name.startswith("3") and p.grad is not None]
    expected = nn.utils.get_total_norm([*dense, expert_norm], order)
    nn.utils.clip_grads_with_norm_(reference.parameters(), 0.5, expected)
    torch.testing.assert_close(model.clip_grad_norm_(0.5, order), expected)
    expert = reference[3].weight.grad
    assert expert is not None
    own = model[3].weight.grad if use_orig_params else model[3]._handle.sharded_grad[:15].view(3, 5)
    torch.testing.assert_close(own, expert)


@across(2)
@subtests(strategy=STRATEGIES, mixed=[False, True], use_orig_params=[False, True])
def test_dtypes_of_the_norm(ranks: Ranks, strategy: ShardingStrategy, mixed: bool, use_orig_params: bool) -> None:
    """The norm comes in the dtype of the gradients, of fp16 and fp32 ones in fp32, and is right in it."""
    policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, keep_low_precision_grads=True)
    model = _plain(ranks)
    settings = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    # Where one rank has no part of some parameter, its dtype must not decide.
    model[3] = wrap_fsdp(model[3], mixed_precision=None if mixed else policy, **settings)
    model = wrap_fsdp(model, mixed_precision=policy, **settings)
    hook = None
    if mixed:
        hook = model.module[3].register_forward_pre_hook(lambda _, args: (args[0].float(),))
    reference = ddp(ranks, _plain(ranks))
    for each in (model, reference):
        each(_input(ranks)).float().square().mean().backward()
    norm = model.clip_grad_norm_(0.25, 2.0)
    assert norm.dtype == (torch.float32 if mixed else torch.float16)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.25, 2.0)
    torch.testing.assert_close(norm.float(), expected, rtol=1e-2, atol=1e-2)
    assert all(p.grad.dtype in (torch.float16, norm.dtype) for p in model.parameters() if p.grad is not None)
    if hook is not None:
        hook.remove()


@across(2)
@subtests(use_orig_params=[False, True])
def test_without_gradients(ranks: Ranks, use_orig_params: bool) -> None:
    """Zero, with a warning that names the rank; a rank that alone has none still learns the norm."""
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = _wrapped(ranks, *STRATEGIES[:2], use_orig_params=use_orig_params, mixed_precision=half)
    model(_input(ranks))
    text = re.escape(
        f"Called FSDP.clip_grad_norm_() on rank {ranks.rank} with no gradients -- returning the total norm in the "
        "default dtype torch.float32"
    )
    with pytest.warns(UserWarning, match=text):
        norm = model.clip_grad_norm_(1)
    assert norm.dtype == torch.float32
    assert norm.device == ranks.device
    assert norm.item() == 0
    single = wrap_fsdp(nn.Linear(1, 1, bias=False, device=ranks.device), use_orig_params=True)
    single(torch.full((1,), 3.0, device=ranks.device)).backward()
    if ranks.rank == 0:
        assert single.clip_grad_norm_(1).item() == 3
        assert single.module.weight.grad.item() == pytest.approx(1, abs=1e-5)
    else:
        assert single.module.weight.numel() == 0
        single.module.weight.grad = None
        with pytest.warns(UserWarning, match=text):
            assert single.clip_grad_norm_(1).item() == 3


@across(2)
@subtests(strategy=STRATEGIES, order=[2.0, float("inf")])
def test_infinite_gradients(ranks: Ranks, strategy: ShardingStrategy, order: float) -> None:
    """A gradient that is infinite on one rank makes the norm infinite on all, and what is finite zero."""
    model = wrap_fsdp(nn.Linear(3, 3, device=ranks.device), sharding_strategy=strategy)
    model(torch.ones(3, device=ranks.device)).sum().backward()
    gradient = model._handle.flat_param.grad
    assert gradient is not None
    everywhere = strategy is ShardingStrategy.NO_SHARD
    if ranks.rank == 0 or everywhere:
        gradient[0] = float("inf")
    assert model.clip_grad_norm_(1.0, order).item() == float("inf")
    finite = gradient[1:] if ranks.rank == 0 or everywhere else gradient
    assert finite.abs().max().item() == 0
