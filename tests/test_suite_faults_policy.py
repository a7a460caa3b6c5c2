"""The suite of wrap policies fails for those that break their contract, each in one way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from polyshard.interfaces import PolicyContext, WrapPolicy
from polyshard.testing import PolicySuite


class Careless(WrapPolicy):
    """Chooses ignored modules and a setting that does not exist."""

    def __init__(self, setting: str) -> None:
        self.setting = setting

    def plan(self, root: torch.nn.Module, context: PolicyContext) -> Mapping[torch.nn.Module, Mapping[str, Any]]:
        return {module: {self.setting: "bf16"} for module in root.modules()}


def test_careless_policy_fails() -> None:
    class Suite(PolicySuite):
        def __init__(self, setting: str) -> None:
            self.setting = setting

        def make(self) -> WrapPolicy:
            return Careless(self.setting)

    Suite("precision").test_plan_names_modules_of_the_model()
    with pytest.raises(AssertionError):
        Suite("presicion").test_plan_names_modules_of_the_model()
    with pytest.raises(AssertionError):
        Suite("precision").test_ignored_modules_are_not_chosen()
