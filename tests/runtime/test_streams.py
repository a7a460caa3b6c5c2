"""Models that compute on several streams, and what has to wait for what then; on GPUs, ``gpu/test_engine_streams``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import polyshard
import pytest
import torch
from parity import root_of, units_of
from polyshard.interfaces import PluginContext
from polyshard.planning import thresholds
from pretended_streams import Gathering, Multiply, Onto, PretendedDevice, pretend
from torch import nn

#: Which unit is called, on which stream, and on which one its forward ends.
Call = tuple[int, str, str]


class Factor(nn.Module):
    """A unit of 1 KiB."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16, 16), 1 / 256))
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Multiply.apply(self.device, x, self.weight)


class Crossing(Factor):
    """Takes its input on the main stream and computes on the one beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = self.device
        x = Onto.apply(x, device, device.main, False)
        device.side.wait_stream(device.main)
        with device.on(device.side):
            y = super().forward(x)
        device.main.wait_stream(device.side)
        return y


class TwoLinears(nn.Module):
    """Two layers side by side on two streams, whose weight gradients are written into the reduction's input."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self.here = nn.Linear(1, 8, bias=False)
        self.beside = nn.Linear(1, 8, bias=False)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device, x = self.device, x.reshape(1, 1)
        here = Onto.apply(self.here(x), device, device.main, True)
        # Made last, its nodes run first: it is the one on whose stream the input is given memory.
        beside = Onto.apply(self.beside(x), device, device.side, True)
        return here.sum() + beside.sum()


class Net(nn.Module):
    """Calls units as it is told, and adds what they return."""

    def __init__(self, device: PretendedDevice, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.device = device
        self.units = nn.ModuleList(units)
        self.calls: Sequence[Call] = ()
        #: Whether streams wait for each other when a forward begins, and when it ends.
        self.joins = True
        #: Units whose result the loss does not depend on.
        self.unused: Sequence[int] = ()
        #: Calls without a gradient for their input.
        self.constant: Sequence[int] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = self.device
        streams = {"main": device.main, "side": device.side}
        if self.joins:
            device.side.wait_stream(device.main)
        total = []
        for position, (index, called, ends) in enumerate(self.calls):
            with device.on(streams[called]):
                y = self.units[index](x.detach() if position in self.constant else x)
            if index not in self.unused:
                total.append(Onto.apply(y, device, streams[ends], True))
        if self.joins:
            device.main.wait_stream(device.side)
        return torch.stack(total).sum()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PretendedDevice:
    return pretend(monkeypatch)


def sharded(device: PretendedDevice, units: Sequence[nn.Module], **settings: Any) -> tuple[Net, Gathering]:
    """One rank of four, on the pretended streams."""
    collectives = Gathering(PluginContext("fake", torch.device("cpu")), 0, 4)
    settings = {"batch_nbytes": 0, "policy": units_of(Factor, Crossing, TwoLinears), **settings}
    model = polyshard.shard(Net(device, units), polyshard.ShardConfig(collectives=collectives, **settings))
    assert isinstance(model, Net)
    root = root_of(model)
    root.use_streams(device.streams())
    for unit in root.units:
        unit.gathered.prepare()
        for leaf in unit.gathered.leaves:
            leaf.register_post_accumulate_grad_hook(device.accumulate)
    return model, collectives


def train(device: PretendedDevice, model: Net, *steps: Sequence[Call]) -> None:
    """Three times ``steps``: backwards that accumulate, and a last one that reduces."""
    for _ in range(3):
        for index, calls in enumerate(steps):
            model.calls = calls
            with nullcontext() if index == len(steps) - 1 else polyshard.no_sync(model):
                device.backward(model(torch.ones((), requires_grad=True)))
        assert any(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


def factors(device: PretendedDevice, count: int) -> list[nn.Module]:
    return [Factor(device) for _ in range(count)]


def on(stream: str, *units: int) -> list[Call]:
    return [(unit, stream, stream) for unit in units]


#: Two on each stream: where room for two reductions is shared, one stream makes it by ending what the other began.
TURNS = on("main", 0, 1) + on("side", 2, 3) + on("main", 4, 5) + on("side", 6, 7) + on("main", 8)


def test_the_memory_of_a_reduction_is_taken_again_behind_it(device: PretendedDevice) -> None:
    train(device, sharded(device, factors(device, 9))[0], TURNS)


@pytest.mark.parametrize("limit", [4 * 1024, "16 MiB"])
def test_gradients_of_several_streams_share_a_bucket(device: PretendedDevice, limit: int | str) -> None:
    model, collectives = sharded(device, factors(device, 9), batch_nbytes=limit)
    train(device, model, TURNS)
    # Where gradients were computed decides nothing about when they are sent: that would differ between ranks.
    reductions = sum(call.operation == "reduce_scatter" for call in collectives.calls)
    assert reductions == 3 * (3 if limit == 4 * 1024 else 1)


@pytest.mark.parametrize("held_nbytes", [1024, 0])
def test_gradients_of_several_streams_are_reduced_by_one_launch(
    device: PretendedDevice, monkeypatch: pytest.MonkeyPatch, held_nbytes: int
) -> None:
    monkeypatch.setattr(thresholds, "HELD_NBYTES", held_nbytes)
    model, collectives = sharded(device, factors(device, 9), batch_nbytes=2 * 1024)
    train(device, model, TURNS)
    assert list(collectives.reduction_batches) == 3 * [2, 2, 2, 2]


@pytest.mark.parametrize("limit", [0, 2 * 1024])
@pytest.mark.parametrize(
    ("strategy", "releases"), [("full_shard", None), ("full_shard", 2), ("shard_grad_op", None), ("no_shard", None)]
)
@pytest.mark.parametrize(("first", "second"), [("main", "side"), ("side", "main")])
def test_two_streams_use_one_unit(
    device: PretendedDevice, strategy: str, releases: int | None, first: str, second: str, limit: int
) -> None:
    calls = on(first, 3, 4, 0) + on(second, 0) + on(first, 1) + on(second, 1, 2, 0)
    settings = {"strategy": strategy, "reshard_after_forward": releases, "batch_nbytes": limit}
    train(device, sharded(device, factors(device, 5), **settings)[0], calls)


@pytest.mark.parametrize("limit", [0, 2 * 1024, 4 * 1024])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_gradients_are_copied_behind_the_stream_that_computed_them(
    device: PretendedDevice, strategy: str, limit: int
) -> None:
    model, _ = sharded(device, [Crossing(device) for _ in range(9)], batch_nbytes=limit, strategy=strategy)
    train(device, model, [(index, "main", "side") for index in range(9)])


@pytest.mark.parametrize(
    ("strategy", "held_nbytes", "alive"),
    [("full_shard", 1024, 3), ("full_shard", 1023, 1), ("hybrid_shard", 1024, 3), ("no_shard", 1024, 1)],
)
def test_large_gradients_give_their_memory_back_before_they_are_reduced(
    device: PretendedDevice, monkeypatch: pytest.MonkeyPatch, strategy: str, held_nbytes: int, alive: int
) -> None:
    # A unit's gradient has 1 KiB. Smaller ones are held by two reductions in flight, while the next one is computed.
    # Where nothing is sharded, any number of reductions is in flight.
    monkeypatch.setattr(thresholds, "HELD_NBYTES", held_nbytes)
    settings = {"strategy": strategy} | ({"shard_size": 2} if strategy == "hybrid_shard" else {})
    model, _ = sharded(device, factors(device, 9), **settings)
    train(device, model, TURNS)
    assert device.most_gradients == alive
    model, _ = sharded(device, [Crossing(device) for _ in range(9)], **settings)
    train(device, model, [(index, "main", "side") for index in range(9)])


#: By themselves, by launches of two, each with two segments, and merged.
@pytest.mark.parametrize(("limit", "launches"), [(0, 9 * [2]), (256, [4, 4, 4, 4, 2]), (1024, [])])
def test_weight_gradients_of_two_streams_go_into_one_input(
    device: PretendedDevice, monkeypatch: pytest.MonkeyPatch, limit: int, launches: list[int]
) -> None:
    monkeypatch.setattr(thresholds, "DIRECT_NUMEL", 1)
    monkeypatch.setattr(thresholds, "SIDE_BY_SIDE_NBYTES", 0)
    model, collectives = sharded(device, [TwoLinears(device) for _ in range(9)], batch_nbytes=limit)
    train(device, model, on("main", *range(9)))
    assert list(collectives.reduction_batches) == 3 * launches


@pytest.mark.parametrize("limit", [0, 2 * 1024])
def test_gradients_that_wait_for_a_later_backward_may_come_from_other_streams(
    device: PretendedDevice, limit: int
) -> None:
    model, _ = sharded(device, factors(device, 4), batch_nbytes=limit)
    train(device, model, on("side", 0, 1, 2, 3), on("main", 0, 1, 2, 3), on("side", 0, 1) + on("main", 2, 3))


def test_forwards_on_two_streams_gather_into_the_same_memory(device: PretendedDevice) -> None:
    model, _ = sharded(device, factors(device, 3))
    model.joins = False
    for stream, current in (("side", device.side), ("main", device.main)) * 2:
        model.calls = on(stream, 0, 1, 2)
        with torch.no_grad(), device.on(current):
            model(torch.ones(()))


def test_what_is_gathered_after_a_second_reduction_of_a_unit_waits_for_its_memory(device: PretendedDevice) -> None:
    model, _ = sharded(device, factors(device, 2), backward_prefetch=0)
    # The first call's gradient comes after those of the second were reduced, with the end of the backward, which then
    # gathers a unit that had none: other ranks may have a gradient for it.
    model.unused, model.constant = (0,), (1,)
    train(device, model, on("main", 0, 1, 1))


@pytest.mark.parametrize("releases", [True, False])
def test_stages_of_one_process_share_streams(device: PretendedDevice, releases: bool) -> None:
    models = [sharded(device, factors(device, 5), reshard_after_forward=releases)[0] for _ in range(2)]
    roots = [root_of(model) for model in models]
    roots[1].use_streams(roots[0].streams)
    for model in models:
        model.calls = on("main", 0, 1, 2, 3, 4)
    for _ in range(3):
        for root in roots:
            root.synchronises = False
            for module_state in root.module_states:
                module_state.releases_after_backward = releases
        # Forwards of two microbatches, and their backwards, each through both stages.
        inputs = torch.ones((), requires_grad=True)
        outputs = [(models[0](inputs), models[1](inputs)) for _ in range(2)]
        for first, second in outputs:
            device.backward(second)
            device.backward(first)
        for root in reversed(roots):
            root.synchronises = True
            for module_state in root.module_states:
                module_state.releases_after_backward = True
            root.reduce_waiting()
        for model in models:
            assert all(parameter.grad is not None for parameter in model.parameters())
            model.zero_grad()


@pytest.mark.parametrize("releases", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_the_gathers_of_a_backward_wait_for_the_backward_before_it(
    device: PretendedDevice, releases: bool, waits: bool
) -> None:
    model = sharded(device, factors(device, 5), reshard_after_forward=releases)[0]
    model.calls = on("main", 0, 1, 2, 3, 4)
    for _ in range(3):
        outputs = [model(torch.ones((), requires_grad=True)) for _ in range(2)]
        with polyshard.no_sync(model) if waits else nullcontext():
            device.backward(outputs[0])
        device.backward(outputs[1])
        model.zero_grad()
