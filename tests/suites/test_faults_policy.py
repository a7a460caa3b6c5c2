"""The suite of wrap policies: each of its tests fails over some policy, and sound ones pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from polyshard_testing import PolicySuite, plugin_context
from suite_faults import Fault, fault, is_caught, names_of, plugin_faults, rules_of
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


def _mark(self: Sound, root: nn.Module, context: PolicyContext) -> UnitPlan:
    found = Sound.plan(self, root, context)
    for module in found:
        module.is_unit = True
    return found


def _by_launcher(self: Sound, root: nn.Module, context: PolicyContext) -> UnitPlan:
    found = dict(Sound.plan(self, root, context))
    if os.environ.get("RANK") == "1":
        found.popitem()
    return found


def _once(self: Sound, root: nn.Module, context: PolicyContext) -> UnitPlan:
    named = self.__dict__.setdefault("named", set())
    found = {module: {} for module in Sound.plan(self, root, context) if module not in named}
    named.update(found)
    return found


def _count_ignored(self: Sound, root: nn.Module, context: PolicyContext) -> UnitPlan:
    found = Sound.plan(self, root, PolicyContext(ignored_modules=context.ignored_modules))
    return {module: {} for module in found if counted(module, PolicyContext()) < 10_000}


def _look(self: Sound, root: nn.Module, context: PolicyContext) -> UnitPlan:
    found = Sound.plan(self, root, context)
    return {module: {} for module in found if any(each.abs().sum().item() for each in module.parameters())}


def _with(settings: Callable[[PolicyContext], dict[str, Any]]) -> Callable[..., UnitPlan]:
    return lambda self, root, context: dict.fromkeys(Sound.plan(self, root, context), settings(context))


FAULTS = [
    *plugin_faults(Sound),
    # Puts what it chose into a module of its own, where there are many ranks.
    fault(Sound, "plan_names_modules_of_the_model", "GroupsForManyRanks",
          plan=lambda self, root, context: (
              {nn.ModuleList(Sound.plan(self, root, context)): {}} if context.shards > 1000
              else Sound.plan(self, root, context))),
    # Says by a fraction, where ranks are few, how much of the parameters to keep.
    fault(Sound, "overrides_are_settings_that_a_unit_has", "FractionOfRanks",
          plan=_with(lambda context: {"reshard_after_forward": 0.5} if context.shards == 1 else {})),
    # Writes on a module that it is a unit.
    fault(Sound, "model_is_left_as_it_was", "Marks", plan=_mark),
    # Chooses one unit fewer on another rank than the first.
    fault(Sound, "every_rank_gets_the_same_answer", "AsksTheLauncher", plan=_by_launcher),
    # Names a module once, and never again.
    fault(Sound, "asking_again_gives_the_same_answer", "ChoosesOnce", plan=_once),
    # Chooses what is in ignored modules, too.
    fault(Sound, "ignored_modules_are_not_chosen", "TakesIgnored",
          plan=lambda self, root, context: Sound.plan(
              self, root, PolicyContext(ignored_parameters=context.ignored_parameters))),
    # Counts parameters that are not sharded.
    fault(Sound, "ignored_parameters_do_not_count", "CountsIgnored", classes=(nn.Linear,), plan=_count_ignored),
    # Leaves out what is zero.
    fault(Sound, "models_on_the_meta_device_get_the_same_answer", "LooksAtValues", plan=_look),
    fault(Sound, "model_without_submodules", "TakesChildrenForGranted",
          plan=lambda self, root, context: next(root.children()) and Sound.plan(self, root, context)),
    fault(Sound, "reasons_are_text", "SaysNothing", reason=lambda self, module, name: None),
    # Lets units compute in bf16, and does not say that the model trains otherwise.
    fault(Sound, "training_is_that_of_the_unsharded_model", "Rounds",
          plan=_with(lambda context: {"precision": "bf16"})),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("planted", FAULTS)
def test_the_rule_catches_the_fault(planted: Fault) -> None:
    assert is_caught(PolicySuite, planted)


def test_a_unit_that_the_model_never_calls_is_named() -> None:
    class Suite(PolicySuite):
        def make(self) -> WrapPolicy:
            linears = Sound(plugin_context())
            linears.classes = (nn.Linear,)
            return linears

        def model(self) -> nn.Module:
            return nn.TransformerEncoderLayer(16, 2, 16)

        def batch(self) -> torch.Tensor:
            return torch.ones(1, 4, 16)

    with pytest.raises(AssertionError, match=r"the model never calls \['self_attn\.out_proj'\]"):
        Suite().test_training_is_that_of_the_unsharded_model()


def test_every_test_catches_something() -> None:
    assert rules_of(FAULTS) == names_of(PolicySuite)
