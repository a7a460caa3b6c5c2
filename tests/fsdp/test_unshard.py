"""Whole parameters outside of compute, and gathers ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import polyshard
import polyshard.checkpoint
import polyshard.state
import pytest
import torch
import torch.distributed as dist
from fsdp_parity.models import wrap_fsdp
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import named, pairs, subtests
from fsdp_parity.training import ddp, full_parameters
from polyshard.errors import UnsupportedError
from polyshard_fsdp import CPUOffload, FlatParameter, MixedPrecision, ShardingStrategy, _runtime_utils
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import FLAT_PARAM
from torch import nn

HALF = MixedPrecision(param_dtype=torch.float16)
CUT = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
STRATEGIES = [*CUT, ShardingStrategy.NO_SHARD]


def _plain(ranks: Ranks) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False)).to(ranks.device)


def _wrapped(ranks: Ranks, **settings: Any) -> FSDP:
    model = _plain(ranks)
    model[0] = wrap_fsdp(model[0], **settings)
    return wrap_fsdp(model, **settings)


def _input(ranks: Ranks) -> torch.Tensor:
    return torch.arange(10.0, device=ranks.device).view(2, 5) * (ranks.rank + 1) / 10


@across(2)
@subtests(use_orig_params=[True, False])
def test_moving_and_casting_whole_parameters(ranks: Ranks, use_orig_params: bool) -> None:
    """Inside of the context parameters stay whole where the module is moved or cast; outside all is as before."""
    weights = [layer.weight.detach() for layer in _plain(ranks)]
    model = _wrapped(ranks, use_orig_params=use_orig_params)
    before = model(_input(ranks))
    with FSDP.summon_full_params(model, writeback=False):
        for dtype in (torch.float32, torch.float64):
            model.module.to(ranks.device, dtype)
            for whole, weight in zip(model.parameters(), weights, strict=True):
                assert whole.dtype == dtype
                assert torch.equal(whole.detach().float(), weight)
    assert torch.equal(model(_input(ranks)), before)


@across(1, 2)
@subtests(
    writeback=[True, False],
    through_flat=[True, False],
    strategy=STRATEGIES,
    offload=[False, True],
    use_orig_params=[True, False],
)
def test_writes_through_flat_parameters(
    ranks: Ranks, writeback: bool, through_flat: bool, strategy: ShardingStrategy, offload: bool, use_orig_params: bool
) -> None:
    """What is written through a whole flat parameter, or through a parameter, is kept with ``writeback``, else not."""
    settings = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model = _wrapped(ranks, cpu_offload=CPUOffload(offload), **settings)
    reference = _plain(ranks)
    # Where nothing is cut and nothing moved, there is no copy to drop.
    kept = writeback or (model.sharding_strategy is ShardingStrategy.NO_SHARD and not offload)
    with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
        for each in [model, model[0]]:
            for tensor in [each._handle.flat_param] if through_flat else list(each.parameters()):
                tensor.fill_(3.0)
    for weight, value in zip(reference.parameters(), full_parameters(model).values(), strict=True):
        expected = torch.full_like(weight, 3.0) if kept else weight
        assert torch.equal(value.to(weight.device), expected)
    # The shard's own padding is nobody's, and a step after the context works with what was kept.
    output = model(_input(ranks))
    if kept:
        for weight in reference.parameters():
            nn.init.constant_(weight, 3.0)
    torch.testing.assert_close(output, reference(_input(ranks)))


def _assert_shards(ranks: Ranks, flats: list[FlatParameter], references: Any, **tolerance: float) -> None:
    for flat, reference in zip(flats, references, strict=True):
        assert reference.grad is not None
        size = flat.numel()
        whole = torch.zeros(size * ranks.world_size, device=reference.device)
        whole[: reference.numel()] = reference.grad.view(-1)
        own = whole[size * ranks.rank : size * (ranks.rank + 1)]
        used = max(0, min(size, reference.numel() - size * ranks.rank))
        shard = flat._handle.sharded_grad
        assert shard is not None
        assert shard.numel() == size
        torch.testing.assert_close(shard[:used], own[:used], **tolerance)


@across(2, 3)
@subtests(strategy=STRATEGIES, writeback=[True, False])
def test_gradients_against_ddp(ranks: Ranks, strategy: ShardingStrategy, writeback: bool) -> None:
    """``with_grads``: DDP's gradients, after a backward and after one more forward; changes are kept with writeback."""
    model = _wrapped(ranks, sharding_strategy=strategy, use_orig_params=True)
    reference = ddp(ranks, _plain(ranks))
    kept = writeback or strategy is ShardingStrategy.NO_SHARD
    model(_input(ranks)).square().sum().backward()
    reference(_input(ranks)).square().sum().backward()
    for in_between in [False, True]:
        output = model(_input(ranks)).sum() if in_between else None
        with FSDP.summon_full_params(model, with_grads=True, writeback=writeback):
            for theirs, mine in zip(reference.parameters(), model.parameters(), strict=True):
                assert mine.grad is not None
                torch.testing.assert_close(mine.grad, theirs.grad)
                assert theirs.grad is not None
                assert theirs.grad.count_nonzero() > 0
                mine.grad *= 2
                if kept:
                    theirs.grad *= 2
        if output is not None:
            output.backward()
            reference(_input(ranks)).sum().backward()
            with FSDP.summon_full_params(model, with_grads=True):
                for theirs, mine in zip(reference.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, theirs.grad)


@across(3)
def test_gradients_that_nobody_has(ranks: Ranks) -> None:
    """No gradient on any rank is None inside; a frozen parameter has none; one emptied inside is gone outside."""
    for strategy in STRATEGIES:
        with named({"strategy": strategy}):
            model = _wrapped(ranks, sharding_strategy=strategy, use_orig_params=True)
            assert all(handle.sharded_grad is None for handle in (model._handle, model[0]._handle))
            with FSDP.summon_full_params(model, with_grads=True):
                assert [parameter.grad for parameter in model.parameters()] == [None, None]
            model[0].weight.requires_grad_(False)
            model(_input(ranks)).sum().backward()
            with FSDP.summon_full_params(model, with_grads=True):
                first, second = model.parameters()
                assert first.grad is None
                assert second.grad is not None
                second.grad = None
            assert all(parameter.grad is None for parameter in model.parameters())
            assert model._handle.sharded_grad is None


@across(2)
@subtests(strategy=STRATEGIES, mixed_precision=[None, HALF], use_orig_params=[True, False])
def test_unreduced_gradients_survive(ranks: Ranks, strategy: ShardingStrategy, **settings: Any) -> None:
    """Gradients of ``no_sync`` are the same objects' values before and after a context, and are reduced later."""
    model = _wrapped(ranks, sharding_strategy=strategy, **settings)
    reference = ddp(ranks, _plain(ranks))
    with model.no_sync():
        model(_input(ranks)).sum().backward()
    with reference.no_sync():
        reference(_input(ranks)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in before)
    saved = [gradient.clone() for gradient in before]
    with FSDP.summon_full_params(model):
        pass
    for parameter, gradient in zip(model.parameters(), saved, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    if settings["use_orig_params"] and strategy in CUT:
        with pytest.raises(AssertionError, match=r"whole and not reduced"), _grads_of(model):
            pass
    model(_input(ranks)).sum().backward()
    reference(_input(ranks)).sum().backward()
    tolerance = {} if settings["mixed_precision"] is None else {"rtol": 1e-2, "atol": 1e-2}
    if strategy in CUT:
        flats = [model[0]._handle.flat_param, model._handle.flat_param]
        _assert_shards(ranks, flats, reference.parameters(), **tolerance)
        return
    for theirs, handle in zip(reference.parameters(), (model[0]._handle, model._handle), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(handle.sharded_grad, theirs.grad.view(-1), **tolerance)


def _grads_of(model: nn.Module) -> Any:
    return FSDP.summon_full_params(model, with_grads=True)


@across(2)
def test_the_root_is_found(ranks: Ranks) -> None:
    """The outermost instances are found when they are used; ``apply`` leaves that open."""
    model = nn.Sequential(
        _wrapped(ranks), wrap_fsdp(nn.Linear(3, 3, device=ranks.device)), nn.Linear(3, 3).to(ranks.device)
    )
    instances = FSDP.fsdp_modules(model)
    with FSDP.summon_full_params(model):
        assert all(not name.endswith(FLAT_PARAM) for name, _ in model.named_parameters())
    assert [each._is_root for each in instances] == [True, False, True]
    fresh = _wrapped(ranks)
    fresh.apply(lambda _: None)
    assert fresh._root is None
    fresh(_input(ranks)).sum().backward()
    assert [each._is_root for each in FSDP.fsdp_modules(fresh)] == [True, False]
    alone = _wrapped(ranks)
    with FSDP.summon_full_params(alone[0]):
        shapes = {name: tuple(parameter.shape) for name, parameter in alone[0].named_parameters()}
        assert shapes == {"weight": (5, 5)}
    assert alone[0]._is_root is True
    with pytest.raises(AssertionError, match=r"`_is_root` should not have been set yet"):
        alone(_input(ranks))


@across(2)
def test_functions_of_polyshard(ranks: Ranks) -> None:
    """What saves, shows, loads or averages whole values names the wrapper's own functions, and changes nothing."""
    refusal = (
        r"FullyShardedDataParallel of polyshard_fsdp, whose ranks may cut '1\.weight' inside of its rows \(rank \d\)\. "
        "Use the wrapper's own state_dict, optim_state_dict"
    )
    expected = {f"{n}.weight": layer.weight.detach() for n, layer in enumerate(_plain(ranks))}
    for use_orig_params in (True, False):
        model = _wrapped(ranks, use_orig_params=use_orig_params)
        model(_input(ranks)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        calls: list[Callable[[], object]] = [
            lambda model=model: polyshard.stream(model),
            lambda model=model: polyshard.load_stream(model, expected.items()),
            lambda model=model: polyshard.state.get_model_state_dict(model),
            lambda model=model: polyshard.state.set_model_state_dict(model, expected),
            lambda model=model, own=optimizer: polyshard.state.get_optimizer_state_dict(model, own),
            lambda model=model, own=optimizer: polyshard.checkpoint.save("nowhere", 1, model, own),
            lambda model=model: polyshard.checkpoint.load("nowhere", model),
            lambda model=model: polyshard.optim.AveragedWeights(model, 0.5),
        ]
        for call in calls:
            with pytest.raises(UnsupportedError, match=refusal):
                call()
        if not use_orig_params:
            shown = polyshard.unsharded(model)
            with pytest.raises(UnsupportedError, match=r"^unsharded\(\): the module of '1.weight' has"), shown:
                pass
        whole = _input(ranks) @ expected["0.weight"].T @ expected["1.weight"].T
        torch.testing.assert_close(model(_input(ranks)), whole)


@across(2)
@subtests(strategy=STRATEGIES, asynchronous=[True, False], use_orig_params=[True, False])
def test_gathers_ahead(ranks: Ranks, strategy: ShardingStrategy, asynchronous: bool, use_orig_params: bool) -> None:
    """A gather issued before the forward serves it, unless the parameters were written to in between."""
    model = _wrapped(ranks, sharding_strategy=strategy, use_orig_params=use_orig_params)
    reference = ddp(ranks, _plain(ranks))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    assert model.check_is_root()
    real = _runtime_utils._unshard
    for written in [False, False, True, False]:
        with mock.patch.object(_runtime_utils, "_unshard", side_effect=real) as gather:
            waiting = model[0]._unshard(async_op=asynchronous)
            assert (waiting is not None) is asynchronous
            if written:
                with FSDP.summon_full_params(model), torch.no_grad():
                    model[0].weight.mul_(2)
                with torch.no_grad():
                    reference.module[0].weight.mul_(2)
            output = model(_input(ranks))
            expected = 0 if strategy is ShardingStrategy.NO_SHARD else 2 + written
            assert gather.call_count == expected, (gather.call_count, written)
        theirs = reference(_input(ranks))
        torch.testing.assert_close(output, theirs)
        for loss, optimizer in zip((output, theirs), optimizers, strict=True):
            loss.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model._wait_unshard_streams_on_current_stream()


@across(2)
def test_write_between_forward_and_backward(ranks: Ranks) -> None:
    """Written whole parameters are what every later gather reads, in whatever place of the step they were written."""
    for case in pairs({"use_orig_params": [True, False], "no_grad": [True, False], "mixed_precision": [None, HALF]}):
        with named(case):
            half = case["mixed_precision"] is not None
            settings = {"use_orig_params": case["use_orig_params"], "mixed_precision": case["mixed_precision"]}
            model = _wrapped(ranks, **settings)
            reference = _plain(ranks)
            with torch.no_grad() if case["no_grad"] else nullcontext():
                output = model(_input(ranks))
            with FSDP.summon_full_params(model), torch.no_grad():
                model[0].weight.fill_(0.5)
                model[1].weight.fill_(0.25)
            # What autograd saved in half precision is another copy, which it refuses.
            if not case["no_grad"] and not half:
                output.sum().backward()
                # The inner unit was gathered again: its backward is that of what was written, over the same inputs.
                model.zero_grad()
            for weight, value in zip(reference.parameters(), (0.5, 0.25), strict=True):
                nn.init.constant_(weight, value)
            expected = reference(_input(ranks))
            tolerance = {"rtol": 1e-2, "atol": 1e-2} if half else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(model(_input(ranks)).float(), expected, **tolerance)
    dist.barrier(ranks.group)
