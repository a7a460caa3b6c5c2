"""The benchmark that switches mechanisms off: each switch does what it says, its arithmetic, one run on two ranks."""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from polyshard.planning import thresholds
from polyshard.runtime.bindings import LazyParameter, ShardedParameter
from processes import run_script
from torch import nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    # Embedding and head of the model below, and nothing else of it.
    monkeypatch.setattr(thresholds, "SMALLEST_SPLIT", 64 * 512)
    monkeypatch.setattr(thresholds, "DIRECT_NUMEL", 64 * 512)


class Seen:
    """What a model of two parts and twelve blocks did in its third step, over pretended collectives."""

    def __init__(self, name: str) -> None:
        from contenders import Site, contender
        from parity import root_of
        from switches import MECHANISMS, Mechanism
        from workloads import Batches, Workload

        mechanism = next((each for each in MECHANISMS if each.name == name), Mechanism("none", ""))
        workload = Workload("small", 64, 12, 4, 4, 96, 512, 2, 16, False, 1, 0.1)
        cpu = torch.device("cpu")
        peer = f"polyshard:collectives=fake:collectives__world_size=2:{mechanism.setting}"
        self.losses: list[float] = []
        self.shown: list[type] = []
        with mechanism.switch():
            step: Any = contender(peer).build(Site(workload, cpu, 0, 2, False))
            root = root_of(step.model)
            self.model: nn.Module = step.model
            self.units = len(root.units)
            for number in range(3):
                recorded = [root.collectives.calls, root.collectives.batches, root.collectives.reduction_batches]
                for each in recorded:
                    each.clear()
                if number == 2:
                    self._look_into_a_forward(step.model)
                self.losses.append(step(*Batches(workload, 0, cpu).batch(number)).item())
            calls: deque[Any] = root.collectives.calls
        self.gathers = sum(call.operation == "all_gather" for call in calls)
        self.reductions = sum(call.operation == "reduce_scatter" for call in calls)
        self.batches = list(root.collectives.batches)
        self.reduction_batches = list(root.collectives.reduction_batches)

    def _look_into_a_forward(self, model: Any) -> None:
        def look(*_: Any) -> None:
            # A part's own dict would bring the parameter.
            self.shown = [type(dict.get(m._parameters, "weight")) for m in (model.tail.head, model.blocks[5].up)]

        model.blocks[0].up.register_forward_pre_hook(look)


@pytest.mark.slow
def test_nothing_switched_off_is_the_engine_with_every_mechanism() -> None:
    whole = Seen("none")
    assert whole.units == 14
    assert whole.shown == [LazyParameter, ShardedParameter]
    assert "forward" in whole.model.get_submodule("tail.head").__dict__
    # Forward: all; backward: all but the embedding, which reads nothing, and the tail, which is still there.
    assert whole.gathers == 14 + 12
    assert whole.batches == [14, 12]
    # All in one bucket.
    assert whole.reductions == 1


CHANGES: dict[str, dict[str, Any]] = {
    "nothing, again": {},
    "split root": {"units": 13, "gathers": 13 + 12},
    "lending": {"shown": [ShardedParameter, ShardedParameter]},
    "stand-ins": {"shown": [nn.Parameter, nn.Parameter]},
    "direct weight gradients": {},
    "embedding not gathered": {"gathers": 14 + 13},
    "kept at the turn": {"gathers": 14 + 13},
    "batched gathers": {"batches": []},
    "merged reductions": {"reductions": 14, "reduction_batches": [14]},
    "buckets": {"reductions": 14, "reduction_batches": []},
    "held gradients": {},
    "places": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_switch_changes_what_it_says_and_no_number(name: str) -> None:
    whole, off = Seen("none"), Seen(name)
    # A pretended rank has what this one has: other cuts make other weights of them.
    assert off.losses == whole.losses or name == "split root"
    for what, value in CHANGES[name].items():
        assert getattr(off, what) == value, what
    direct = "forward" in off.model.get_submodule("tail.head").__dict__
    assert direct is (name != "direct weight gradients")


def test_every_switch_finds_what_it_replaces_and_puts_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyshard.runtime.reduce import ReductionInput
    from polyshard_backends import nccl
    from switches import MECHANISMS

    triton = ModuleType("triton")
    triton.jit = lambda kernel: kernel  # type: ignore[attr-defined]
    triton.cdiv = lambda numel, block: -(-numel // block)  # type: ignore[attr-defined]
    triton.language = ModuleType("triton.language")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    monkeypatch.delitem(sys.modules, "polyshard_backends.row_mean", raising=False)
    before = nccl._find_mean_of_rows, nccl.SharedScope, ReductionInput.new_result
    for mechanism in MECHANISMS:
        with mechanism.switch():
            pass
        # Once more: a switch is turned at each step.
        with mechanism.switch():
            pass
    assert (nccl._find_mean_of_rows, nccl.SharedScope, ReductionInput.new_result) == before


def rounds(heat: int, mechanism: str, medians: list[float]) -> list[dict[str, Any]]:
    common = {"workload": "tiny", "mode": "eager", "heat": heat, "mechanism": mechanism}
    return [
        common | {"round": number, "device_ms": [ms - 1, ms, ms + 9], "host_ms": [ms], "processor_ms": [2 * ms]}
        for number, ms in enumerate(medians)
    ]


def model(heat: int, mechanism: str, **found: Any) -> dict[str, Any]:
    built = {"peak_gib": 1.0, "reserved_gib": 2.0, "kept_gib": 0.5, "losses": [4.0, 2.0]}
    common = {"workload": "tiny", "mode": "eager", "heat": heat, "mechanism": mechanism}
    return common | (found if "error" in found else built | found)


def test_ratios_are_taken_within_a_round_and_a_heat() -> None:
    from payoff import summarise, table

    report = {
        "models": [
            model(0, "nothing"),
            model(0, "places", peak_gib=1.5, losses=[4.0, 2.5]),
            model(0, "lending"),
            model(1, "nothing"),
            model(1, "split root", error="out of memory"),
            model(1, "lending", error="late"),
        ],
        "rows": [
            *rounds(0, "nothing", [10.0, 20.0, 40.0]),
            *rounds(0, "places", [11.0, 24.0, 40.0]),
            *rounds(1, "nothing", [99.0, 99.0]),
        ],
    }
    found = summarise(report)["tiny"]["eager"]
    places = found["places"]
    assert (places["rounds"], places["steps"]) == (3, 9)
    ratio = places["device_ms"]["ratio"]
    assert (ratio["median"], ratio["min"], ratio["max"]) == (1.1, 1.0, 1.2)
    assert (places["device_ms"]["without"], places["device_ms"]["with"]) == (24.0, 20.0)
    assert places["peak_gib"] == {"without": 1.5, "with": 1.0}
    assert places["loss_difference"] == 0.25
    assert found["split root"] == {"error": "out of memory"}
    text = table({"tiny": {"eager": found}})
    assert "1.100 (1.000..1.200)" in text
    assert "1.00 -> 1.50" in text
    assert "split root: out of memory" in text


@pytest.mark.nightly
def test_two_ranks_measure_and_agree(tmp_path: Path) -> None:
    out = tmp_path / "mechanisms.json"
    measured = ["--device", "cpu", "--work", "tiny", "--rounds", "1", "--turns", "2", "--out", str(out)]
    mechanisms = ["--mechanisms", "nothing, again;stand-ins;buckets;registered memory"]
    done = run_script(2, BENCHMARKS / "mechanisms.py", [*measured, *mechanisms])
    assert done.codes == [0, 0], done.errors[-3000:]
    found = json.loads(out.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mechanisms.json"]
    tiny = found["summary"]["tiny"]["eager"]
    # The last one needs a GPU.
    assert list(tiny) == ["nothing, again", "stand-ins", "buckets"]
    for figures in tiny.values():
        assert (figures["rounds"], figures["steps"]) == (1, 2)
        assert figures["loss_difference"] < 1e-4
        assert figures["device_ms"]["ratio"]["median"] > 0
    assert found["environment"]["world_size"] == 2
    assert len(found["rows"]) == 4
    assert "buckets" in done.output
