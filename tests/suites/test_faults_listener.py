"""The suite of listeners: each of its tests is the one that fails over some listener, and sound ones pass."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from polyshard import hookimpl
from polyshard.interfaces import Listener, Observer, PluginContext, UnitEvent, UnitOperation, UnitSpec
from polyshard_testing import ListenerSuite, plugin_context
from suite_faults import EVERY_PLUGINS, WITH_OTHERS, Fault, failing, fault, names_of, rules_of
from torch import nn


class Sound(Listener):
    """Counts what happens in a step, with every hook."""

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        self.units: set[str] = set()
        self.backwards = 0
        self.reductions: list[str] = []

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


class Unmarked(Sound):
    """Has a method like a hook, which nobody calls."""

    def step_end(self, model: nn.Module) -> None:
        self.backwards = 0


class TakesUnits(Sound):
    """Has an observer of other arguments."""

    def observe(self, unit: UnitSpec, backward: bool) -> None:  # type: ignore[override]
        return None


class ExpectsReductions(Sound):
    """Takes it that every backward reduces, where gradients may be kept for the next one."""

    @hookimpl
    def step_end(self, model: nn.Module) -> None:
        assert self.reductions or not self.backwards


class Averages(Sound):
    """Divides by the backwards, of which an evaluation has none."""

    @hookimpl
    def step_end(self, model: nn.Module) -> None:
        assert len(self.reductions) / self.backwards >= 0


class ExpectsEnds(Sound):
    """Takes it that every step that begins also ends."""

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self.open = False

    @hookimpl
    def step_begin(self, model: nn.Module) -> None:
        assert not self.open
        self.open = True

    @hookimpl
    def step_end(self, model: nn.Module) -> None:
        self.open = False


class OneComputation(Sound):
    """Takes it that a unit computes one thing at a time."""

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self.computing: set[str] = set()

    @hookimpl
    def step_begin(self, model: nn.Module) -> None:
        self.computing.clear()

    def observe(self, event: UnitEvent) -> None:
        if event.operation is not UnitOperation.COMPUTE:
            return
        assert event.begins is (event.unit.name not in self.computing)
        self.computing ^= {event.unit.name}


class ExpectsAllUnits(Sound):
    """Takes it that all units reduce, where some do."""

    @hookimpl
    def step_end(self, model: nn.Module) -> None:
        assert not self.reductions or set(self.reductions) == self.units


class OneModel(Sound):
    """Keeps the model that is in a step where all listeners see it."""

    model: ClassVar[nn.Module | None] = None

    @hookimpl
    def step_begin(self, model: nn.Module) -> None:
        OneModel.model = model

    @hookimpl
    def step_end(self, model: nn.Module) -> None:
        assert OneModel.model is model


class LoadsWhatItSaved(Sound):
    """Knows the checkpoints of this process alone."""

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self.saved: dict[Path, int] = {}

    @hookimpl
    def on_save(self, model: nn.Module, path: Path) -> None:
        self.saved[path] = len(self.units)

    @hookimpl
    def on_load(self, model: nn.Module, path: Path) -> None:
        assert self.saved[path]


class Marks(Sound):
    """Writes on the model."""

    @hookimpl
    def after_shard(self, model: nn.Module) -> None:
        model.listened_to = True


class SumsOverRanks(Sound):
    @hookimpl
    def step_end(self, model: nn.Module) -> None:
        if dist.is_initialized():
            dist.all_reduce(torch.tensor(float(self.backwards)))


class ReadsTheDevice(Sound):
    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self.total = torch.zeros(1, device=context.device)

    def observe(self, event: UnitEvent) -> None:
        self.total += event.unit.numel
        assert self.total.item() > 0


CASES: list[tuple[type[Sound], str]] = [
    (Unmarked, "hooks_exist_and_take_their_arguments"),
    (TakesUnits, "observers_take_an_event"),
    (ExpectsReductions, "training_gives_the_same_numbers_as_without_it"),
    (Averages, "a_forward_without_a_backward"),
    (ExpectsEnds, "a_step_after_one_that_failed"),
    (OneComputation, "activations_that_are_computed_again"),
    (ExpectsAllUnits, "units_that_are_frozen"),
    (OneModel, "two_models_at_once"),
    (LoadsWhatItSaved, "saving_and_loading"),
    (Marks, "the_model_is_left_as_it_was"),
    (SumsOverRanks, "no_collective_is_issued"),
    (ReadsTheDevice, "nothing_in_a_step_waits_for_the_device"),
]
FAULTS = [fault(plugin, rule, plugin.__name__) for plugin, rule in CASES]


@WITH_OTHERS
@pytest.mark.parametrize("planted", FAULTS)
def test_only_these_fail(planted: Fault, others: bool) -> None:
    assert failing(ListenerSuite, planted, others) == {planted.fails}


def test_every_test_is_the_one_that_catches_something() -> None:
    assert rules_of(FAULTS) == names_of(ListenerSuite) - EVERY_PLUGINS
