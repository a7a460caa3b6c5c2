"""Built-in casters, managers, policies and listeners against their contracts' suites, where models compute on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from polyshard.interfaces import OffloadManager, PrecisionCaster, WrapPolicy
from polyshard_plugins.finite import Finite
from polyshard_plugins.offload import CpuOffload, NoOffload
from polyshard_plugins.precision import Bf16, Fp16, Fp32
from polyshard_plugins.trace import Trace
from polyshard_policies.functions import Size
from polyshard_testing import ListenerSuite, OffloadSuite, PolicySuite, PrecisionSuite, plugin_context

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


class TestNoOffload(OffloadSuite):
    device = CUDA

    def make(self) -> OffloadManager:
        return NoOffload(plugin_context(device=CUDA))


class TestCpuOffload(OffloadSuite):
    device = CUDA

    def make(self) -> OffloadManager:
        return CpuOffload(plugin_context(device=CUDA))


class TestUnpinnedCpuOffload(OffloadSuite):
    device = CUDA

    def make(self) -> OffloadManager:
        return CpuOffload(plugin_context(device=CUDA), pin_memory=False)


class TestFp32(PrecisionSuite):
    device = CUDA
    training_tolerance = 1e-5

    def make(self) -> PrecisionCaster:
        return Fp32(plugin_context(device=CUDA))


class TestBf16(PrecisionSuite):
    device = CUDA

    def make(self) -> PrecisionCaster:
        return Bf16(plugin_context(device=CUDA))


class TestFp16(PrecisionSuite):
    device = CUDA

    def make(self) -> PrecisionCaster:
        return Fp16(plugin_context(device=CUDA))


class TestSize(PolicySuite):
    device = CUDA

    def make(self) -> WrapPolicy:
        return Size(plugin_context(device=CUDA), min_num_params=250)


class TestFinite(ListenerSuite):
    device = CUDA

    def make(self) -> object:
        return Finite(plugin_context(device=CUDA))


class TestTrace(ListenerSuite):
    device = CUDA

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.traces = tmp_path

    def make(self) -> object:
        return Trace(plugin_context(device=CUDA), folder=self.traces, steps="every", picture="none")
