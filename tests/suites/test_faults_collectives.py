"""The suite of collectives: each of its tests is the one that fails over some backend, and sound ones pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
from polyshard.errors import CollectiveError, WorldSizeError
from polyshard.interfaces import COMPLETED, Collectives, CollectivesCapabilities, PluginContext, ReduceOp, Work
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_testing import CollectivesSuite, Rank, plugin_context
from suite_faults import EVERY_PLUGINS, WITH_OTHERS, names_of, passes


class Sound(ThreadedCollectives):
    """What is changed below in one place each. A part is of the same class."""

    api_version = 1

    @property
    def whole(self) -> bool:
        """Whether this is the group and not a part."""
        return self.world_size == self._world.world_size

    def each(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        """Gathers by the method that is sound."""
        return Together([ThreadedCollectives.all_gather(self, out, shard) for out, shard in pairs])


class Together:
    def __init__(self, works: Sequence[Work], then: Callable[[], object] = lambda: None) -> None:
        self._works, self._then = works, then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._then()


class Claims(Sound):
    """Says something of itself that is not so."""

    says: ClassVar[dict[str, Any]] = {}

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return dataclasses.replace(super().capabilities, **self.says)


class ServesOthers(Claims):
    """Is on a device that it does not serve."""

    says: ClassVar[dict[str, Any]] = {"devices": frozenset({"cuda"})}


class CountsForTrue(Claims):
    """Answers with numbers where bools are asked for."""

    says: ClassVar[dict[str, Any]] = {"capturable": 0}


class OfItsRank(Sound):
    """Says something else on each rank."""

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return dataclasses.replace(super().capabilities, max_world_size=8 + self.rank)


class ChoosesAlone(Sound):
    """Says what it chose on its own rank."""

    @property
    def reason(self) -> str:
        return f"rank {self.rank} likes it"


class NamesItsGroup(Sound):
    process_group = "gloo"


class Introduces(Sound):
    """Meets the others when it is made."""

    def __init__(self, context: PluginContext, world: ThreadedWorld, rank: int) -> None:
        super().__init__(context, world, rank)
        self.barrier()


class Patient(Sound):
    """Waits as long as its world does, whatever the context says."""

    def __init__(self, context: PluginContext, world: ThreadedWorld, rank: int) -> None:
        super().__init__(dataclasses.replace(context, timeout=timedelta(minutes=1)), world, rank)


class WritesBehind(Sound):
    """Fills memory in packets of four."""

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        behind = out.storage_offset() + out.numel()
        if behind < out.untyped_storage().nbytes() // out.itemsize:
            out.as_strided((1,), (1,), behind).fill_(1)
        return super().all_gather(out, shard)


class FirstOfMany(Sound):
    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        return self.each(pairs[:1])


class ScattersMaxima(Sound):
    """Takes the largest where the smallest is asked for."""

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, **options: Any) -> Work:
        return super().reduce_scatter(out, full, op=ReduceOp.MAX if op is ReduceOp.MIN else op, **options)


class ReducesMaxima(Sound):
    """The same in place."""

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        return super().all_reduce(tensor, op=ReduceOp.MAX if op is ReduceOp.MIN else op)


class FirstReduction(Sound):
    """Of many reductions, does one."""

    def reduce_scatter_many(self, triples: Sequence[Any], **options: Any) -> Work:
        return super().reduce_scatter_many(triples[:1], **options)


class NarrowSums(Sound):
    """Says that it widens and accumulates in the dtype that travels."""

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, **options: Any) -> Work:
        narrow = torch.empty(out.shape, dtype=full.dtype)
        work = super().reduce_scatter(narrow, full, **options)
        return Together([work], lambda: out.copy_(narrow))


class SumsFloats(Sound):
    """Adds integers as floats."""

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        if tensor.is_floating_point():
            return super().all_reduce(tensor, op=op)
        total = tensor.float()
        return Together([super().all_reduce(total, op=op)], lambda: tensor.copy_(total))


class FromTheFirst(Sound):
    """Broadcasts what rank 0 has, whoever is asked."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return super().broadcast(tensor, 0)


class SendsFloats(Sound):
    """Exchanges fp32, whatever it is given."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        if input.dtype is not torch.int64 or out.dtype is not torch.int64:
            return super().all_to_all(out, out_splits, input, in_splits)
        received = torch.empty(out.shape)
        work = super().all_to_all(received, out_splits, input.float(), in_splits)
        return Together([work], lambda: out.copy_(received))


class OneStage(Sound):
    """Receives blocks into memory of its own, the same each time, and copies when somebody waits."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        if not out.is_contiguous():
            return super().all_to_all(out, out_splits, input, in_splits)
        stage: torch.Tensor = self.__dict__.setdefault("stage", torch.empty(1 << 18, dtype=torch.uint8))
        received = stage[: out.nbytes].view(out.dtype)
        arrival = super().all_to_all(received, out_splits, input, in_splits)
        return Together([arrival], lambda: out.copy_(received))


class BackwardsInParts(Sound):
    """Puts blocks of a part in the order of arrival, that of the last rank first."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        if self.whole:
            return super().all_to_all(out, out_splits, input, in_splits)
        received = torch.empty_like(out)
        work = super().all_to_all(received, out_splits, input, in_splits)
        return Together([work], lambda: torch.cat(received.split(list(out_splits))[::-1], out=out))


class TakesAnything(Sound):
    """Does nothing where blocks do not fit, and does not say so."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        try:
            return super().all_to_all(out, out_splits, input, in_splits)
        except CollectiveError:
            return COMPLETED


class LastFirst(Sound):
    def all_gather_object(self, obj: Any) -> list[Any]:
        return super().all_gather_object(obj)[::-1] if isinstance(obj, dict) else super().all_gather_object(obj)


class Unheard(Sound):
    """Says that it compares announcements, and does not."""

    def announce(self, what: str) -> None:
        return None


class NoBarrier(Sound):
    def barrier(self) -> None:
        return None


class SortedParts(Sound):
    """Numbers the ranks of a part in ascending order."""

    def partition(self, rank_lists: Sequence[Sequence[int]]) -> ThreadedCollectives:
        return super().partition([sorted(ranks) for ranks in rank_lists])


class Forgiving(Sound):
    """Divides into any parts that it is given."""

    def partition(self, rank_lists: Sequence[Sequence[int]]) -> ThreadedCollectives:
        try:
            return super().partition(rank_lists)
        except WorldSizeError:
            return self


class ClosesTwins(Sound):
    """Releases with a part what others of equal ranks hold."""

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        if self._group in self._world.__dict__.get("closed", ()):
            raise CollectiveError(f"the group {self._group} was closed")
        return super().all_reduce(tensor, op=op)

    def close(self) -> None:
        if self.world_size < self._world.world_size:
            self._world.__dict__.setdefault("closed", set()).add(self._group)


class ClosesOnce(Sound):
    def close(self) -> None:
        if self.whole and self.__dict__.setdefault("closed", 0) == 1:
            raise CollectiveError("it was closed already")
        self.closed = 1


class TellsItsRank(Sound):
    def fingerprint(self) -> str:
        return f"of rank {self.rank}"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A backend that breaks its contract in one way."""

    backend: type[Sound]
    fails: str
    """Name of the test, without ``test_``, that fails over it, and no other does; empty for none."""
    ranks: int = 2
    """With how many the suite is run; three where parts must have two ranks and not be the group."""
    hangs: bool = False
    """Whether what fails does so by hanging."""
    impatient: bool = False
    """Whether ranks are left waiting: that costs time."""


def fault(backend: type[Sound], fails: str, **more: Any) -> Any:
    backend.api_version = 1
    return pytest.param(Fault(backend, fails, **more), id=backend.__name__)


class SuiteOf(CollectivesSuite):
    planted: ClassVar[Fault]
    timeout_s = 30.0
    impatience_s = 0.2

    def make(self, rank: Rank) -> Collectives:  # type: ignore[override]
        return self._on(plugin_context(), rank)

    def make_impatient(self, rank: Rank, timeout: timedelta) -> Collectives | None:
        context = dataclasses.replace(plugin_context(), timeout=timeout)
        return self._on(context, rank) if self.planted.impatient else None

    def _on(self, context: PluginContext, rank: Rank) -> Collectives:
        assert isinstance(rank.collectives, dict)
        return self.planted.backend(context, world=rank.collectives["world"], rank=rank.rank)

    def factory(self) -> Callable[..., Any]:
        return self.planted.backend


def failing(planted: Fault, others: bool = True) -> set[str]:
    """Names of the tests, without ``test_``, that fail over the backend."""
    suite = type("Suite", (SuiteOf,), {"planted": planted, "world_sizes": (planted.ranks,)})
    hasty = type("Hasty", (suite,), {"timeout_s": 0.5})
    found = set()
    for name in names_of(CollectivesSuite) if others else {planted.fails}:
        chosen = hasty if planted.hangs and name == planted.fails else suite
        if not passes(chosen(), f"test_{name}", planted.ranks):
            found.add(name)
    return found


FAULTS = [
    fault(TellsItsRank, "fingerprint_is_text_that_every_rank_has"),
    fault(ServesOthers, "ranks_know_their_place"),
    fault(CountsForTrue, "capabilities_are_of_the_contracts_types_and_do_not_change"),
    fault(OfItsRank, "capabilities_are_alike_on_every_rank"),
    fault(ChoosesAlone, "reason_is_one_line_that_every_rank_has"),
    fault(NamesItsGroup, "process_group_is_one_of_torch_with_the_same_ranks"),
    fault(Introduces, "construction_does_not_communicate", hangs=True),
    fault(Patient, "a_rank_that_never_comes_is_an_error_in_time", hangs=True, impatient=True),
    fault(WritesBehind, "all_gather_carries_every_dtype"),
    fault(FirstOfMany, "many_gathers_at_once"),
    fault(ScattersMaxima, "reduce_scatter_follows_the_formula"),
    fault(FirstReduction, "many_reductions_at_once"),
    fault(NarrowSums, "widening_accumulates_in_the_output_dtype"),
    fault(ReducesMaxima, "all_reduce_follows_the_formula"),
    fault(SumsFloats, "integers_are_summed_exactly"),
    fault(FromTheFirst, "broadcast_reaches_every_rank"),
    fault(SendsFloats, "all_to_all_carries_every_dtype"),
    fault(OneStage, "operations_overlap"),
    fault(BackwardsInParts, "partition_into_interleaved_parts", ranks=3),
    fault(TakesAnything, "all_to_all_refuses_blocks_that_do_not_fit"),
    fault(LastFirst, "objects_arrive_in_rank_order"),
    fault(Unheard, "announcements_that_differ_reach_every_rank"),
    fault(NoBarrier, "barrier_waits_for_every_rank_and_keeps_order"),
    fault(SortedParts, "partition_numbers_ranks_by_their_list"),
    fault(Forgiving, "partition_refuses_lists_that_do_not_cover"),
    fault(ClosesTwins, "closing_a_part_leaves_the_others", ranks=3),
    fault(ClosesOnce, "close_twice"),
]


@pytest.mark.slow
@WITH_OTHERS
@pytest.mark.parametrize("planted", FAULTS)
def test_only_these_fail(planted: Fault, others: bool) -> None:
    assert failing(planted, others) == {planted.fails}


@pytest.mark.slow
def test_nothing_fails_over_a_sound_backend() -> None:
    assert failing(Fault(Sound, "", ranks=3, impatient=True)) == set()


def test_every_test_is_the_one_that_catches_something() -> None:
    alone = {planted.values[0].fails for planted in FAULTS}
    # The order of streams needs a device: tests/gpu/test_conformance_suites.py.
    assert names_of(CollectivesSuite) - alone - EVERY_PLUGINS == {"waiting_orders_streams"}


class Older(Sound):
    """Written before there were exchanges."""

    api_version = 1
    all_to_all = Collectives.all_to_all

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return dataclasses.replace(super().capabilities, exchanges=False)


@pytest.mark.slow
def test_a_backend_without_exchanges_is_not_asked_for_them() -> None:
    assert failing(Fault(Older, "")) == set()

    def ask(collectives: Collectives) -> str:
        with pytest.raises(NotImplementedError) as raised:
            collectives.all_to_all(torch.zeros(2), [1, 1], torch.zeros(2), [1, 1])
        return str(raised.value)

    suite = type("Suite", (SuiteOf,), {"planted": Fault(Older, "")})()
    assert suite.run_ranks(2, ask) == ["Older does not exchange blocks between ranks"] * 2
