"""The suite of collectives: each of its tests fails over some backend, and sound ones pass."""

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
from suite_faults import EVERY_PLUGINS, names_of, passes, rules_of


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


def _says(**changes: Any) -> property:
    """Capabilities with ``changes``, of which a function is asked for this rank's."""

    def capabilities(self: Sound) -> CollectivesCapabilities:
        said = {name: value(self) if callable(value) else value for name, value in changes.items()}
        return dataclasses.replace(ThreadedCollectives.capabilities, **said)

    return property(capabilities)


def _meet(self: Sound, context: PluginContext, world: ThreadedWorld, rank: int) -> None:
    Sound.__init__(self, context, world, rank)
    self.barrier()


def _wait_long(self: Sound, context: PluginContext, world: ThreadedWorld, rank: int) -> None:
    Sound.__init__(self, dataclasses.replace(context, timeout=timedelta(minutes=1)), world, rank)


def _write_behind(self: Sound, out: torch.Tensor, shard: torch.Tensor) -> Work:
    behind = out.storage_offset() + out.numel()
    if behind < out.untyped_storage().nbytes() // out.itemsize:
        out.as_strided((1,), (1,), behind).fill_(1)
    return Sound.all_gather(self, out, shard)


def _remember(self: Sound, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
    known = self.__dict__.setdefault("known", {})

    def bring_first() -> None:
        for out, _ in pairs:
            # With ``out``, whose storage no other one can then be taken for. The engine gives it back its memory.
            place = (out.untyped_storage()._cdata, out.storage_offset(), out.numel(), out.dtype)
            out.data.copy_(known.setdefault(place, (out.clone(), out))[0])

    return Together([self.each(pairs)], bring_first)


def _maximum(op: ReduceOp) -> ReduceOp:
    return ReduceOp.MAX if op is ReduceOp.MIN else op


def _sum_narrow(self: Sound, out: torch.Tensor, full: torch.Tensor, **options: Any) -> Work:
    narrow = torch.empty(out.shape, dtype=full.dtype)
    work = Sound.reduce_scatter(self, narrow, full, **options)
    return Together([work], lambda: out.copy_(narrow))


def _sum_floats(self: Sound, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
    if tensor.is_floating_point():
        return Sound.all_reduce(self, tensor, op=op)
    total = tensor.float()
    return Together([Sound.all_reduce(self, total, op=op)], lambda: tensor.copy_(total))


def _send_floats(self: Sound, *blocks: Any) -> Work:
    out, out_splits, input, in_splits = blocks
    if input.dtype is not torch.int64 or out.dtype is not torch.int64:
        return Sound.all_to_all(self, *blocks)
    received = torch.empty(out.shape)
    work = Sound.all_to_all(self, received, out_splits, input.float(), in_splits)
    return Together([work], lambda: out.copy_(received))


def _stage(self: Sound, *blocks: Any) -> Work:
    out, *others = blocks
    if not out.is_contiguous():
        return Sound.all_to_all(self, *blocks)
    stage: torch.Tensor = self.__dict__.setdefault("stage", torch.empty(1 << 18, dtype=torch.uint8))
    received = stage[: out.nbytes].view(out.dtype)
    return Together([Sound.all_to_all(self, received, *others)], lambda: out.copy_(received))


def _turn_around(self: Sound, *blocks: Any) -> Work:
    out, out_splits, *others = blocks
    if self.whole:
        return Sound.all_to_all(self, *blocks)
    received = torch.empty_like(out)
    work = Sound.all_to_all(self, received, out_splits, *others)
    return Together([work], lambda: torch.cat(received.split(list(out_splits))[::-1], out=out))


def _forgiving(
    method: Callable[..., Any], error: type[Exception], answer: Callable[[Sound], Any]
) -> Callable[..., Any]:
    """``method``, with an ``answer`` where it raises ``error``."""

    def forgiving(self: Sound, *given: Any) -> Any:
        try:
            return method(self, *given)
        except error:
            return answer(self)

    return forgiving


def _reduce_closed(self: Sound, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
    if self._group in self._world.__dict__.get("closed", ()):
        raise CollectiveError(f"the group {self._group} was closed")
    return Sound.all_reduce(self, tensor, op=op)


def _close_twins(self: Sound) -> None:
    if not self.whole:
        self._world.__dict__.setdefault("closed", set()).add(self._group)


def _close_once(self: Sound) -> None:
    if self.whole and self.__dict__.setdefault("closed", 0) == 1:
        raise CollectiveError("it was closed already")
    self.closed = 1


def _backwards(self: Sound, obj: Any) -> list[Any]:
    found = Sound.all_gather_object(self, obj)
    return found[::-1] if isinstance(obj, dict) else found


@dataclasses.dataclass(frozen=True)
class Fault:
    """A backend that breaks its contract in one way."""

    backend: type[Sound]
    fails: str
    """Name of the test, without ``test_``, that fails over it; empty for none."""
    ranks: int = 2
    """With how many the suite is run; three where parts must have two ranks and not be the group."""
    hangs: bool = False
    """Whether what fails does so by hanging."""
    impatient: bool = False
    """Whether ranks are left waiting: that costs time."""


def fault(fails: str, name: str, body: dict[str, Any], **more: Any) -> Any:
    """``Sound``, changed by ``body``."""
    return pytest.param(Fault(type(name, (Sound,), {"api_version": 1, **body}), fails, **more), id=name)


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


def fails(planted: Fault, name: str) -> bool:
    """Whether the test ``name``, without ``test_``, fails over the backend."""
    # What fails by hanging does so soon.
    limit = 0.5 if planted.hangs and name == planted.fails else SuiteOf.timeout_s
    suite = type("Suite", (SuiteOf,), {"planted": planted, "world_sizes": (planted.ranks,), "timeout_s": limit})
    return not passes(suite(), f"test_{name}", planted.ranks)


FAULTS = [
    fault("fingerprint_is_text_that_every_rank_has", "TellsItsRank", {"fingerprint": lambda self: f"of {self.rank}"}),
    # Is on a device that it does not serve.
    fault("ranks_know_their_place", "ServesOthers", {"capabilities": _says(devices=frozenset({"cuda"}))}),
    # Answers with a bool where a number is asked for.
    fault("capabilities_are_of_the_contracts_types_and_do_not_change", "TrueForOne",
          {"capabilities": _says(min_world_size=True)}),
    fault("capabilities_are_alike_on_every_rank", "OfItsRank",
          {"capabilities": _says(max_world_size=lambda self: 8 + self.rank)}),
    # Says what it chose on its own rank.
    fault("reason_is_one_line_that_every_rank_has", "ChoosesAlone",
          {"reason": property(lambda self: f"rank {self.rank} likes it")}),
    fault("process_group_is_one_of_torch_with_the_same_ranks", "NamesItsGroup", {"process_group": "gloo"}),
    # Meets the others when it is made.
    fault("construction_does_not_communicate", "Introduces", {"__init__": _meet}, hangs=True),
    # Waits as long as its world does, whatever the context says.
    fault("a_rank_that_never_comes_is_an_error_in_time", "Patient", {"__init__": _wait_long},
          hangs=True, impatient=True),
    # Fills memory in packets of four.
    fault("all_gather_carries_every_dtype", "WritesBehind", {"all_gather": _write_behind}),
    fault("many_gathers_at_once", "OneDtypeOfMany", {
        "all_gather_many": lambda self, pairs: self.each([each for each in pairs if each[0].dtype is torch.float64])}),
    # Takes the largest where the smallest is asked for.
    fault("reduce_scatter_follows_the_formula", "ScattersMaxima", {
        "reduce_scatter": lambda self, out, full, *, op, **options: Sound.reduce_scatter(
            self, out, full, op=_maximum(op), **options)}),
    fault("all_reduce_follows_the_formula", "ReducesMaxima", {
        "all_reduce": lambda self, tensor, *, op: Sound.all_reduce(self, tensor, op=_maximum(op))}),
    fault("many_reductions_at_once", "FirstReduction", {
        "reduce_scatter_many": lambda self, triples, **options: Sound.reduce_scatter_many(
            self, triples[:1], **options)}),
    # Says that it widens and accumulates in the dtype that travels.
    fault("widening_accumulates_in_the_output_dtype", "NarrowSums", {"reduce_scatter": _sum_narrow}),
    fault("integers_are_summed_exactly", "SumsFloats", {"all_reduce": _sum_floats}),
    # Broadcasts what rank 0 has, whoever is asked.
    fault("broadcast_reaches_every_rank", "FromTheFirst", {
        "broadcast": lambda self, tensor, src: Sound.broadcast(self, tensor, 0)}),
    # Exchanges fp32, whatever it is given.
    fault("all_to_all_carries_every_dtype", "SendsFloats", {"all_to_all": _send_floats}),
    # Receives blocks into memory of its own, the same each time, and copies when somebody waits.
    fault("operations_overlap", "OneStage", {"all_to_all": _stage}),
    # Puts blocks of a part in the order of arrival, that of the last rank first.
    fault("partition_into_interleaved_parts", "BackwardsInParts", {"all_to_all": _turn_around}, ranks=3),
    # Does nothing where blocks do not fit, and does not say so.
    fault("all_to_all_refuses_blocks_that_do_not_fit", "TakesAnything", {
        "all_to_all": _forgiving(Sound.all_to_all, CollectiveError, lambda self: COMPLETED)}),
    fault("objects_arrive_in_rank_order", "LastFirst", {"all_gather_object": _backwards}),
    # Says that it compares announcements, and does not.
    fault("announcements_that_differ_reach_every_rank", "Unheard", {"announce": lambda self, what: None}),
    fault("barrier_waits_for_every_rank_and_keeps_order", "NoBarrier", {"barrier": lambda self: None}),
    # Numbers the ranks of a part in ascending order.
    fault("partition_numbers_ranks_by_their_list", "SortedParts", {
        "partition": lambda self, lists: Sound.partition(self, [sorted(ranks) for ranks in lists])}),
    # Divides into any parts that it is given.
    fault("partition_refuses_lists_that_do_not_cover", "Forgiving", {
        "partition": _forgiving(Sound.partition, WorldSizeError, lambda self: self)}),
    # Releases with a part what others of equal ranks hold.
    fault("closing_a_part_leaves_the_others", "ClosesTwins", {"all_reduce": _reduce_closed, "close": _close_twins},
          ranks=3),
    fault("close_twice", "ClosesOnce", {"close": _close_once}),
    # Knows what a gather into a buffer brings, from the first one.
    fault("a_small_model_trains_as_it_does_unsharded", "Remembers", {
        "all_gather": lambda self, out, shard: _remember(self, [(out, shard)]), "all_gather_many": _remember}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("planted", FAULTS)
def test_the_rule_catches_the_fault(planted: Fault) -> None:
    assert fails(planted, planted.fails)


@pytest.mark.slow
def test_nothing_fails_over_a_sound_backend() -> None:
    sound = Fault(Sound, "", ranks=3, impatient=True)
    assert [name for name in names_of(CollectivesSuite) if fails(sound, name)] == []


def test_every_test_catches_something() -> None:
    # The order of streams needs a device: tests/gpu/test_conformance_suites.py.
    assert names_of(CollectivesSuite) - rules_of(FAULTS) - EVERY_PLUGINS == {"waiting_orders_streams"}


class Older(Sound):
    """Written before there were exchanges."""

    api_version = 1
    all_to_all = Collectives.all_to_all

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return dataclasses.replace(super().capabilities, exchanges=False)


@pytest.mark.slow
def test_a_backend_without_exchanges_is_not_asked_for_them() -> None:
    assert [name for name in names_of(CollectivesSuite) if fails(Fault(Older, ""), name)] == []

    def ask(collectives: Collectives) -> str:
        with pytest.raises(NotImplementedError) as raised:
            collectives.all_to_all(torch.zeros(2), [1, 1], torch.zeros(2), [1, 1])
        return str(raised.value)

    suite = type("Suite", (SuiteOf,), {"planted": Fault(Older, "")})()
    assert suite.run_ranks(2, ask) == ["Older does not exchange blocks between ranks"] * 2
