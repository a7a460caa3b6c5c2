"""The suite of offload managers fails for those that break their contract, each in one way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from polyshard.interfaces import OffloadCapabilities, OffloadManager, UnitSpec
from polyshard.testing import OffloadSuite


class Forgetful(OffloadManager):
    """Overwrites the gradient of the microbatch before."""

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(parks=False)

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad


def test_forgetful_offload_fails() -> None:
    class Suite(OffloadSuite):
        def make(self) -> OffloadManager:
            return Forgetful()

    Suite().test_stored_gradient_lies_beside_the_master()
    with pytest.raises(AssertionError):
        Suite().test_gradients_of_microbatches_add_up()


class Parking(Forgetful):
    """Keeps masters and gradients in memory of its own, sound but for what a subclass changes."""

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(parks=True)

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard.clone()

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.clone() if into is None else into.add_(grad)


class LargeOnly(Parking):
    """Parks units of five elements and more; of each it knows from ``place`` where its gradient goes."""

    def __init__(self) -> None:
        self.parked: dict[str, torch.Tensor | None] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        self.parked[unit.name] = shard.clone() if unit.shard_numel >= 5 else None
        parked = self.parked[unit.name]
        return shard if parked is None else parked

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        parked = self.parked[unit.name]
        if into is not None:
            return into.add_(grad)
        assert parked is None or parked.shape == grad.shape
        return grad if parked is None else grad.to(parked.device, copy=True)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    wide[::2].copy_(tensor)
    return wide[::2]


class SpreadMasters(Parking):
    """Interleaves masters with something else."""

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return _spread(shard)


class SpreadGradients(Parking):
    """The same for gradients."""

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return _spread(grad) if into is None else into.add_(grad)


class OneShelf(Parking):
    """Parks all masters in one place."""

    def __init__(self) -> None:
        self.shelf = torch.zeros(64)

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return self.shelf[: shard.numel()].copy_(shard)


class FirstPlace(Parking):
    """Does not take back a unit that it was given before."""

    def __init__(self) -> None:
        self.masters: dict[str, torch.Tensor] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return self.masters.setdefault(unit.name, shard.clone())


class Frozen(Parking):
    """Fetches what was placed, whatever the optimizer made of it."""

    def __init__(self) -> None:
        self.masters: dict[str, torch.Tensor] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        self.masters[unit.name] = shard.clone()
        return shard.clone()

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(self.masters[unit.name])


def offload_suite(manager: Callable[[], OffloadManager]) -> OffloadSuite:
    class Suite(OffloadSuite):
        def make(self) -> OffloadManager:
            return manager()

    return Suite()


@pytest.mark.parametrize(
    ("manager", "test"),
    [
        (SpreadMasters, lambda suite: suite.test_placed_master_keeps_values_shape_and_dtype(1000, torch.float32)),
        (SpreadGradients, lambda suite: suite.test_stored_gradient_lies_beside_the_master()),
        (OneShelf, lambda suite: suite.test_units_do_not_share_memory()),
        (FirstPlace, lambda suite: suite.test_a_unit_is_placed_again_after_an_attempt_that_failed()),
        (Frozen, lambda suite: suite.test_an_optimizer_updates_the_master_in_place()),
    ],
    ids=["strides", "strides of gradients", "one memory", "second attempt", "stale"],
)
def test_faulty_managers_fail(manager: Callable[[], OffloadManager], test: Callable[[OffloadSuite], None]) -> None:
    with pytest.raises(AssertionError):
        test(offload_suite(manager))


class TestPartialManager(OffloadSuite):
    def make(self) -> OffloadManager:
        return LargeOnly()
