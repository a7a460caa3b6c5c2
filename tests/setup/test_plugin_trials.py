"""Plugins that would silently compute wrongly: found by value where a model is sharded, or by its first forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import polyshard
import pytest
import torch
from int8_wire import Int8Wire
from parity import on_ranks, threaded
from polyshard import errors
from polyshard.interfaces import (
    COMPLETED,
    CollectivesCapabilities,
    OffloadCapabilities,
    OffloadManager,
    PluginContext,
    UnitSpec,
    Work,
)
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from refusal import Tower, description, refused, silent
from torch import nn

Place = Callable[[torch.Tensor], torch.Tensor]
Fetch = Callable[[torch.Tensor, torch.Tensor], object]


class Shelf(OffloadManager):
    """Parks what ``park`` makes of a shard, and brings back what ``bring`` writes."""

    capabilities = OffloadCapabilities(parks=True)

    def __init__(self, park: Place = torch.clone, bring: Fetch = lambda own, master: own.copy_(master)) -> None:
        self._park, self._bring = park, bring

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return self._park(shard)

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        self._bring(own_slice, master)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.clone() if into is None else into.add_(grad)


#: A manager, and words of the error.
MANAGERS: dict[str, tuple[Shelf, tuple[str, ...]]] = {
    "memory without the values": (Shelf(torch.zeros_like), ("place of", "0.0 where ", " was")),
    "the shard itself, emptied": (Shelf(torch.Tensor.zero_), ("place of", "0.0 where ")),
    "the last element is missing": (
        Shelf(lambda shard: torch.cat([shard[:-1], shard.new_full((1,), 7.0)])),
        ("place of", "7.0 where "),
    ),
    "fetch does nothing": (Shelf(bring=lambda own, master: None), ("fetch of", "nan where ")),
    "fetch writes half": (
        Shelf(bring=lambda own, master: own[: len(own) // 2].copy_(master[: len(own) // 2])),
        ("nan",),
    ),
    "fetch adds": (Shelf(bring=lambda own, master: own.add_(master)), ("fetch of", "nan where ")),
    "fetch scales": (Shelf(bring=lambda own, master: own.copy_(master * 2)), ("fetch of",)),
}


@pytest.mark.parametrize(("manager", "words"), MANAGERS.values(), ids=MANAGERS)
def test_managers_that_lose_values(manager: Shelf, words: tuple[str, ...]) -> None:
    config = silent(offload=manager, policy="always", check_ranks=False, strategy="full_shard")
    refused(Tower(), config, errors.PluginContractError, "Shelf", "unit 'first'", "rank 2", *words, twin=Tower())


def test_a_manager_may_keep_the_shard_where_it_is() -> None:
    collectives = {"name": "fake", "world_size": 4}
    model = polyshard.shard(Tower(), polyshard.ShardConfig(collectives=collectives, offload=Shelf(lambda shard: shard)))
    model(torch.ones(1, 3)).sum().backward()


class Forgets(Int8Wire):
    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Leaves what was there."""


class FirstRow(Int8Wire):
    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        super().decode(unit, wire[:1], out[:1])


class WithoutScale(Int8Wire):
    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wire[:, self._HEADER : self._HEADER + unit.shard_numel].clone().view(torch.int8))


class FromTheEnd(Int8Wire):
    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        super().encode(unit, wire, shard.flip(0))


class Unsigned(Int8Wire):
    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        super().encode(unit, wire, shard.abs())


@pytest.mark.parametrize("caster", [Forgets, FirstRow, WithoutScale, FromTheEnd, Unsigned])
def test_codecs_that_do_not_undo_each_other(caster: type[Int8Wire]) -> None:
    config = silent(precision=caster(), policy="always", check_ranks=False, strategy="full_shard")
    words = (f"decode of test_plugin_trials:{caster.__name__}", "unit '", "rank 2")
    refused(Tower(), config, errors.PluginContractError, *words[1:], caster.__name__, twin=Tower())


class Faulty(ThreadedCollectives):
    """Does to gathers what a case says."""

    def __init__(self, world: ThreadedWorld, rank: int, **faults: Any) -> None:
        super().__init__(PluginContext("faulty", torch.device("cpu")), world, rank)
        self._gather = faults.get("gather", lambda out, shard, rank, do: do())
        self._reduction: Work | None = faults.get("reduction", COMPLETED)
        self._capable: dict[str, Any] = faults.get("capable", {})

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return dataclasses.replace(super().capabilities, **self._capable)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        found: Work = self._gather(out, shard, self.rank, lambda: super(Faulty, self).all_gather(out, shard))
        return found

    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        for out, shard in pairs:
            self.all_gather(out, shard).wait()
        return COMPLETED

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, **options: Any) -> Work:
        work = super().reduce_scatter(out, full, **options)
        work.wait()
        return work if self._reduction is COMPLETED else self._reduction  # type: ignore[return-value]


def own_only(out: torch.Tensor, shard: torch.Tensor, rank: int, do: Callable[[], Work]) -> Work:
    do().wait()
    out.view(2, -1)[1 - rank].zero_()
    return COMPLETED


def wrong_order(out: torch.Tensor, shard: torch.Tensor, rank: int, do: Callable[[], Work]) -> Work:
    do().wait()
    if rank:
        out.copy_(out.view(2, -1).flip(0).reshape(-1))
    return COMPLETED


def twice(out: torch.Tensor, shard: torch.Tensor, rank: int, do: Callable[[], Work]) -> Work:
    do().wait()
    out.mul_(2)
    return COMPLETED


def nothing(out: torch.Tensor, shard: torch.Tensor, rank: int, do: Callable[[], Work]) -> None:
    do().wait()


#: What a gather does, and words of the error of every rank.
GATHERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "the own slice alone": (own_only, ("did not leave the same bytes", "unit '(root)'", "checksums")),
    "another order on one rank": (wrong_order, ("own slices of ranks [1]",)),
    "other values on all ranks": (twice, ("own slices of ranks [0, 1]",)),
    "no work": (nothing, ("all_gather of ", "returned None", "unit '(root)'", "COMPLETED")),
}


@pytest.mark.parametrize(("gather", "words"), GATHERS.values(), ids=GATHERS)
def test_gathers_that_bring_something_else(gather: Any, words: tuple[str, ...]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
        polyshard.shard(model, polyshard.ShardConfig(collectives=Faulty(world, rank, gather=gather)))
        with pytest.raises(errors.PluginContractError) as caught:
            model(torch.ones(1, 4))
        # Between steps the model is as usable as its collectives are: nothing is left gathered.
        assert model.weight.shape == ((10,), (6,))[rank]
        return str(caught.value)

    for rank, text in enumerate(on_ranks(2, on_rank)):
        for word in ("all_gather of", "Faulty", f"rank {rank}", *words):
            assert word in text, text


def test_a_reduction_that_cannot_be_waited_for() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
        polyshard.shard(model, polyshard.ShardConfig(collectives=Faulty(world, rank, reduction=None)))
        with pytest.raises(errors.PluginContractError) as caught:
            model(torch.ones(1, 4)).sum().backward()
        return str(caught.value)

    for rank, text in enumerate(on_ranks(2, on_rank)):
        for word in ("reduce_scatter of", "Faulty", "returned None", f"rank {rank}"):
            assert word in text, text


def test_sound_collectives_pass_the_first_step() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
            whole = copy.deepcopy(model)
        polyshard.shard(model, polyshard.ShardConfig(collectives=Faulty(world, rank)))
        output = model(torch.ones(1, 4))
        output.sum().backward()
        torch.testing.assert_close(output, whole(torch.ones(1, 4)))

    on_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"capable": {"widening": 1}}, ("widening=1", "True or False")),
        ({"capable": {"can_communicate": "yes"}}, ("can_communicate='yes'",)),
    ],
)
def test_collectives_whose_capabilities_are_no_bools(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            model = nn.Linear(4, 4)
        before = description(model)
        config = polyshard.ShardConfig(collectives=Faulty(world, rank, **settings), check_ranks=False)
        with pytest.raises(errors.PluginContractError) as caught:
            polyshard.shard(model, config)
        assert description(model) == before
        polyshard.shard(model, threaded(world, rank, check_ranks=False))
        return str(caught.value)

    for text in on_ranks(2, on_rank):
        for word in ("Faulty", *words):
            assert word in text, text


def test_a_manager_whose_capability_is_no_bool() -> None:
    manager = Shelf()
    manager.capabilities = OffloadCapabilities(parks=torch.tensor(True))  # type: ignore[arg-type, misc]
    config = silent(offload=manager, check_ranks=False)
    refused(Tower(), config, errors.PluginContractError, "Shelf", "parks=tensor(True)", "rank 2", twin=Tower())
