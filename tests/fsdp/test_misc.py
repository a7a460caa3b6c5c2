"""Unused units, optimizers in backward, and unusual ways to train, beside a model without FSDP."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fsdp_parity.models import expected_warnings
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import run_subtests, subtests
from fsdp_parity.training import ddp, full_parameters
from polyshard_fsdp import CPUOffload, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._flat_param import _FSDP_USE_FULL_PREC_IN_EVAL, _FSDP_USE_UNSAFE_SETATTR
from polyshard_fsdp._runtime_utils import HOMOGENEOUS_ATTR_NAMES
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn

FS, SGO, NS = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
BOTH = [False, True]


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """``name`` set to ``value`` in this process, or absent."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


class Block(nn.Module):
    """A residual block of 7 features, whose parameters no number of ranks divides."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(7, 11)
        self.down = nn.Linear(11, 7)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x if self.inner is None else x + self.inner(x)


class Two(nn.Module):
    """Two branches of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(7, 7)
        self.a = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        unused = self.b(x)
        return self.a(x), unused


class Stack(nn.Module):
    """Blocks in line, run through ``run``."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = _call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def _call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x)
    return result


def _mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def batch(ranks: Ranks, rank: int, step: int) -> torch.Tensor:
    """Rank ``rank``'s input."""
    torch.manual_seed(100 * step + rank)
    return torch.randn(5, 7, device=ranks.device, dtype=torch.float64)


def build(ranks: Ranks, make: Callable[[], nn.Module]) -> nn.Module:
    """The same model on all ranks, in float64: sums in another order then stay close over many layers."""
    torch.manual_seed(0)
    return make().to(ranks.device, torch.float64)


def wrap(model: nn.Module, strategy: ShardingStrategy, use_orig_params: bool, classes: Any = Block) -> FSDP:
    """``model``, with every module of ``classes`` a unit."""
    with expected_warnings():
        return FSDP(
            model,
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            auto_wrap_policy=ModuleWrapPolicy({classes}),
        )


def step_in_backward(model: nn.Module, optimizer_class: Any, options: dict[str, Any]) -> None:
    """Give every parameter an optimizer of its own, as torch does it."""
    with warnings.catch_warnings():
        # What torch imports along is deprecated in torch itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(optimizer_class, model.parameters(), options, register_hook=False)


@across(2)
@subtests(strategy=[FS, SGO, NS], use_orig_params=BOTH)
def test_output_used_on_some_ranks(ranks: Ranks, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """Only rank 0's loss uses a unit: the others reduce zeros with it, and training is DDP's."""
    reference = ddp(ranks, build(ranks, Two), find_unused_parameters=True)
    model = wrap(build(ranks, Two), strategy, use_orig_params, nn.Linear)
    for each in (reference, model):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
        for step in range(4):
            a, b = each(batch(ranks, ranks.rank, step))
            uses = ranks.rank == 0 and step != 2
            (a.square().sum() + (b.square().sum() if uses else 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(full_parameters(model).items(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), msg=f"{name}: {{}}".format)


@across(2)
def test_optimizer_in_backward(ranks: Ranks) -> None:
    """Parameters step during backward as an optimizer would after it, and keep no gradient."""
    optimizers = [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})]
    axes = {"optimizer": optimizers, "strategy": [FS, SGO, NS], "offload": BOTH}
    run_subtests(axes, _optimizer_in_backward, ranks)


def _optimizer_in_backward(ranks: Ranks, optimizer: Any, strategy: ShardingStrategy, offload: bool) -> None:
    optimizer_class, options = optimizer
    plain = build(ranks, Stack)
    with expected_warnings():
        model = FSDP(
            build(ranks, Stack),
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            cpu_offload=CPUOffload(offload_params=offload),
        )
    step_in_backward(model, optimizer_class, options)
    reference = optimizer_class(plain.parameters(), **options)
    for step in range(3):
        everyone = [_mean(plain(batch(ranks, rank, step))) for rank in range(ranks.world_size)]
        torch.stack(everyone).mean().backward()
        _mean(model(batch(ranks, ranks.rank, step))).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        reference.step()
        reference.zero_grad()
        for (name, mine), wanted in zip(full_parameters(model).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.to(ranks.device), wanted.detach(), msg=f"{name}: {{}}".format)


@across(2)
def test_optimizer_in_backward_needs_original_parameters(ranks: Ranks) -> None:
    """One flat parameter with such an optimizer is refused before anything is computed."""
    model = wrap(build(ranks, Stack), FS, False)
    step_in_backward(model, torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(RuntimeError, match=r"^FSDP optimizer in backward only supported with use_orig_params=True!"):
        model(torch.ones(1, device=ranks.device))


class Told(nn.Module):
    """Writes down what is assigned to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 7))
        self.bias = nn.Parameter(torch.zeros(5))
        self.__dict__["seen"] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if "seen" in self.__dict__:
            self.seen.append((name, tuple(value.shape)))
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


@across(1, 2)
def test_setattr_overrides(ranks: Ranks) -> None:
    """A module's own ``__setattr__`` is told of whole parameters, unless the environment says not to; names stay."""
    for use_orig_params, value in itertools.product(BOTH, [None, "0", "1"]):
        with environment(_FSDP_USE_UNSAFE_SETATTR, value), expected_warnings():
            inner = Told().to(ranks.device)
            model = FSDP(inner, use_orig_params=use_orig_params)
        names = [name for name, _ in model.named_parameters()]
        inner.seen.clear()
        output = model(torch.ones(2, 7, device=ranks.device))
        assert torch.equal(output, torch.full_like(output, 7.0))
        assert inner.seen[:2] == ([] if value == "1" else [("weight", (5, 7)), ("bias", (5,))])
        output.sum().backward()
        assert [name for name, _ in model.named_parameters()] == names
        assert any(parameter.grad is not None for parameter in model.parameters())


@across(2)
def test_homogeneous_attributes(ranks: Ranks) -> None:
    """Instances of one model that differ in what must be the same are refused at the first forward."""
    assert HOMOGENEOUS_ATTR_NAMES == ["_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"]
    for attribute in HOMOGENEOUS_ATTR_NAMES:
        model = build(ranks, Stack)
        assert isinstance(model, Stack)
        in_eval = attribute == "_use_full_prec_in_eval"
        keyword = attribute.lstrip("_")
        model.blocks[0] = FSDP(model.blocks[0], **({} if in_eval else {keyword: False}))
        with environment(_FSDP_USE_FULL_PREC_IN_EVAL, "1" if in_eval else None):
            outer = FSDP(model, **({} if in_eval else {keyword: True}))
        with pytest.raises(ValueError, match=f"^Expects one homogeneous value for {attribute} but got"):
            outer(batch(ranks, ranks.rank, 0))


class Penalised(nn.Module):
    """A model that returns a parameter of its own, for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(self.block(x)), self.head.weight


@across(2)
@subtests(strategy=[FS, SGO], use_orig_params=BOTH)
def test_a_root_may_return_its_parameters(ranks: Ranks, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """They stay whole until its backward."""
    reference, model = ddp(ranks, build(ranks, Penalised)), wrap(build(ranks, Penalised), strategy, use_orig_params)
    for each in (reference, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            output, weight = each(batch(ranks, ranks.rank, step))
            (_mean(output) + weight.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(full_parameters(model).items(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), msg=f"{name}: {{}}".format)
