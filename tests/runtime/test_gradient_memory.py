"""How long the memory of reduced gradients lives: as long as a ``.grad`` that was not dropped, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    draw,
    local,
    on_ranks,
    seeded,
    sharded_copy,
    square_step,
    train_reference,
    units_of,
    whole_of,
)
from polyshard.interfaces import OffloadCapabilities, PluginContext, UnitSpec
from polyshard_backends.threaded import ThreadedWorld
from polyshard_plugins.offload import NoOffload
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SETTINGS: dict[str, dict[str, Any]] = {
    "merged": {},
    "alone": {"batch_nbytes": 0},
    "unsharded": {"strategy": "no_shard"},
    "cast": {"precision": {"name": "mixed", "param": "bfloat16", "reduce": "bfloat16"}},
    "offloaded": {"offload": "cpu"},
}


def storages(parameters: list[torch.Tensor]) -> list[weakref.ref[torch.UntypedStorage]]:
    """Weak references to the memory of every gradient."""
    return [weakref.ref(local(p.grad).untyped_storage()) for p in parameters if p.grad is not None]


@contextmanager
def without_cycle_collection() -> Iterator[None]:
    """What is freed inside is freed by its last reference, and not by luck."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def receivers(model: nn.Module, flat: bool) -> list[torch.Tensor]:
    return list(polyshard.flat_parameters(model)) if flat else list(model.parameters())


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("case", SETTINGS)
def test_zero_grad_frees_gradients_at_once(case: str, flat: bool) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block), **SETTINGS[case])
        parameters = receivers(model, flat)
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for turn in range(3):
            square_step(model, turn, rank)
            held = storages(parameters)
            assert held
            assert all(each() is not None for each in held)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert [each() for each in held] == [None] * len(held)

    with without_cycle_collection():
        on_ranks(2, on_rank)


def test_a_gradient_that_is_still_held_keeps_its_values() -> None:
    expected = train_reference(seeded(Net), square_step, 2, turns=1).gradients[0]["first.bias"]

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block))
        square_step(model, 0, rank)
        held = dict(model.named_parameters())["first.bias"].grad
        model.zero_grad()
        for turn in range(1, 3):
            square_step(model, turn, rank)
            model.zero_grad()
        assert held is not None
        return held

    torch.testing.assert_close(whole_of(expected, on_ranks(2, on_rank)), expected, rtol=1e-12, atol=1e-12)


class Offloaded(NoOffload):
    """Keeps nothing, and is told to add to what it returned."""

    def __init__(self) -> None:
        super().__init__(PluginContext("offloaded", torch.device("cpu")))
        self.returned: list[int] = []
        self.added_to: list[int] = []

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(offloads=True)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        if into is not None:
            self.added_to.append(id(into))
            return into.add_(grad)
        stored = grad.clone()
        self.returned.append(id(stored))
        return stored


def test_offload_managers_add_to_the_tensor_that_they_returned() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[int], list[int]]:
        offloaded = Offloaded()
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block), offload=offloaded)
        square_step(model, 0, rank)
        square_step(model, 1, rank)
        return offloaded.returned, offloaded.added_to

    for returned, added_to in on_ranks(2, on_rank):
        assert len(returned) == 4
        assert sorted(added_to) == sorted(returned)


class Additions(TorchDispatchMode):
    """Counts additions to the memory of some tensors."""

    def __init__(self, tensors: list[torch.Tensor | None]) -> None:
        super().__init__()
        self.count = 0
        self._where = {local(each).untyped_storage().data_ptr() for each in tensors if each is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor and not isinstance(args[0], DTensor):
            self.count += args[0].untyped_storage().data_ptr() in self._where
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["merged", "alone", "unsharded"])
def test_gradients_that_accumulate_take_one_addition_a_unit(case: str) -> None:
    """Sums of two backwards, in the memory of the first."""
    reference = train_reference(seeded(Net), twice, 2, turns=1).gradients[0]

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block), **SETTINGS[case])
        square_step(model, 0, rank)
        before = [p.grad for p in model.parameters()]
        loss = model(draw(4, 3, turn=1, rank=rank)).square().mean()
        with Additions(before) as additions:
            loss.backward()
        assert additions.count == 4
        assert all(p.grad is each for p, each in zip(model.parameters(), before, strict=True))
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    ranks = on_ranks(2, on_rank)
    for name, expected in reference.items():
        got = whole_of(expected, [each[name] for each in ranks])
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def twice(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    """The step that is compared: two backwards without dropping gradients."""
    return [*square_step(model, 0, rank), *square_step(model, 1, rank)]


@pytest.mark.parametrize("case", ["merged", "unsharded"])
def test_gradients_replaced_by_the_user_are_added_to(case: str) -> None:
    """Same memory, other strides: a gradient that was put there, and not the one that was delivered."""

    def on_rank(rank: int, world: ThreadedWorld) -> bool:
        model = sharded_copy(seeded(lambda: nn.Linear(3, 3)), rank, world, **SETTINGS[case])
        square_step(model, 0, rank)
        first = [local(p.grad).clone() for p in model.parameters()]
        model.zero_grad()
        square_step(model, 0, rank)
        for parameter in model.parameters():
            own = parameter.grad
            parameter.grad = own.T if case == "unsharded" and own.dim() == 2 else own * 2
        replaced = [local(p.grad).clone() for p in model.parameters()]
        square_step(model, 0, rank)
        for parameter, one, other in zip(model.parameters(), first, replaced, strict=True):
            torch.testing.assert_close(local(parameter.grad), one + other, rtol=1e-12, atol=1e-12)
        return any(local(p.grad).abs().sum() > 0 for p in model.parameters())

    assert all(on_ranks(2, on_rank))
