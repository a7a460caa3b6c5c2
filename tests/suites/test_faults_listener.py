"""The suite of listeners: each of its tests fails over some listener, and sound ones pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from polyshard import hookimpl
from polyshard.interfaces import Listener, Observer, PluginContext, UnitEvent, UnitOperation, UnitSpec
from polyshard_testing import ListenerSuite, plugin_context
from suite_faults import EVERY_PLUGINS, Fault, fault, is_caught, names_of, rules_of
from torch import nn


class Sound(Listener):
    """Counts what happens in a step, with every hook."""

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        self.units: set[str] = set()
        self.backwards = 0
        self.reductions: list[str] = []
        self.noted: set[str] = set()

    @hookimpl
    def before_shard(self, model: nn.Module) -> None:
        return None

    @hookimpl
    def after_shard(self, model: nn.Module) -> None:
        return None

    @hookimpl
    def on_save(self, model: nn.Module, path: Path) -> None:
        return None

    @hookimpl
    def on_load(self, model: nn.Module, path: Path) -> None:
        return None

    @hookimpl
    def step_begin(self, model: nn.Module) -> None:
        self.backwards, self.reductions = 0, []

    @hookimpl
    def step_end(self, model: nn.Module) -> None:
        return None

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer | None:
        self.units.add(unit.name)
        return self.observe

    def observe(self, event: UnitEvent) -> None:
        if event.operation is UnitOperation.REDUCE and event.begins:
            self.reductions.append(event.unit.name)
        elif event.operation is UnitOperation.COMPUTE and not event.begins:
            self.backwards += event.backward


class TestSoundListener(ListenerSuite):
    def make(self) -> object:
        return Sound(plugin_context())


#: The model that is in a step, where all listeners see it.
IN_STEP: list[nn.Module] = []


def takes(holds: Callable[[Sound, nn.Module], object]) -> Callable[..., None]:
    """A hook that takes it that something holds of the listener and the model."""

    @hookimpl
    def implementation(self: Sound, model: nn.Module) -> None:
        assert holds(self, model)

    return implementation


@hookimpl
def _open(self: Sound, model: nn.Module) -> None:
    assert "step" not in self.noted
    self.noted.add("step")


@hookimpl
def _forget(self: Sound, model: nn.Module) -> None:
    self.noted.clear()


def _alone(self: Sound, event: UnitEvent) -> None:
    if event.operation is UnitOperation.COMPUTE:
        assert event.begins is (event.unit.name not in self.noted)
        self.noted ^= {event.unit.name}


@hookimpl
def _keep(self: Sound, model: nn.Module) -> None:
    IN_STEP[:] = [model]


@hookimpl
def _note_path(self: Sound, model: nn.Module, path: Path) -> None:
    self.noted.add(f"{path}")


@hookimpl
def _know_path(self: Sound, model: nn.Module, path: Path) -> None:
    assert f"{path}" in self.noted


@hookimpl
def _mark(self: Sound, model: nn.Module) -> None:
    model.listened_to = True


@hookimpl
def _sum(self: Sound, model: nn.Module) -> None:
    if dist.is_initialized():
        dist.all_reduce(torch.tensor(float(self.backwards)))


def _read(self: Sound, event: UnitEvent) -> None:
    assert torch.tensor(event.unit.numel).item() > 0


FAULTS = [
    # Has a method like a hook, which nobody calls.
    fault(Sound, "hooks_exist_and_take_their_arguments", "Unmarked", step_end=lambda self, model: None),
    # Has an observer of other arguments.
    fault(Sound, "observers_take_an_event", "TakesUnits", observe=lambda self, unit, backward: None),
    # Takes it that every backward reduces, where gradients may be kept for the next one.
    fault(Sound, "training_gives_the_same_numbers_as_without_it", "ExpectsReductions",
          step_end=takes(lambda self, model: self.reductions or not self.backwards)),
    # Divides by the backwards, of which an evaluation has none.
    fault(Sound, "a_forward_without_a_backward", "Averages",
          step_end=takes(lambda self, model: len(self.reductions) / self.backwards >= 0)),
    # Takes it that every step that begins also ends.
    fault(Sound, "a_step_after_one_that_failed", "ExpectsEnds", step_begin=_open, step_end=_forget),
    # Takes it that a unit computes one thing at a time.
    fault(Sound, "activations_that_are_computed_again", "OneComputation", step_begin=_forget, observe=_alone),
    # Takes it that all units reduce, where some do.
    fault(Sound, "units_that_are_frozen", "ExpectsAllUnits",
          step_end=takes(lambda self, model: not self.reductions or set(self.reductions) == self.units)),
    fault(Sound, "two_models_at_once", "OneModel", step_begin=_keep,
          step_end=takes(lambda self, model: IN_STEP[0] is model)),
    # Knows the checkpoints of this process alone.
    fault(Sound, "saving_and_loading", "LoadsWhatItSaved", on_save=_note_path, on_load=_know_path),
    fault(Sound, "the_model_is_left_as_it_was", "Marks", after_shard=_mark),
    fault(Sound, "no_collective_is_issued", "SumsOverRanks", step_end=_sum),
    fault(Sound, "nothing_in_a_step_waits_for_the_device", "ReadsTheDevice", observe=_read),
]  # fmt: skip


@pytest.mark.parametrize("planted", FAULTS)
def test_the_rule_catches_the_fault(planted: Fault) -> None:
    assert is_caught(ListenerSuite, planted)


def test_every_test_catches_something() -> None:
    assert rules_of(FAULTS) == names_of(ListenerSuite) - EVERY_PLUGINS
