"""The suite of collectives fails for backends that break their contract, each in one way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from polyshard.errors import CollectiveError
from polyshard.interfaces import COMPLETED, Collectives, CollectivesCapabilities, PluginContext, ReduceOp, Work
from polyshard.testing import CollectivesSuite
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld

T = TypeVar("T")
CPU = PluginContext("under test", torch.device("cpu"))


class OwnSliceOnly(ThreadedCollectives):
    """Gathers nothing."""

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return super().all_gather(out.clone(), shard)


class NarrowSums(ThreadedCollectives):
    """Says that it widens and accumulates in the dtype that travels."""

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, **options: Any) -> Work:
        narrow = torch.empty(out.shape, dtype=full.dtype)
        super().reduce_scatter(narrow, full, **options).wait()
        out.copy_(narrow)
        return super().all_reduce(torch.zeros(1), op=ReduceOp.SUM)


class FirstOnly(ThreadedCollectives):
    """Of many reductions, does one."""

    def reduce_scatter_many(self, triples: Sequence[Any], **options: Any) -> Work:
        return super().reduce_scatter_many(triples[:1], **options)


class AlwaysSums(ThreadedCollectives):
    """Adds up, whatever it is asked for."""

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        return super().all_reduce(tensor, op=ReduceOp.SUM)


class SortedParts(ThreadedCollectives):
    """Numbers the ranks of a part in ascending order."""

    def partition(self, rank_lists: Sequence[Sequence[int]]) -> ThreadedCollectives:
        return super().partition([sorted(ranks) for ranks in rank_lists])


class Unheard(ThreadedCollectives):
    """Says that it compares announcements, and does not."""

    def announce(self, what: str) -> None:
        return None


class Backwards(ThreadedCollectives):
    """Puts blocks in the order of arrival, that of the last rank first."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        received = torch.empty_like(out)
        super().all_to_all(received, out_splits, input, in_splits).wait()
        torch.cat(received.split(list(out_splits))[::-1], out=out)
        return COMPLETED


class EqualBlocks(ThreadedCollectives):
    """Takes every rank's input in equal pieces, whatever the splits say."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        inputs = super().all_gather_object(input)
        received = torch.cat([whole.tensor_split(self.world_size)[self.rank] for whole in inputs])
        n = min(received.numel(), out.numel())
        out[:n].copy_(received[:n])
        return COMPLETED


class CountsBytes(ThreadedCollectives):
    """Sends bytes, as many as there are elements."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        received, sent = out.view(torch.uint8)[: out.numel()], input.view(torch.uint8)[: input.numel()]
        return super().all_to_all(received, out_splits, sent, in_splits)


class SendsFloats(ThreadedCollectives):
    """Sends fp32, whatever it is given."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        received = torch.empty(out.shape)
        super().all_to_all(received, out_splits, input.float(), in_splits).wait()
        out.copy_(received)
        return COMPLETED


class OneStage(ThreadedCollectives):
    """Receives into memory of its own, the same each time, and copies when somebody waits."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        stage: torch.Tensor = self.__dict__.setdefault("stage", torch.empty(1 << 16, dtype=torch.uint8))
        received = stage[: out.nbytes].view(out.dtype)
        arrival = super().all_to_all(received, out_splits, input, in_splits)

        class CopyingWork:
            def wait(self) -> None:
                arrival.wait()
                out.copy_(received)

        return CopyingWork()


class TakesAnything(ThreadedCollectives):
    """Does nothing where blocks do not fit, and does not say so."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        try:
            return super().all_to_all(out, out_splits, input, in_splits)
        except CollectiveError:
            return COMPLETED


class Older(ThreadedCollectives):
    """Written before there were exchanges."""

    all_to_all = Collectives.all_to_all

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return replace(super().capabilities, exchanges=False)


class SuiteOf(CollectivesSuite):
    def __init__(self, backend: type[ThreadedCollectives]) -> None:
        self.backend = backend

    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        def on_rank(rank: int, world: ThreadedWorld) -> T:
            return fn(self.backend(CPU, world, rank))

        return ThreadedWorld(world_size, timeout=5.0).run(on_rank, timeout=10.0)


@pytest.mark.parametrize(
    ("backend", "test"),
    [
        (OwnSliceOnly, lambda suite: suite.test_all_gather_carries_every_dtype(2, True)),
        (OwnSliceOnly, lambda suite: suite.test_gathers_and_reductions_overlap(2, (0, 1, 2, 3))),
        (NarrowSums, lambda suite: suite.test_widening_accumulates_in_the_output_dtype(2, ReduceOp.SUM)),
        (FirstOnly, lambda suite: suite.test_many_reductions_at_once(2, ReduceOp.SUM)),
        (AlwaysSums, lambda suite: suite.test_all_reduce_follows_the_formula(2, ReduceOp.MAX)),
        (Unheard, lambda suite: suite.test_announcements_that_differ_reach_every_rank(2)),
        (SortedParts, lambda suite: suite.test_partition_numbers_ranks_by_their_list(3)),
        (Backwards, lambda suite: suite.test_all_to_all_carries_every_dtype(2)),
        (EqualBlocks, lambda suite: suite.test_all_to_all_carries_every_dtype(2)),
        (CountsBytes, lambda suite: suite.test_all_to_all_carries_every_dtype(2)),
        (SendsFloats, lambda suite: suite.test_all_to_all_carries_every_dtype(1)),
        (OneStage, lambda suite: suite.test_exchanges_overlap_with_gathers_and_reductions(2, (3, 2, 1, 0))),
        (TakesAnything, lambda suite: suite.test_all_to_all_refuses_blocks_that_do_not_fit(2)),
    ],
    ids=[
        "gather",
        "overlap",
        "widening",
        "many",
        "operation",
        "announcements",
        "numbering",
        "order of blocks",
        "sizes of blocks",
        "bytes of blocks",
        "dtype of blocks",
        "exchanges in flight",
        "blocks that do not fit",
    ],
)
def test_faulty_collectives_fail(backend: type[ThreadedCollectives], test: Callable[[SuiteOf], None]) -> None:
    with pytest.raises(AssertionError):
        test(SuiteOf(backend))


def test_a_backend_without_exchanges_is_not_asked_for_them() -> None:
    suite = SuiteOf(Older)
    suite.test_all_to_all_carries_every_dtype(2)
    suite.test_exchanges_overlap_with_gathers_and_reductions(2, (0, 1, 2, 3))
    suite.test_parts_exchange_by_their_own_numbers(2)
    suite.test_all_to_all_refuses_blocks_that_do_not_fit(2)

    def ask(collectives: Collectives) -> str:
        with pytest.raises(NotImplementedError) as raised:
            collectives.all_to_all(torch.zeros(2), [1, 1], torch.zeros(2), [1, 1])
        return str(raised.value)

    assert suite.run_ranks(2, ask) == ["Older does not exchange blocks between ranks"] * 2
