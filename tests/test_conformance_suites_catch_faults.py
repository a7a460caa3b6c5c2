"""The conformance suites fail for plugins that break their contract, each in one way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from polyshard.errors import CollectiveError
from polyshard.interfaces import (
    COMPLETED,
    Collectives,
    CollectivesCapabilities,
    InputCast,
    OffloadCapabilities,
    OffloadManager,
    PluginContext,
    PolicyContext,
    PrecisionCapabilities,
    PrecisionCaster,
    ReduceOp,
    UnitDtypes,
    UnitSpec,
    WireSpec,
    Work,
    WrapPolicy,
)
from polyshard.testing import CollectivesSuite, OffloadSuite, PolicySuite, PrecisionSuite
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


class Int8(PrecisionCaster):
    """A wire of one byte an element behind one scale; sound, unless ``scale_by`` is not 1."""

    capabilities = PrecisionCapabilities(encodes=True)

    def __init__(self, scale_by: float = 1.0) -> None:
        self.scale_by = scale_by

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        dtype = unit.master_dtype
        return UnitDtypes(compute=dtype, wire=dtype, reduce=dtype, grad=dtype)

    def wire(self, unit: UnitSpec) -> WireSpec:
        return WireSpec(16 + (unit.shard_numel + 15) // 16 * 16)

    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        scale = shard.abs().max().double() / 127
        wire[:8].view(torch.float64).fill_(scale.item())
        wire[16 : 16 + shard.numel()].view(torch.int8).copy_((shard / scale).round())

    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        for row, values in zip(wire, out, strict=True):
            scale = row[:8].view(torch.float64) * self.scale_by
            values.copy_(row[16 : 16 + values.numel()].view(torch.int8) * scale)


class FloatsIntegers(Int8):
    """Casts integer inputs too."""

    def input_cast(self, unit: UnitSpec) -> InputCast:
        def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return tuple(arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args), kwargs

        return cast


class NarrowReduction(Int8):
    """Accumulates gradients in less than they travel in."""

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        return replace(super().dtypes(unit), wire=torch.float32, reduce=torch.bfloat16)


def precision_suite(caster: PrecisionCaster) -> PrecisionSuite:
    class Suite(PrecisionSuite):
        def make(self) -> PrecisionCaster:
            return caster

    return Suite()


def test_a_sound_encoding_passes() -> None:
    precision_suite(Int8()).test_encoded_shards_come_back()


@pytest.mark.parametrize(
    ("caster", "test"),
    [
        (Int8(scale_by=1.5), lambda suite: suite.test_encoded_shards_come_back()),
        (FloatsIntegers(), lambda suite: suite.test_input_casts_keep_structure_values_and_integers(torch.float32)),
        (NarrowReduction(), lambda suite: suite.test_dtypes_are_floats_that_fit_each_other()),
    ],
    ids=["encoding", "integers", "reduction"],
)
def test_faulty_casters_fail(caster: PrecisionCaster, test: Callable[[PrecisionSuite], None]) -> None:
    with pytest.raises(AssertionError):
        test(precision_suite(caster))


class Forgetful(OffloadManager):
    """Overwrites the gradient of the microbatch before."""

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(parks=False)

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad


def test_forgetful_offload_fails() -> None:
    class Suite(OffloadSuite):
        def make(self) -> OffloadManager:
            return Forgetful()

    Suite().test_stored_gradient_lies_beside_the_master()
    with pytest.raises(AssertionError):
        Suite().test_gradients_of_microbatches_add_up()


class Parking(Forgetful):
    """Keeps masters and gradients in memory of its own, sound but for what a subclass changes."""

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(parks=True)

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard.clone()

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.clone() if into is None else into.add_(grad)


class LargeOnly(Parking):
    """Parks units of five elements and more; of each it knows from ``place`` where its gradient goes."""

    def __init__(self) -> None:
        self.parked: dict[str, torch.Tensor | None] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        self.parked[unit.name] = shard.clone() if unit.shard_numel >= 5 else None
        parked = self.parked[unit.name]
        return shard if parked is None else parked

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        parked = self.parked[unit.name]
        if into is not None:
            return into.add_(grad)
        assert parked is None or parked.shape == grad.shape
        return grad if parked is None else grad.to(parked.device, copy=True)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    wide[::2].copy_(tensor)
    return wide[::2]


class SpreadMasters(Parking):
    """Interleaves masters with something else."""

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return _spread(shard)


class SpreadGradients(Parking):
    """The same for gradients."""

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return _spread(grad) if into is None else into.add_(grad)


class OneShelf(Parking):
    """Parks all masters in one place."""

    def __init__(self) -> None:
        self.shelf = torch.zeros(64)

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return self.shelf[: shard.numel()].copy_(shard)


class FirstPlace(Parking):
    """Does not take back a unit that it was given before."""

    def __init__(self) -> None:
        self.masters: dict[str, torch.Tensor] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return self.masters.setdefault(unit.name, shard.clone())


class Frozen(Parking):
    """Fetches what was placed, whatever the optimizer made of it."""

    def __init__(self) -> None:
        self.masters: dict[str, torch.Tensor] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        self.masters[unit.name] = shard.clone()
        return shard.clone()

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(self.masters[unit.name])


def offload_suite(manager: Callable[[], OffloadManager]) -> OffloadSuite:
    class Suite(OffloadSuite):
        def make(self) -> OffloadManager:
            return manager()

    return Suite()


@pytest.mark.parametrize(
    ("manager", "test"),
    [
        (SpreadMasters, lambda suite: suite.test_placed_master_keeps_values_shape_and_dtype(1000, torch.float32)),
        (SpreadGradients, lambda suite: suite.test_stored_gradient_lies_beside_the_master()),
        (OneShelf, lambda suite: suite.test_units_do_not_share_memory()),
        (FirstPlace, lambda suite: suite.test_a_unit_is_placed_again_after_an_attempt_that_failed()),
        (Frozen, lambda suite: suite.test_an_optimizer_updates_the_master_in_place()),
    ],
    ids=["strides", "strides of gradients", "one memory", "second attempt", "stale"],
)
def test_faulty_managers_fail(manager: Callable[[], OffloadManager], test: Callable[[OffloadSuite], None]) -> None:
    with pytest.raises(AssertionError):
        test(offload_suite(manager))


class TestPartialManager(OffloadSuite):
    def make(self) -> OffloadManager:
        return LargeOnly()


class Careless(WrapPolicy):
    """Chooses ignored modules and a setting that does not exist."""

    def __init__(self, setting: str) -> None:
        self.setting = setting

    def plan(self, root: torch.nn.Module, context: PolicyContext) -> Mapping[torch.nn.Module, Mapping[str, Any]]:
        return {module: {self.setting: "bf16"} for module in root.modules()}


def test_careless_policy_fails() -> None:
    class Suite(PolicySuite):
        def __init__(self, setting: str) -> None:
            self.setting = setting

        def make(self) -> WrapPolicy:
            return Careless(self.setting)

    Suite("precision").test_plan_names_modules_of_the_model()
    with pytest.raises(AssertionError):
        Suite("presicion").test_plan_names_modules_of_the_model()
    with pytest.raises(AssertionError):
        Suite("precision").test_ignored_modules_are_not_chosen()
