"""The suite of offload managers: each of its tests fails over some manager, and sound ones pass."""

from __future__ import annotations

import os

import pytest
import torch
from polyshard.interfaces import OffloadCapabilities, OffloadManager, PluginContext, UnitSpec
from polyshard_testing import OffloadSuite, plugin_context
from suite_faults import EVERY_PLUGINS, Fault, fault, is_caught, names_of, rules_of


class Sound(OffloadManager):
    """Keeps masters and gradients in memory of its own."""

    api_version = 1
    capabilities = OffloadCapabilities(offloads=True)

    def __init__(self, context: PluginContext) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard.clone()

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.clone() if into is None else into.add_(grad)


class Partial(Sound):
    """Offloads units of five elements and more; of each it knows from ``place`` where its gradient goes."""

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        self.offloaded: dict[str, torch.Tensor | None] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        self.offloaded[unit.name] = shard.clone() if unit.shard_numel >= 5 else None
        offloaded = self.offloaded[unit.name]
        return shard if offloaded is None else offloaded

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        offloaded = self.offloaded[unit.name]
        if into is not None:
            return into.add_(grad)
        assert offloaded is None or offloaded.shape == grad.shape
        return grad if offloaded is None else grad.to(offloaded.device, copy=True)


class TestSoundManager(OffloadSuite):
    def make(self) -> OffloadManager:
        return Sound(plugin_context())


class TestPartialManager(OffloadSuite):
    def make(self) -> OffloadManager:
        return Partial(plugin_context())


def _fetch(self: Sound, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
    """In the dtype of the unit's first fetch."""
    stage = self.kept.setdefault(unit.name, torch.empty_like(own_slice))
    own_slice.copy_(stage.copy_(master))


def _once(self: Sound, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
    if unit.name not in self.kept or master.numel() > 8:
        own_slice.copy_(master)
    self.kept[unit.name] = master


def _round_up(self: Sound, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
    own_slice.copy_(master)
    end = own_slice.storage_offset() + own_slice.numel()
    if end < own_slice.untyped_storage().nbytes() // own_slice.itemsize:
        own_slice.as_strided((1,), (1,), end).zero_()


def _look(self: Sound, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
    assert master.abs().amax() < 1e30
    own_slice.copy_(master)


def _by_module(self: Sound, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is not None:
        return into.add_(grad)
    kept = self.kept.setdefault(unit.module_name, torch.empty_like(grad))
    return kept.copy_(grad) if kept.dtype == grad.dtype else grad.clone()


#: Of all managers of the process.
POOL: dict[tuple[str, torch.dtype], torch.Tensor] = {}


def _pooled(self: Sound, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is not None or grad.numel() > 8:
        return Sound.store_grad(self, unit, grad, into)
    return POOL.setdefault((unit.name, grad.dtype), torch.empty(8, dtype=grad.dtype))[: grad.numel()].copy_(grad)


def _note_last(self: Sound, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    self.kept["last"] = Sound.store_grad(self, unit, grad, into)
    return self.kept["last"]


def _three(self: Sound, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    stored = Sound.store_grad(self, unit, grad, into)
    self.kept.pop(unit.name, None)
    self.kept[unit.name] = stored
    if len(self.kept) > 3:
        self.kept.pop(next(iter(self.kept))).zero_()
    return stored


def _later(self: Sound, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is not None or grad.numel() < 2**20:
        return Sound.store_grad(self, unit, grad, into)
    self.kept[unit.name] = grad
    self.kept[f"{unit.name} on the host"] = torch.zeros_like(grad)
    return self.kept[f"{unit.name} on the host"]


def _copy_late(self: Sound) -> None:
    for name in [name for name in self.kept if f"{name} on the host" in self.kept]:
        self.kept.pop(f"{name} on the host").copy_(self.kept.pop(name))


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    wide[::2].copy_(tensor)
    return wide[::2]


FAULTS = [
    # As many units as the launcher says.
    fault(Sound, "offloaded_units_are_some_of_those_given", "OffloadsByRank",
          units_to_offload=lambda self, units: units[: int(os.environ.get("RANK", "1"))]),
    # Leaves out a small unit that it fetched in this forward, whose memory may be another's since.
    fault(Sound, "a_unit_is_fetched_again_in_the_backward", "FetchedAlready",
          begin_forward=lambda self: self.kept.clear(), fetch=_once),
    # Offloads 16-bit masters in fp32.
    fault(Sound, "placed_master_keeps_values_shape_and_dtype", "WidensMasters",
          place=lambda self, unit, shard: shard.float() if shard.itemsize == 2 else shard.clone()),
    # Sends 16 bits as bf16, whichever they are.
    fault(Sound, "fetch_casts_what_the_optimizer_wrote", "ScalesLate",
          fetch=lambda self, unit, master, out: out.copy_(master.bfloat16() if out.itemsize == 2 else master)),
    fault(Sound, "fetch_follows_the_dtype_that_is_asked_for", "OneStage", fetch=_fetch),
    # Keeps nothing.
    fault(Sound, "kept_values_are_those_of_the_first_fetch", "ClaimsToKeep",
          capabilities=OffloadCapabilities(offloads=True, keeps_values=True)),
    # Copies large gradients at the end of the backward.
    fault(Sound, "an_awaited_gradient_can_be_read_by_another_thread", "CopiesLate", store_grad=_later,
          sync_for_step=_copy_late, capabilities=OffloadCapabilities(offloads=True, awaits_gradients=True)),
    fault(Sound, "fetch_writes_nothing_but_the_own_slice", "RoundsUp", fetch=_round_up),
    # Keeps of a master what was sent.
    fault(Sound, "fetch_leaves_the_master_as_it_was", "RoundsMasters",
          fetch=lambda self, unit, master, out: master.copy_(out.copy_(master))),
    # Looks at the largest value, of no values too.
    fault(Sound, "an_empty_shard_is_fetched_and_its_gradient_stored", "SeesNothingToFetch", fetch=_look),
    # Interleaves 16-bit gradients with something else, until another is added.
    fault(Sound, "stored_gradient_lies_beside_the_master_in_its_own_dtype", "SpreadGradients",
          store_grad=lambda self, unit, grad, into: (
              into + grad if into is not None else _spread(grad) if grad.itemsize == 2 else grad.clone())),
    # Overwrites the gradient of the 16-bit microbatch before.
    fault(Sound, "gradients_of_microbatches_add_up", "Forgetful",
          store_grad=lambda self, unit, grad, into: (
              grad.clone() if into is None or grad.itemsize == 2 else into.add_(grad))),
    # Has one gradient of a module.
    fault(Sound, "units_do_not_share_memory", "ByModule", store_grad=_by_module),
    # Has one memory for small gradients.
    fault(Sound, "managers_of_two_models_do_not_share_memory", "OnePool", store_grad=_pooled),
    # Does not take back a unit that it was given before.
    fault(Sound, "a_unit_is_placed_again_after_an_attempt_that_failed", "FirstPlace",
          place=lambda self, unit, shard: self.kept.setdefault(unit.name, shard.clone())),
    # Waits for what it stored last, which it takes for granted.
    fault(Sound, "nothing_stored_is_nothing_to_wait_for", "WaitsForTheLast", store_grad=_note_last,
          sync_for_step=lambda self: self.kept["last"].is_meta),
    # Has memory for the gradients of three units.
    fault(Sound, "training_is_that_of_the_unsharded_model", "ThreeSlots", store_grad=_three),
]  # fmt: skip


@pytest.mark.parametrize("planted", FAULTS)
def test_the_rule_catches_the_fault(planted: Fault) -> None:
    assert is_caught(OffloadSuite, planted)


def test_every_test_catches_something() -> None:
    assert rules_of(FAULTS) == names_of(OffloadSuite) - EVERY_PLUGINS


class _Widens(Sound):
    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard.float()


def test_a_failure_shows_the_values_that_were_compared() -> None:
    class Suite(OffloadSuite):
        def make(self) -> OffloadManager:
            return _Widens(plugin_context())

    with pytest.raises(AssertionError, match=r"assert torch\.float32 is torch\.bfloat16"):
        Suite().test_placed_master_keeps_values_shape_and_dtype(1, torch.bfloat16)
