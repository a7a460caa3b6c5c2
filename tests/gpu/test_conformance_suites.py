"""Built-in precision plugins, managers and listeners against their contracts' suites, with models on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from polyshard.interfaces import COMPLETED, Collectives, PluginContext, Work
from polyshard_backends.fake import FakeCollectives
from polyshard_plugins.block_scaled import Fp8, Int8
from polyshard_plugins.finite import Finite
from polyshard_plugins.offload import CpuOffload, NoOffload, OptimizerOffload, PartialOffload
from polyshard_plugins.precision import Bf16, Fp16, Fp32
from polyshard_plugins.trace import Trace
from polyshard_testing import CollectivesSuite, ListenerSuite, OffloadSuite, PrecisionSuite, plugin_context
from suite_faults import names_of, passes

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)

#: A suite, and what constructs the plugin in a context.
CASES: dict[str, tuple[type[Any], Callable[[PluginContext], Any]]] = {
    "NoOffload": (OffloadSuite, NoOffload),
    "CpuOffload": (OffloadSuite, CpuOffload),
    "UnpinnedCpuOffload": (OffloadSuite, lambda context: CpuOffload(context, pin_memory=False)),
    "OptimizerOffload": (OffloadSuite, OptimizerOffload),
    "PartialOffload": (OffloadSuite, lambda context: PartialOffload(context, units="*.[0-1]", inner="optimizer")),
    "Fp32": (PrecisionSuite, Fp32),
    "Bf16": (PrecisionSuite, Bf16),
    "Fp16": (PrecisionSuite, Fp16),
    "Int8": (PrecisionSuite, lambda context: Int8(context, min_numel=0)),
    "Fp8": (PrecisionSuite, lambda context: Fp8(context, min_numel=0)),
    "Finite": (ListenerSuite, Finite),
}

#: Of the suites' tolerances, those that are not their own.
TOLERANCES: dict[str, dict[str, float]] = {
    "Fp32": {"training_tolerance": 1e-5},
    "Int8": {"encoding_tolerance": 0.0065},
    "Fp8": {"encoding_tolerance": 0.067},
}


def suite_of(name: str, suite: type[Any], factory: Callable[[PluginContext], Any]) -> type[Any]:
    def make(self: Any) -> Any:
        return factory(plugin_context("under test", CUDA))

    settings = {"make": make, "device": CUDA, "__module__": __name__, **TOLERANCES.get(name, {})}
    return type(name, (suite,), settings)


for name, (suite, factory) in CASES.items():
    globals()[f"Test{name}"] = suite_of(name, suite, factory)


class TestTrace(ListenerSuite):
    device = CUDA

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.traces = tmp_path

    def make(self) -> object:
        return Trace(plugin_context(device=CUDA), folder=self.traces, steps="every", picture="none")


T = TypeVar("T")


def delay() -> None:
    """Keep the current stream busy for some milliseconds: longer than the host takes to issue what follows."""
    matrix = torch.zeros(4096, 4096, device="cuda")
    for _ in range(20):
        matrix = matrix @ matrix


class GathersUnordered(FakeCollectives):
    """What it gathers is there for the stream that asked, and for no other."""

    api_version = 1

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            delay()
        super().all_gather(out, shard)
        return COMPLETED


class ExchangesUnordered(FakeCollectives):
    """The same of blocks."""

    api_version = 1

    def all_to_all(self, out: torch.Tensor, *blocks: Any) -> Work:
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            delay()
        super().all_to_all(out, *blocks)
        return COMPLETED


@pytest.mark.parametrize("backend", [GathersUnordered, ExchangesUnordered])
def test_only_the_order_of_streams_fails(backend: type[FakeCollectives]) -> None:
    class Suite(CollectivesSuite):
        def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
            context = plugin_context(device="cuda")
            return [fn(backend(context, rank=rank, world_size=world_size)) for rank in range(world_size)]

        def factory(self) -> Callable[..., Any]:
            return backend

    found = {name for name in names_of(CollectivesSuite) if not passes(Suite(), f"test_{name}", 2)}
    assert found == {"waiting_orders_streams"}
