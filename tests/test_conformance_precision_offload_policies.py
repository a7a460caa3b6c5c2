"""Every built-in caster, manager, policy and listener against its contract's suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from polyshard.interfaces import OffloadManager, PrecisionCaster, WrapPolicy
from polyshard.testing import ListenerSuite, OffloadSuite, PolicySuite, PrecisionSuite, plugin_context
from polyshard_plugins.finite import Finite
from polyshard_plugins.offload import CpuOffload, NoOffload
from polyshard_plugins.precision import Bf16, Fp16, Fp32, Mixed, Unchanged
from polyshard_plugins.trace import Trace
from polyshard_policies.combined import Or
from polyshard_policies.functions import Custom, Lambda, Size
from polyshard_policies.module_class import Always, ModuleClass, Never, NoSplitModules, Transformer

CONTEXT = plugin_context("under test")


class TestUnchanged(PrecisionSuite):
    def make(self) -> PrecisionCaster:
        return Unchanged(CONTEXT)


class TestFp32(PrecisionSuite):
    def make(self) -> PrecisionCaster:
        return Fp32(CONTEXT)


class TestBf16(PrecisionSuite):
    def make(self) -> PrecisionCaster:
        return Bf16(CONTEXT, leave_alone=torch.nn.LayerNorm)


class TestFp16(PrecisionSuite):
    def make(self) -> PrecisionCaster:
        return Fp16(CONTEXT)


class TestMixedByDefault(PrecisionSuite):
    def make(self) -> PrecisionCaster:
        return Mixed(CONTEXT)


class TestMixed(PrecisionSuite):
    def make(self) -> PrecisionCaster:
        return Mixed(
            CONTEXT,
            param="bf16",
            reduce="fp32",
            buffer="fp32",
            output="fp32",
            full_precision_in_eval=True,
            overrides={"layers.*": {"wire": "fp32"}, torch.nn.LayerNorm: {"param": "fp32"}},
        )


class TestNoOffload(OffloadSuite):
    def make(self) -> OffloadManager:
        return NoOffload(CONTEXT)


class TestCpuOffload(OffloadSuite):
    def make(self) -> OffloadManager:
        return CpuOffload(CONTEXT)


def keeps_linears_gathered(module: torch.nn.Module) -> bool | dict[str, Any]:
    return {"reshard_after_forward": False} if isinstance(module, torch.nn.Linear) else False


def is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


class TestAlways(PolicySuite):
    def make(self) -> WrapPolicy:
        return Always(CONTEXT)


class TestNever(PolicySuite):
    def make(self) -> WrapPolicy:
        return Never(CONTEXT)


class TestModuleClass(PolicySuite):
    def make(self) -> WrapPolicy:
        return ModuleClass(CONTEXT, [torch.nn.LayerNorm, "torch.nn:Linear"])


class TestTransformer(PolicySuite):
    def make(self) -> WrapPolicy:
        return Transformer(CONTEXT, torch.nn.Sequential)


class TestNoSplitModules(PolicySuite):
    def make(self) -> WrapPolicy:
        return NoSplitModules(CONTEXT)


class TestSize(PolicySuite):
    def make(self) -> WrapPolicy:
        return Size(CONTEXT, min_num_params=250)


class TestLambda(PolicySuite):
    def make(self) -> WrapPolicy:
        return Lambda(CONTEXT, is_linear)


class TestCustom(PolicySuite):
    def make(self) -> WrapPolicy:
        return Custom(CONTEXT, keeps_linears_gathered)


class TestOr(PolicySuite):
    def make(self) -> WrapPolicy:
        return Or(CONTEXT, [torch.nn.LayerNorm, Custom(CONTEXT, keeps_linears_gathered)])


class TestFinite(ListenerSuite):
    def make(self) -> object:
        return Finite(plugin_context())


class TestTrace(ListenerSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.traces = tmp_path

    def make(self) -> object:
        return Trace(plugin_context(), folder=self.traces, steps="every", picture="none")
