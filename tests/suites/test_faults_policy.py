"""The suite of wrap policies: each of its tests is the one that fails over some policy, and sound ones pass."""

from __future__ import annotations

import os

import pytest
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from polyshard_testing import PolicySuite, plugin_context
from suite_faults import WITH_OTHERS, Fault, failing, fault, names_of, plugin_faults
from torch import nn


def counted(module: nn.Module, context: PolicyContext) -> int:
    return sum(each.numel() for each in module.parameters() if each not in context.ignored_parameters)


class Sound(WrapPolicy):
    """Chooses sequences of modules that hold enough."""

    api_version = 1
    classes: tuple[type[nn.Module], ...] = (nn.Sequential,)

    def __init__(self, context: PluginContext) -> None:
        return None

    def reason(self, module: nn.Module, name: str) -> str:
        return f"{name} is a {type(module).__name__}"

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        ignored = {inner for each in context.ignored_modules for inner in each.modules()}
        found = [each for each in root.modules() if isinstance(each, self.classes) and each not in ignored]
        return {module: {} for module in found if module is not root and counted(module, context) > 100}


class TestSoundPolicy(PolicySuite):
    def make(self) -> WrapPolicy:
        return Sound(plugin_context())


class GroupsForManyRanks(Sound):
    """Puts what it chose into a module of its own, where there are many ranks."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        found = super().plan(root, context)
        return {nn.ModuleList(found): {}} if context.shards > 1000 else found


class FractionOfRanks(Sound):
    """Says by a fraction, where ranks are few, how much of the parameters to keep."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        return dict.fromkeys(super().plan(root, context), {"reshard_after_forward": 0.5} if context.shards == 1 else {})


class Marks(Sound):
    """Writes on a module that it is a unit."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        found = super().plan(root, context)
        for module in found:
            module.is_unit = True
        return found


class AsksTheLauncher(Sound):
    """Chooses one unit fewer on another rank than the first."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        found = dict(super().plan(root, context))
        if os.environ.get("RANK") == "1":
            found.popitem()
        return found


class ChoosesOnce(Sound):
    """Names a module once, and never again."""

    def __init__(self, context: PluginContext) -> None:
        self.named: set[nn.Module] = set()

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        found = {module: {} for module in super().plan(root, context) if module not in self.named}
        self.named.update(found)
        return found


class TakesIgnored(Sound):
    """Chooses what is in ignored modules, too."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        return super().plan(root, PolicyContext(ignored_parameters=context.ignored_parameters))


class CountsIgnored(Sound):
    """Counts parameters that are not sharded."""

    classes = (nn.Linear,)

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        found = super().plan(root, PolicyContext(ignored_modules=context.ignored_modules))
        return {module: {} for module in found if counted(module, PolicyContext()) < 10_000}


class LooksAtValues(Sound):
    """Leaves out what is zero."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        found = super().plan(root, context)
        return {module: {} for module in found if any(each.abs().sum().item() for each in module.parameters())}


class TakesChildrenForGranted(Sound):
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        assert next(root.children()) is not None
        return super().plan(root, context)


class SaysNothing(Sound):
    def reason(self, module: nn.Module, name: str) -> str:
        return None  # type: ignore[return-value]


class Rounds(Sound):
    """Lets units compute in bf16, and does not say that the model trains otherwise."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        return {key: {"precision": "bf16"} for key in super().plan(root, context)}


OVERRIDES = "overrides_are_settings_that_a_unit_has"
LEFT = "model_is_left_as_it_was"
TRAINING = "training_is_that_of_the_unsharded_model"

FAULTS = [
    *plugin_faults(Sound),
    fault(GroupsForManyRanks, "plan_names_modules_of_the_model"),
    fault(FractionOfRanks, OVERRIDES),
    fault(Marks, LEFT),
    fault(AsksTheLauncher, "every_rank_gets_the_same_answer"),
    fault(ChoosesOnce, "asking_again_gives_the_same_answer"),
    fault(TakesIgnored, "ignored_modules_are_not_chosen"),
    fault(CountsIgnored, "ignored_parameters_do_not_count"),
    fault(LooksAtValues, "models_on_the_meta_device_get_the_same_answer"),
    fault(TakesChildrenForGranted, "model_without_submodules"),
    fault(SaysNothing, "reasons_are_text"),
    fault(Rounds, TRAINING),
]


@pytest.mark.slow
@WITH_OTHERS
@pytest.mark.parametrize("planted", FAULTS)
def test_only_these_fail(planted: Fault, others: bool) -> None:
    assert failing(PolicySuite, planted, others) == set(planted.fails)


def test_every_test_is_the_one_that_catches_something() -> None:
    alone = {planted.values[0].fails[0] for planted in FAULTS if not planted.values[0].why_several}
    assert alone == names_of(PolicySuite)
