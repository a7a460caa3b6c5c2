"""Gradients that wait, module by module: numbers beside FSDP2's after each microbatch, in fp64 over gloo."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from fsdp2_models import (
    OURS,
    PACKAGES,
    Words,
    as_unsharded,
    as_whole,
    averaged,
    batches,
    cpu_mesh,
    inputs,
    loss_of,
    make,
    parallel,
    same,
    shard_all,
    square_of,
    wholes,
)
from processes import KeptRanks
from torch import nn

EXACT = {"rtol": 0.0, "atol": 1e-12}
MICROBATCHES = 2
#: Which modules a setting is for.
CHOICES: dict[str, Callable[[Any, Callable[..., None]], None]] = {
    "all": lambda model, call: call(model),
    "outermost": lambda model, call: call(model, recurse=False),
    "one_block": lambda model, call: call(model.blocks[1]),
}


Held = dict[str, nn.Parameter]


def held_in(model: nn.Module) -> Held:
    """The parameters that an optimizer holds: to be asked before training, as modules hold whole ones meanwhile."""
    return dict(model.named_parameters())


def gradients(held: Held) -> dict[str, torch.Tensor | None]:
    """Of each parameter, whole; None where there is none."""
    return {name: None if each.grad is None else as_whole(each.grad).clone() for name, each in held.items()}


def alike(run: Callable[[ModuleType], list[Any]]) -> None:
    """What ``run`` told, at each moment, is the same of FSDP2 and of ours."""
    theirs, ours = (run(package) for package in PACKAGES)
    assert len(ours) == len(theirs)
    for mine, its in zip(ours, theirs, strict=True):
        same(mine, its, **EXACT)


def _accumulates(rank: int, mesh: tuple[int, ...], setter: str, chosen: str) -> None:
    def run(package: ModuleType) -> list[Any]:
        model: Any = shard_all(package, make(), cpu_mesh(*mesh))
        held, optimizer = held_in(model), torch.optim.SGD(model.parameters(), lr=0.1)
        told: list[Any] = []
        for start in (1, 2):
            for number, words in enumerate(batches(MICROBATCHES, seed=start)):
                last = number == MICROBATCHES - 1
                CHOICES[chosen](model, lambda module, last=last, **kw: getattr(module, setter)(last, **kw))
                loss = loss_of(model, words)
                loss.backward()
                told += [loss.item(), gradients(held)]
            optimizer.step()
            # Zeros once: what is delivered then is added to them.
            optimizer.zero_grad(set_to_none=start == 2)
        return [*told, wholes(model)]

    alike(run)


@pytest.mark.parametrize(
    ("setter", "chosen"),
    [
        ("set_requires_all_reduce", "one_block"),
        pytest.param("set_requires_all_reduce", "outermost", marks=pytest.mark.nightly),
        ("set_requires_gradient_sync", "outermost"),
    ],
)
def test_over_replicas(ranks: KeptRanks, setter: str, chosen: str) -> None:
    ranks.run(4, _accumulates, (2, 2), setter, chosen)


def test_over_replicas_of_one_shard(ranks: KeptRanks) -> None:
    ranks.run(2, _accumulates, (2, 1), "set_requires_all_reduce", "all")


def reductions_then_sums(rank: int) -> None:
    """Over shards alone, not at all, and over everything: all is in the last sum."""

    def run(package: ModuleType) -> list[Any]:
        model: Any = shard_all(package, make(), cpu_mesh(2, 2))
        held = held_in(model)
        told: list[Any] = []
        for number, words in enumerate(batches(4)):
            model.set_requires_gradient_sync(number != 1)
            model.set_requires_all_reduce(number == 3)
            loss_of(model, words).backward()
            told.append(gradients(held))
        return told

    alike(run)


def the_mean_of_sums(rank: int) -> None:
    sharded: Any = shard_all(OURS, make(), cpu_mesh(2, 2))
    plain, held = make(), held_in(sharded)
    sharded.set_is_last_backward(False)
    for number, words in enumerate(batches(3)):
        sharded.blocks[0].set_requires_gradient_sync(number == 2)
        sharded.blocks[1].set_requires_all_reduce(number == 2)
        sharded.set_is_last_backward(number == 2)
        loss_of(sharded, words).backward()
        loss_of(plain, words).backward()
    same(gradients(held), averaged(plain), **EXACT)


def _ended_by_hand(package: ModuleType) -> list[Any]:
    model: Any = shard_all(package, make())
    held, told = held_in(model), list[Any]()
    model.set_manual_backward_finalization(True)
    assert model.finalize_backward() is None
    model.finalize_backward(async_op=True).wait()
    # Not heard now.
    model.set_is_last_backward(True)
    for start, synchronises in ((1, True), (2, False), (3, False)):
        for words in batches(2, seed=start):
            # As a program with several backwards before one end has to.
            model.set_requires_gradient_sync(False)
            loss_of(model, words).backward()
        told.append(gradients(held))
        model.set_requires_gradient_sync(True)
        if synchronises:
            loss_of(model, words).backward()
        handle = model.finalize_backward(async_op=True)
        assert isinstance(handle, package.GradientReductionHandle)
        with pytest.raises(RuntimeError, match="previous gradient reduction must be waited on before finalizing"):
            model.finalize_backward()
        handle.wait()
        handle.wait()
        told.append(gradients(held))
    model.zero_grad()
    loss_of(model, words).backward()
    with pytest.raises(RuntimeError, match="must be called on the root FSDP"):
        model.blocks[0].finalize_backward()
    with pytest.raises(RuntimeError, match="must be called on the root FSDP"):
        model.blocks[0].set_manual_backward_finalization(True)
    model.finalize_backward()
    told.append(gradients(held))
    model.zero_grad()
    loss_of(model, words).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="gradient reduction handle was invalidated"):
        handle.wait()
    hook = model.norm.register_full_backward_hook(lambda *_: model.finalize_backward())
    with pytest.raises(RuntimeError, match="must be called after backward completes"):
        loss_of(model, words).backward()
    hook.remove()
    model.reset_iter_state()
    # The next ends by itself, as was set.
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    loss_of(model, words).backward()
    return [*told, gradients(held)]


def backwards_that_the_caller_ends(rank: int) -> None:
    """As pipelines of torch 2.15 do; older FSDP2 has no such calls."""
    told = [_ended_by_hand(package) for package in PACKAGES if hasattr(package.FSDPModule, "finalize_backward")]
    for mine, its in zip(told[-1], told[0], strict=True):
        same(mine, its, **EXACT)


def ends_over_replicas(rank: int) -> None:
    """FSDP2 refuses sums that are not over replicas yet."""
    sharded: Any = shard_all(OURS, make(), cpu_mesh(2, 2))
    plain, held = make(), held_in(sharded)
    sharded.set_manual_backward_finalization(True)
    for number, words in enumerate(batches(6)):
        sharded.set_requires_gradient_sync(number in (2, 3))
        sharded.set_requires_all_reduce(number == 3)
        for each in (sharded, plain):
            loss_of(each, words).backward()
    sharded.set_requires_gradient_sync(True)
    before = gradients(held)
    handle = sharded.finalize_backward(async_op=True)
    handle.wait()
    means = averaged(plain)
    same(gradients(held), means, **EXACT)
    assert any(each is None or not torch.equal(each, means[name]) for name, each in before.items())
    assert sharded.finalize_backward() is None
    same(gradients(held), means, **EXACT)


def inputs_first_and_weights_later(rank: int) -> None:
    """As schedules of pipelines without bubbles do: FSDP2 leaves weights of released modules without gradients."""
    for releases in (False, True):
        model: Any = parallel(OURS, 2, reshard_after_forward=releases)
        (x,) = inputs(model)
        for call in (model.set_is_last_backward, model.set_reshard_after_backward, model.set_requires_gradient_sync):
            call(False)
        loss = square_of(model, x.requires_grad_())
        # A penalty: both come to the same backward.
        torch.autograd.grad(loss, x, create_graph=True)
        if not releases:
            torch.autograd.grad(loss, x)
            continue
        loss = square_of(model, x)
        with pytest.raises(RuntimeError, match=r"'\(root\)' was released after its forward \(rank"):
            torch.autograd.grad(loss, x)
        model.set_reshard_after_backward(True)
        torch.autograd.grad(square_of(model, x), x)
        for call in (model.set_is_last_backward, model.set_requires_gradient_sync):
            call(True)
        square_of(model, x).backward()
        means = [each.grad.full_tensor() for each in model.parameters()]
        model.zero_grad()
        plain: Any = parallel(PACKAGES[0], 2)
        square_of(plain, x).backward()
        same(means, [each.grad.full_tensor() for each in plain.parameters()], **EXACT)


def an_optimizer_ends_what_backwards_left(rank: int) -> None:
    """FSDP2 would train with gradients that are not there, and compute with parameters from before the step."""
    sharded: Any = shard_all(OURS, make(), reshard_after_forward=False)
    sharded.set_is_last_backward(False)
    sharded.set_reshard_after_backward(False)
    as_unsharded(sharded, make())


def states_that_are_loaded_are_seen(rank: int) -> None:
    model: Any = shard_all(OURS, make(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    words = next(batches(1))
    before = loss_of(model, words)
    before.backward()
    model.load_state_dict({name: value * 2 if value.ndim else value for name, value in model.state_dict().items()})
    whole = make()
    whole.load_state_dict({name: value * 2 if value.ndim else value for name, value in whole.state_dict().items()})
    same(loss_of(model, words), loss_of(whole, words), **EXACT)


class StoppedError(Exception):
    """Raised in the middle of a backward."""


def _interrupt(model: Any, words: torch.Tensor) -> None:
    def stop(*_: object) -> None:
        raise StoppedError

    handle = model.blocks[0].up.register_full_backward_hook(stop)
    with pytest.raises(StoppedError):
        loss_of(model, words).backward()
    handle.remove()


def an_exception_in_the_middle(rank: int) -> None:
    """What earlier backwards left is kept; a restart drops it."""
    first, second, third = batches(3)
    model: Any = shard_all(OURS, make(), cpu_mesh(2, 2))
    plain, held = make(), held_in(model)
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    loss_of(model, first).backward()
    _interrupt(model, third)
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    loss_of(model, second).backward()
    for words in (first, second):
        loss_of(plain, words).backward()
    same(gradients(held), averaged(plain), **EXACT)
    model.zero_grad()
    plain.zero_grad()
    model.set_requires_gradient_sync(False)
    loss_of(model, first).backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    loss_of(model, second).backward()
    loss_of(plain, second).backward()
    same(gradients(held), averaged(plain), **EXACT)


class Passing(Words):
    """Its second block is there in the first microbatch alone."""

    passes = False

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(words))
        logits: torch.Tensor = self.head(self.norm(x if self.passes else self.blocks[1](x)))
        return logits


def modules_that_the_last_backward_passes_by(rank: int) -> None:
    model, plain = Passing().double(), Passing().double()
    plain.load_state_dict(make().state_dict())
    model.load_state_dict(plain.state_dict())
    sharded: Any = shard_all(OURS, model, cpu_mesh(2, 2))
    held = held_in(sharded)
    for number, words in enumerate(batches(2)):
        sharded.set_requires_all_reduce(number == 1)
        for each in (sharded, plain):
            each.passes = number == 1
            loss_of(each, words).backward()
    same(gradients(held), averaged(plain), **EXACT)


def sums_in_the_dtype_of_reductions(rank: int) -> None:
    """bf16 travels where one backward is reduced; a sum of several is in fp32, and travels so."""

    def run(package: ModuleType) -> list[Any]:
        policy = package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = shard_all(package, make(dtype=torch.float32), mp_policy=policy)
        held = held_in(model)
        for number, words in enumerate(batches(4)):
            model.set_requires_gradient_sync(number == 3)
            loss_of(model, words).backward()
        return [gradients(held)]

    theirs, ours = (run(package)[0] for package in PACKAGES)
    # The order of fp32 additions; bf16 would be 4e-3.
    same(ours, theirs, rtol=1e-5, atol=1e-7)


BODIES: dict[Callable[[int], object], int] = {
    reductions_then_sums: 4,
    the_mean_of_sums: 4,
    backwards_that_the_caller_ends: 2,
    ends_over_replicas: 4,
    inputs_first_and_weights_later: 2,
    an_optimizer_ends_what_backwards_left: 2,
    states_that_are_loaded_are_seen: 2,
    an_exception_in_the_middle: 4,
    modules_that_the_last_backward_passes_by: 4,
    sums_in_the_dtype_of_reductions: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_ranks(ranks: KeptRanks, body: Callable[[int], object]) -> None:
    ranks.run(BODIES[body], body)
