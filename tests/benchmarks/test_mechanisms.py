"""Peers that lack a mechanism: each switch does what it says, and nothing else."""

from __future__ import annotations

import functools
import sys
from collections import deque
from types import ModuleType
from typing import Any

import pytest
import torch
from polyshard.planning import thresholds
from polyshard.runtime.parameters import LazyParameters
from torch import nn


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
        from workloads import Batches, Workload

        workload = Workload("small", 64, 12, 4, 4, 96, 512, 2, 16, False, 1)
        cpu = torch.device("cpu")
        peer = contender(f"polyshard:collectives=fake:collectives__world_size=2:{name}")
        self.losses: list[float] = []
        self.shown: list[type] = []
        with peer.switch():
            step: Any = peer.build(Site(workload, cpu, 0, 2, False))
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
            self.shown = [type(m._parameters) for m in (model.tail.head, model.blocks[5].up)]

        model.blocks[0].up.register_forward_pre_hook(look)


@functools.cache
def with_all() -> Seen:
    """With nothing switched off."""
    return Seen("")


@pytest.mark.slow
def test_nothing_switched_off_is_the_engine_with_every_mechanism() -> None:
    whole = with_all()
    assert whole.units == 14
    assert whole.shown == [LazyParameters, dict]
    assert "forward" in whole.model.get_submodule("tail.head").__dict__
    # A block has nine parameters, the tail two. Forward: all; backward: all but the embedding, which reads nothing, and
    # the tail, which is still there.
    assert whole.gathers == (1 + 12 * 9 + 2) + 12 * 9
    assert whole.batches == [1 + 12 * 9 + 2, 12 * 9]
    # All in one bucket.
    assert whole.reductions == 1


CHANGES: dict[str, dict[str, Any]] = {
    "without=nothing": {},
    "split_root=false": {"units": 13, "gathers": (1 + 12 * 9 + 2) + 12 * 9},
    "without=direct-weight-gradients": {},
    "without=embedding-not-gathered": {"gathers": (1 + 12 * 9 + 2) + 12 * 9 + 1},
    "without=kept-at-the-turn": {"gathers": (1 + 12 * 9 + 2) + 12 * 9 + 2},
    "without=batched-gathers": {"batches": [9] * 12 + [2] + [9] * 12},
    "without=merged-reductions": {"reductions": 1 + 12 * 9 + 2, "reduction_batches": [1 + 12 * 9 + 2]},
    "without=buckets": {"reductions": 14, "reduction_batches": []},
    "without=held-gradients": {},
    "without=places": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_switch_changes_what_it_says_and_no_number(name: str) -> None:
    whole, off = with_all(), Seen(name)
    # A pretended rank has what this one has: other cuts make other weights of them.
    assert off.losses == whole.losses or name == "split_root=false"
    for what, value in CHANGES[name].items():
        assert getattr(off, what) == value, what
    direct = "forward" in off.model.get_submodule("tail.head").__dict__
    assert direct is (name != "without=direct-weight-gradients")


def test_every_switch_finds_what_it_replaces_and_puts_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyshard.runtime.reduce import ReductionInput
    from polyshard_backends import nccl
    from switches import SWITCHES

    triton = ModuleType("triton")
    triton.jit = lambda kernel: kernel  # type: ignore[attr-defined]
    triton.cdiv = lambda numel, block: -(-numel // block)  # type: ignore[attr-defined]
    triton.language = ModuleType("triton.language")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    monkeypatch.delitem(sys.modules, "polyshard_backends.row_mean", raising=False)
    before = nccl._find_mean_of_rows, nccl.SharedScope, ReductionInput.new_result
    for switch in SWITCHES.values():
        with switch():
            pass
        # Once more: a switch is turned at each step.
        with switch():
            pass
    assert (nccl._find_mean_of_rows, nccl.SharedScope, ReductionInput.new_result) == before
