"""The conformance suite for collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import pytest
import torch
from polyshard.interfaces import Collectives, Group
from typing_extensions import override

from . import collectives_checks as checks
from .plugin import PluginSuite, fingerprint_of
from .ranks import KeptProcesses, Rank, run_ranks
from .training import Model, check_training, seeded

T = TypeVar("T")


def _rule(check: Callable[[Collectives], object]) -> Callable[[CollectivesSuite, int], None]:
    """A test that is ``check`` on every rank."""

    def test(self: CollectivesSuite, world_size: int) -> None:
        self.run_ranks(world_size, check)

    return test


class CollectivesSuite(PluginSuite):
    """Subclass it, name the class ``Test…``, and override ``make``, or, for ranks of another kind, ``run_ranks``.

    Every test runs for each of ``world_sizes``. Operations that the backend's capabilities rule out are not tested. A
    backend without ``can_communicate`` must answer as if all ranks sent the same.
    """

    group = Group.COLLECTIVES

    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3)
    """Numbers of ranks to test with."""
    ranks: ClassVar[Literal["threads", "processes"]] = "threads"
    """Ranks are threads of this process, or processes in which ``torch.distributed`` is initialised."""
    device_type: ClassVar[Literal["cpu", "cuda"]] = "cpu"
    """Where ranks that are processes compute; with ``"cuda"`` each has a device of its own."""
    timeout_s: ClassVar[float] = 60.0
    """Seconds after which a run counts as hanging."""
    impatience_s: ClassVar[float] = 1.0
    """The timeout that ``make_impatient`` is given, in seconds: enough for ranks that do come."""

    _processes: ClassVar[KeptProcesses | None] = None

    @override
    def make(self, rank: Rank) -> Collectives:
        """A newly constructed backend, on the rank that it is to serve.

        ``rank.collectives`` are collectives that work between the ranks, for a backend made of others.
        """
        raise NotImplementedError(f"{type(self).__name__} must override make(rank), or run_ranks(world_size, fn)")

    def make_impatient(self, rank: Rank, timeout: timedelta) -> Collectives | None:
        """As ``make``, with a context of this ``timeout``: to test that a wait ends by then.

        None, the default, leaves that untested.
        """
        return None

    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        """Run ``fn`` on a newly constructed backend on every rank; return the results in rank order.

        ``fn`` can be pickled. An exception on a rank must be raised here, and a hang must end in an error.
        """
        return self._in_kept_ranks(world_size, partial(_on_rank, self.make, fn))

    def start_ranks(self, world_size: int, fn: Callable[[Rank], T]) -> list[T]:
        """Run ``fn`` on new ranks of the kind that ``make`` is for; return the results in rank order."""
        return run_ranks(world_size, fn, backend=self.ranks, timeout_s=self.timeout_s, device_type=self.device_type)

    def _in_kept_ranks(self, world_size: int, fn: Callable[[Rank], T]) -> list[T]:
        if self._processes is not None and self.ranks == "processes":
            return self._processes.of(world_size).run(fn, timeout_s=self.timeout_s)
        return self.start_ranks(world_size, fn)

    @override
    def factory(self) -> Callable[..., Any]:
        """The object that the entry point names: the backend's class. Override it where it is a function."""
        made: type = self.run_ranks(self.world_sizes[0], type)[0]
        return made

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _keep_processes(cls) -> Iterator[None]:
        # Started once for all tests of the class: a start takes longer than a test.
        cls._processes = kept = KeptProcesses(device_type=cls.device_type)
        yield
        cls._processes = None
        kept.close()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "world_size" in metafunc.fixturenames:
            metafunc.parametrize("world_size", self.world_sizes)

    @override
    def test_fingerprint_is_text_that_every_rank_has(self) -> None:
        texts = self.run_ranks(max(self.world_sizes), fingerprint_of)
        assert isinstance(texts[0], str | None), f"fingerprint() is {texts[0]!r}"
        assert len(set(texts)) == 1, f"fingerprint() differs between ranks: {texts}"

    def test_ranks_know_their_place(self, world_size: int) -> None:
        places = self.run_ranks(world_size, checks.check_identity)
        assert places == [(rank, world_size) for rank in range(world_size)]

    def test_capabilities_are_alike_on_every_rank(self, world_size: int) -> None:
        assert len(set(self.run_ranks(world_size, checks.capabilities_of))) == 1

    def test_reason_is_one_line_that_every_rank_has(self) -> None:
        reasons = self.run_ranks(max(self.world_sizes), checks.check_reason)
        assert len(set(reasons)) == 1, f"reason differs between ranks: {reasons}"

    def test_construction_does_not_communicate(self, world_size: int) -> None:
        self._only_with_make()
        # The others never construct theirs: speaking to them would wait until the run is ended.
        self._in_kept_ranks(world_size, partial(_construct_on_first, self.make))

    def test_a_rank_that_never_comes_is_an_error_in_time(self, world_size: int) -> None:
        self._only_with_make()
        if world_size > 1:
            # In ranks of its own: after a timeout these may be of no use any more.
            timeout = timedelta(seconds=self.impatience_s)
            self.start_ranks(world_size, partial(_wait_in_vain, self.make_impatient, timeout=timeout))

    def test_a_small_model_trains_as_it_does_unsharded(self, world_size: int) -> None:
        # Made before there are ranks: threads share one generator of random numbers.
        model = seeded(Model, torch.device("cpu")).double()
        self.run_ranks(world_size, partial(check_training, model))

    test_capabilities_are_of_the_contracts_types_and_do_not_change = _rule(checks.check_capabilities)
    test_process_group_is_one_of_torch_with_the_same_ranks = _rule(checks.check_process_group)
    test_all_gather_carries_every_dtype = _rule(checks.check_all_gather)
    test_many_gathers_at_once = _rule(checks.check_all_gather_many)
    test_reduce_scatter_follows_the_formula = _rule(checks.check_reduce_scatter)
    test_many_reductions_at_once = _rule(checks.check_reduce_scatter_many)
    test_widening_accumulates_in_the_output_dtype = _rule(checks.check_widening)
    test_all_reduce_follows_the_formula = _rule(checks.check_all_reduce)
    test_integers_are_summed_exactly = _rule(checks.check_integers)
    test_broadcast_reaches_every_rank = _rule(checks.check_broadcast)
    test_all_to_all_carries_every_dtype = _rule(checks.check_all_to_all)
    test_all_to_all_refuses_blocks_that_do_not_fit = _rule(checks.check_bad_blocks)
    test_objects_arrive_in_rank_order = _rule(checks.check_objects)
    test_announcements_that_differ_reach_every_rank = _rule(checks.check_announcements)
    test_barrier_waits_for_every_rank_and_keeps_order = _rule(checks.check_barrier)
    test_partition_into_interleaved_parts = _rule(checks.check_interleaved)
    test_partition_numbers_ranks_by_their_list = _rule(checks.check_reversed)
    test_partition_refuses_lists_that_do_not_cover = _rule(checks.check_bad_partition)
    test_operations_overlap = _rule(checks.check_overlap)
    test_waiting_orders_streams = _rule(checks.check_streams)
    test_closing_a_part_leaves_the_others = _rule(checks.check_close_of_parts)
    test_close_twice = _rule(checks.check_close)

    def _only_with_make(self) -> None:
        if type(self).make is CollectivesSuite.make:
            pytest.skip("a suite that overrides run_ranks alone does not say how one rank constructs its backend")


def _construct_on_first(make: Callable[[Rank], Collectives], rank: Rank) -> None:
    if rank.rank == 0:
        make(rank)


def _wait_in_vain(make: Callable[[Rank, timedelta], Collectives | None], rank: Rank, timeout: timedelta) -> None:
    collectives = make(rank, timeout)
    if collectives is not None:
        checks.check_in_time(collectives)


def _on_rank(make: Callable[[Rank], Collectives], fn: Callable[[Collectives], T], rank: Rank) -> T:
    collectives = make(rank)
    result = fn(collectives)
    # Not where fn raised: closing may be a meeting, to which no other rank comes.
    collectives.close()
    return result
