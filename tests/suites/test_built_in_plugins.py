"""Every built-in precision plugin, manager, policy and listener against its contract's suite, by a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polyshard.interfaces import PluginContext
from polyshard_plugins.finite import Finite
from polyshard_plugins.offload import CpuOffload, NoOffload, OptimizerOffload
from polyshard_plugins.precision import Bf16, Fp16, Fp32, Mixed, Unchanged
from polyshard_plugins.progress import Progress
from polyshard_plugins.trace import Trace
from polyshard_policies.combined import Or
from polyshard_policies.functions import Custom, Lambda, Size
from polyshard_policies.module_class import Always, ModuleClass, Never, NoSplitModules, Transformer
from polyshard_testing import ListenerSuite, OffloadSuite, PolicySuite, PrecisionSuite, plugin_context
from torch import nn


def keeps_linears_gathered(module: nn.Module) -> bool | dict[str, Any]:
    return {"reshard_after_forward": False, "placement": 1} if isinstance(module, nn.Linear) else False


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


MIXED: dict[str, Any] = {
    "param": "bf16",
    "reduce": "fp32",
    "buffer": "fp32",
    "output": "fp32",
    "full_precision_in_eval": True,
    "overrides": {"layers.*": {"communication": "fp32"}, nn.LayerNorm: {"param": "fp32"}},
}

#: A suite, and what constructs the plugin in a context.
CASES: dict[str, tuple[type[Any], Callable[[PluginContext], Any]]] = {
    "Unchanged": (PrecisionSuite, Unchanged),
    "Fp32": (PrecisionSuite, Fp32),
    "Bf16": (PrecisionSuite, lambda context: Bf16(context, leave_alone=nn.LayerNorm)),
    "Fp16": (PrecisionSuite, Fp16),
    "MixedByDefault": (PrecisionSuite, Mixed),
    "Mixed": (PrecisionSuite, lambda context: Mixed(context, **MIXED)),
    "NoOffload": (OffloadSuite, NoOffload),
    "CpuOffload": (OffloadSuite, CpuOffload),
    "OptimizerOffload": (OffloadSuite, OptimizerOffload),
    "Always": (PolicySuite, Always),
    "Never": (PolicySuite, Never),
    "ModuleClass": (PolicySuite, lambda context: ModuleClass(context, [nn.LayerNorm, "torch.nn:Linear"])),
    "Transformer": (PolicySuite, lambda context: Transformer(context, nn.Sequential)),
    "NoSplitModules": (PolicySuite, NoSplitModules),
    "Size": (PolicySuite, lambda context: Size(context, min_num_params=250)),
    "Lambda": (PolicySuite, lambda context: Lambda(context, is_linear)),
    "Custom": (PolicySuite, lambda context: Custom(context, keeps_linears_gathered)),
    "Or": (PolicySuite, lambda context: Or(context, [nn.LayerNorm, Custom(context, keeps_linears_gathered)])),
    "Finite": (ListenerSuite, Finite),
    "Progress": (ListenerSuite, Progress),
}


def suite_of(name: str, suite: type[Any], factory: Callable[[PluginContext], Any]) -> type[Any]:
    def make(self: Any) -> Any:
        return factory(plugin_context("under test"))

    return type(name, (suite,), {"make": make, "__module__": __name__})


for name, (suite, factory) in CASES.items():
    globals()[f"Test{name}"] = suite_of(f"Test{name}", suite, factory)


class TestTrace(ListenerSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.traces = tmp_path

    def make(self) -> object:
        return Trace(plugin_context(), folder=self.traces, steps="every", picture="none")
