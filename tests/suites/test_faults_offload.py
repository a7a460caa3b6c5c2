"""The suite of offload managers: each of its tests is the one that fails over some manager, and sound ones pass."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from polyshard.interfaces import OffloadCapabilities, OffloadManager, PluginContext, UnitSpec
from polyshard_testing import OffloadSuite, plugin_context
from suite_faults import EVERY_PLUGINS, WITH_OTHERS, Fault, failing, fault, names_of


class Sound(OffloadManager):
    """Keeps masters and gradients in memory of its own."""

    api_version = 1
    capabilities = OffloadCapabilities(parks=True)

    def __init__(self, context: PluginContext) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard.clone()

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.clone() if into is None else into.add_(grad)


class Partial(Sound):
    """Parks units of five elements and more; of each it knows from ``place`` where its gradient goes."""

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
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


class TestSoundManager(OffloadSuite):
    def make(self) -> OffloadManager:
        return Sound(plugin_context())


class TestPartialManager(OffloadSuite):
    def make(self) -> OffloadManager:
        return Partial(plugin_context())


class ParksByRank(Sound):
    """Parks as many units as the launcher says."""

    def units_to_park(self, units: Sequence[UnitSpec]) -> Sequence[UnitSpec]:
        return units[: int(os.environ.get("RANK", "1"))]


class FetchedAlready(Sound):
    """Leaves out a small unit that it fetched in this forward, whose memory may be another's since."""

    def begin_forward(self) -> None:
        self.kept.clear()

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        if unit.name not in self.kept or master.numel() > 8:
            own_slice.copy_(master)
        self.kept[unit.name] = master


class WidensMasters(Sound):
    """Parks 16-bit masters in fp32."""

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard.float() if shard.itemsize == 2 else shard.clone()


class ScalesLate(Sound):
    """Sends 16 bits as bf16, whichever they are."""

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master.bfloat16() if own_slice.itemsize == 2 else master)


class OneStage(Sound):
    """Keeps what masters are cast into, in the dtype of the first time."""

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        stage = self.kept.setdefault(unit.name, torch.empty_like(own_slice))
        own_slice.copy_(stage.copy_(master))


class RoundsUp(Sound):
    """Clears what is behind the slice, where there is something."""

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)
        end = own_slice.storage_offset() + own_slice.numel()
        if end < own_slice.untyped_storage().nbytes() // own_slice.itemsize:
            own_slice.as_strided((1,), (1,), end).zero_()


class RoundsMasters(Sound):
    """Keeps of a master what was sent."""

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)
        master.copy_(own_slice)


class SeesNothingToFetch(Sound):
    """Looks at the largest value, of no values too."""

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        assert master.abs().amax() < 1e30
        own_slice.copy_(master)


class SpreadGradients(Sound):
    """Interleaves 16-bit gradients with something else, until another is added."""

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        if into is not None:
            return into + grad
        return _spread(grad) if grad.itemsize == 2 else grad.clone()


class Forgetful(Sound):
    """Overwrites the gradient of the 16-bit microbatch before."""

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.clone() if into is None or grad.itemsize == 2 else into.add_(grad)


class ByModule(Sound):
    """Has one gradient of a module."""

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        if into is not None:
            return into.add_(grad)
        kept = self.kept.setdefault(unit.module_name, torch.empty_like(grad))
        return kept.copy_(grad) if kept.dtype == grad.dtype else grad.clone()


class OnePool(Sound):
    """Has one memory for small gradients, for all managers of the process."""

    pool: ClassVar[dict[tuple[str, torch.dtype], torch.Tensor]] = {}

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        if into is not None or grad.numel() > 8:
            return super().store_grad(unit, grad, into)
        kept = self.pool.setdefault((unit.name, grad.dtype), torch.empty(8, dtype=grad.dtype))
        return kept[: grad.numel()].copy_(grad)


class FirstPlace(Sound):
    """Does not take back a unit that it was given before."""

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return self.kept.setdefault(unit.name, shard.clone())


class WaitsForTheLast(Sound):
    """Waits for what it stored last, which it takes for granted."""

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        self.kept["last"] = super().store_grad(unit, grad, into)
        return self.kept["last"]

    def sync_for_step(self) -> None:
        assert not self.kept["last"].is_meta


class ThreeSlots(Sound):
    """Has memory for the gradients of three units."""

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        stored = super().store_grad(unit, grad, into)
        self.kept.pop(unit.name, None)
        self.kept[unit.name] = stored
        if len(self.kept) > 3:
            self.kept.pop(next(iter(self.kept))).zero_()
        return stored


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    wide[::2].copy_(tensor)
    return wide[::2]


PARKED = "parked_units_are_some_of_those_given"
PLACED = "placed_master_keeps_values_shape_and_dtype"
CASTS = "fetch_casts_what_the_optimizer_wrote"
STORED = "stored_gradient_lies_beside_the_master_in_its_own_dtype"
ADD_UP = "gradients_of_microbatches_add_up"
APART = "units_do_not_share_memory"
TRAINING = "training_is_that_of_the_unsharded_model"

FAULTS = [
    fault(ParksByRank, PARKED),
    fault(FetchedAlready, "a_unit_is_fetched_again_in_the_backward"),
    fault(WidensMasters, PLACED),
    fault(ScalesLate, CASTS),
    fault(OneStage, "fetch_follows_the_dtype_that_is_asked_for"),
    fault(RoundsUp, "fetch_writes_nothing_but_the_own_slice"),
    fault(RoundsMasters, "fetch_leaves_the_master_as_it_was"),
    fault(SeesNothingToFetch, "an_empty_shard_is_fetched_and_its_gradient_stored"),
    fault(SpreadGradients, STORED),
    fault(Forgetful, ADD_UP),
    fault(ByModule, APART),
    fault(OnePool, "managers_of_two_models_do_not_share_memory"),
    fault(FirstPlace, "a_unit_is_placed_again_after_an_attempt_that_failed"),
    fault(WaitsForTheLast, "nothing_stored_is_nothing_to_wait_for"),
    fault(ThreeSlots, TRAINING),
]


@WITH_OTHERS
@pytest.mark.parametrize("planted", FAULTS)
def test_only_these_fail(planted: Fault, others: bool) -> None:
    assert failing(OffloadSuite, planted, others) == set(planted.fails)


def test_every_test_is_the_one_that_catches_something() -> None:
    alone = {planted.values[0].fails[0] for planted in FAULTS if not planted.values[0].why_several}
    assert alone == names_of(OffloadSuite) - EVERY_PLUGINS


def test_a_failure_shows_the_values_that_were_compared() -> None:
    class Suite(OffloadSuite):
        def make(self) -> OffloadManager:
            return WidensMasters(plugin_context())

    with pytest.raises(AssertionError, match=r"assert torch\.float32 is torch\.bfloat16"):
        Suite().test_placed_master_keeps_values_shape_and_dtype(1, torch.bfloat16)
