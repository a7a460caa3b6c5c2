"""Plugins whose answers break their contract, or that compute wrongly: refused in ``shard`` or in a first step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import polyshard
import pytest
import torch
from encodings_of_gathers import Int8Encoding
from parity import Block, Net, adam, assert_parity, on_ranks, seeded, square_step, threaded, units_of
from polyshard import errors
from polyshard.interfaces import (
    COMPLETED,
    CollectivesCapabilities,
    GatherEncoding,
    OffloadCapabilities,
    OffloadManager,
    PluginContext,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
    Work,
)
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from refusal import Tower, description, refused, silent
from torch import nn

F32 = torch.float32


class Offloading(OffloadManager):
    """Offloads what ``place`` makes of a shard, and ``store`` of a gradient, and brings back what ``bring`` writes."""

    def __init__(
        self,
        place: Callable[[torch.Tensor], Any] = torch.clone,
        store: Callable[[torch.Tensor], Any] = torch.clone,
        bring: Callable[[torch.Tensor, torch.Tensor], object] = lambda own, master: own.copy_(master),
        capabilities: Any = None,
    ) -> None:
        self._place, self._store, self._bring = place, store, bring
        self._capabilities = capabilities or OffloadCapabilities(offloads=True)

    @property
    def capabilities(self) -> OffloadCapabilities:
        capabilities: OffloadCapabilities = self._capabilities
        return capabilities

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        offloaded: torch.Tensor = self._place(shard)
        return offloaded

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        self._bring(own_slice, master)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        stored: torch.Tensor = self._store(grad) if into is None else into.add_(grad)
        return stored


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with a gap behind each."""
    wide = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    wide[::2].copy_(tensor)
    return wide[::2]


def made_in_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


#: What is wrong with a tensor, and words of the message.
TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[str, ...]]] = {
    "strides": (every_second, ("strides (2,)", "not contiguous")),
    "shape": (lambda shard: shard.view(1, -1).clone(), ("(1, ",)),
    "length": (lambda shard: torch.cat([shard, shard]), ("a tensor (",)),
    "dtype": (lambda shard: shard.double(), ("torch.float64",)),
    "nothing": (lambda shard: None, ("returned None",)),
    "numbers": (lambda shard: shard.tolist()[:2], ("returned an instance of list",)),
    "meta": (lambda shard: shard.to("meta"), ("meta device",)),
    "sparse": (lambda shard: shard.to_sparse(), ("torch.sparse_coo",)),
    "inference": (made_in_inference, ("inference mode",)),
}


@pytest.mark.parametrize(("place", "words"), TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_place_for_masters_that_no_parameter_can_view(
    strategy: str, place: Callable[[torch.Tensor], Any], words: tuple[str, ...]
) -> None:
    config = silent(offload=Offloading(place), strategy=strategy, policy="always", check_ranks=False)
    words = ("place of ", "Offloading", "unit 'first'", "rank 2", *words)
    refused(Tower(), config, errors.PluginContractError, *words, twin=Tower())


@pytest.mark.parametrize(("store", "words"), TENSORS.values(), ids=TENSORS)
def test_a_stored_gradient_that_grad_cannot_view(store: Callable[[torch.Tensor], Any], words: tuple[str, ...]) -> None:
    model = seeded(Net).float()

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            mine = copy.deepcopy(model)
        polyshard.shard(mine, threaded(world, rank, offload=Offloading(store=store), policy=units_of(Block)))
        with pytest.raises(errors.PluginContractError) as caught:
            mine(torch.ones(2, 3)).sum().backward()
        return str(caught.value)

    for rank, text in enumerate(on_ranks(2, on_rank)):
        for word in ("store_grad of ", "Offloading", "unit '", f"rank {rank}", *words):
            assert word in text, text


def test_masters_and_gradients_elsewhere_train_right() -> None:
    assert_parity(seeded(Net), square_step, 2, optimizer=adam, settings={"offload": Offloading(), "policy": "always"})


class Says(PrecisionPlugin):
    """Answers what it is told to."""

    def __init__(self, *, encodes: bool = False, capabilities: Any = None, **answers: Any) -> None:
        self.capabilities = capabilities or PrecisionCapabilities(encodes=encodes)
        self._answers = answers

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        answer: UnitDtypes = self._answers.get("dtypes", UnitDtypes(F32, F32, F32, F32))
        return answer

    def leaves_alone(self, module: nn.Module) -> bool:
        answer: bool = self._answers.get("leaves_alone", False)
        return answer

    def full_precision_in_eval(self, unit: UnitSpec) -> bool:
        answer: bool = self._answers.get("full_precision_in_eval", False)
        return answer

    def input_cast(self, unit: UnitSpec) -> Any:
        return self._answers.get("input_cast")

    def output_cast(self, unit: UnitSpec) -> Any:
        return self._answers.get("output_cast")

    def encoding(self, unit: UnitSpec) -> GatherEncoding | None:
        return self._answers.get("encoding")


WRONG: Any = None
PRECISIONS: dict[str, tuple[PrecisionPlugin, tuple[str, ...]]] = {
    "one dtype": (Says(dtypes=torch.bfloat16), ("dtypes of", "torch.bfloat16", "UnitDtypes")),
    "no dtypes": (Says(dtypes=WRONG), ("dtypes of", "None", "UnitDtypes")),
    "an integer dtype": (Says(dtypes=UnitDtypes(torch.int8, F32, F32, F32)), ("compute is torch.int8", "floating")),
    "a name": (Says(dtypes=UnitDtypes(F32, F32, F32, "fp32")), ("grad is 'fp32'",)),  # type: ignore[arg-type]
    "a complex dtype": (Says(dtypes=UnitDtypes(F32, torch.complex64, F32, F32)), ("communication is torch.complex64",)),
    "an integer buffer": (Says(dtypes=UnitDtypes(F32, F32, F32, F32, torch.int32)), ("buffer is torch.int32",)),
    "a narrow reduction": (
        Says(dtypes=UnitDtypes(F32, F32, torch.bfloat16, F32)),
        ("travel in torch.float32", "accumulated in torch.bfloat16"),
    ),
    "a reduction beside": (
        Says(dtypes=UnitDtypes(F32, torch.float16, torch.bfloat16, F32)),
        ("travel in torch.float16", "accumulated in torch.bfloat16"),
    ),
    "a number for an encoding": (Says(encodes=True, encoding=64), ("encoding of", "64", "GatherEncoding")),
    "an odd encoding": (Says(encodes=True, encoding=GatherEncoding(40)), ("nbytes_per_rank=40", "multiple of 16")),
    "an empty encoding": (Says(encodes=True, encoding=GatherEncoding(0)), ("nbytes_per_rank=0", "positive")),
    "an encoding that is not announced": (Says(encoding=GatherEncoding(64)), ("capabilities", "encodes=True")),
    "an input cast": (Says(input_cast="bf16"), ("input_cast of", "'bf16'", "called")),
    "an output cast": (Says(output_cast=torch.float32), ("output_cast of", "torch.float32", "called")),
    "full precision": (Says(full_precision_in_eval="yes"), ("full_precision_in_eval of", "'yes'", "True or False")),
    "left alone": (Says(leaves_alone="norm"), ("leaves_alone of", "'norm'", "True or False", "'first'")),
    "capabilities": (Says(capabilities={"encodes": True}), ("capabilities of", "PrecisionCapabilities")),
}


@pytest.mark.parametrize(("plugin", "words"), PRECISIONS.values(), ids=PRECISIONS)
def test_precision_plugins_that_answer_something_else(plugin: PrecisionPlugin, words: tuple[str, ...]) -> None:
    words = ("Says", "rank 2", *words)
    refused(Tower(), silent(precision=plugin, check_ranks=False), errors.PluginContractError, *words, twin=Tower())


def test_a_manager_without_capabilities() -> None:
    manager = Offloading(capabilities={"offloads": True})
    words = ("capabilities of", "Offloading", "an instance of dict", "rank 2", "OffloadCapabilities")
    refused(Tower(), silent(offload=manager), errors.PluginContractError, *words, twin=Tower())


def test_masters_that_share_memory() -> None:
    shelf = torch.zeros(64)
    manager = Offloading(lambda shard: shelf[: shard.numel()].copy_(shard))
    words = ("place of", "Offloading", "'first'", "same memory", "rank 2")
    config = silent(offload=manager, policy="always", check_ranks=False)
    refused(Tower(), config, errors.PluginContractError, *words, twin=Tower())


#: A manager, and words of the error.
MANAGERS: dict[str, tuple[Offloading, tuple[str, ...]]] = {
    "memory without the values": (Offloading(torch.zeros_like), ("place of", "0.0 where ", " was")),
    "the shard itself, emptied": (Offloading(torch.Tensor.zero_), ("place of", "0.0 where ")),
    "the last element is missing": (
        Offloading(lambda shard: torch.cat([shard[:-1], shard.new_full((1,), 7.0)])),
        ("place of", "7.0 where "),
    ),
    "fetch does nothing": (Offloading(bring=lambda own, master: None), ("fetch of", "nan where ")),
    "fetch writes half": (
        Offloading(bring=lambda own, master: own[: len(own) // 2].copy_(master[: len(own) // 2])),
        ("nan",),
    ),
    "fetch adds": (Offloading(bring=lambda own, master: own.add_(master)), ("fetch of", "nan where ")),
    "fetch scales": (Offloading(bring=lambda own, master: own.copy_(master * 2)), ("fetch of",)),
}


@pytest.mark.parametrize(("manager", "words"), MANAGERS.values(), ids=MANAGERS)
def test_managers_that_lose_values(manager: Offloading, words: tuple[str, ...]) -> None:
    config = silent(offload=manager, policy="always", check_ranks=False, strategy="full_shard")
    refused(Tower(), config, errors.PluginContractError, "Offloading", "unit 'first'", "rank 2", *words, twin=Tower())


def test_a_manager_may_keep_the_shard_where_it_is() -> None:
    collectives = {"name": "fake", "world_size": 4}
    model = polyshard.shard(
        Tower(), polyshard.ShardConfig(collectives=collectives, offload=Offloading(lambda shard: shard))
    )
    model(torch.ones(1, 3)).sum().backward()


class Forgets(Int8Encoding):
    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        """Leaves what was there."""


class FirstRow(Int8Encoding):
    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        super().decode(unit, message[:1], out[:1])


class WithoutScale(Int8Encoding):
    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(message[:, self._HEADER : self._HEADER + unit.shard_numel].clone().view(torch.int8))


class FromTheEnd(Int8Encoding):
    def encode(self, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
        super().encode(unit, message, shard.flip(0))


class Unsigned(Int8Encoding):
    def encode(self, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
        super().encode(unit, message, shard.abs())


@pytest.mark.parametrize("plugin", [Forgets, FirstRow, WithoutScale, FromTheEnd, Unsigned])
def test_codecs_that_do_not_undo_each_other(plugin: type[Int8Encoding]) -> None:
    config = silent(precision=plugin(), policy="always", check_ranks=False, strategy="full_shard")
    words = ("decode of", "unit '", "rank 2", plugin.__name__)
    refused(Tower(), config, errors.PluginContractError, *words, twin=Tower())


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
            work = self.all_gather(out, shard)
            if not hasattr(work, "wait"):
                return work
            work.wait()
        return COMPLETED

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, **options: Any) -> Work:
        work = super().reduce_scatter(out, full, **options)
        work.wait()
        return work if self._reduction is COMPLETED else self._reduction  # type: ignore[return-value]


def linear(world: ThreadedWorld) -> nn.Linear:
    """The same on every rank."""
    with world.lock:
        torch.manual_seed(0)
        return nn.Linear(4, 4)


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
    "the own slice alone": (own_only, ("all_gather of", "did not leave the same bytes", "unit '(root)'", "checksums")),
    "another order on one rank": (wrong_order, ("all_gather of", "own slices of ranks [1]")),
    "other values on all ranks": (twice, ("all_gather of", "own slices of ranks [0, 1]")),
    "no work": (nothing, ("all_gather_many of ", "returned None", "unit '(root)'", "COMPLETED")),
}


@pytest.mark.parametrize(("gather", "words"), GATHERS.values(), ids=GATHERS)
def test_gathers_that_bring_something_else(gather: Any, words: tuple[str, ...]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = linear(world)
        polyshard.shard(model, polyshard.ShardConfig(collectives=Faulty(world, rank, gather=gather)))
        with pytest.raises(errors.PluginContractError) as caught:
            model(torch.ones(1, 4))
        # Between steps the model is as usable as its collectives are: nothing is left gathered.
        assert model.weight.to_local().shape == (2, 4)
        return str(caught.value)

    for rank, text in enumerate(on_ranks(2, on_rank)):
        for word in ("Faulty", f"rank {rank}", *words):
            assert word in text, text


def test_a_reduction_that_cannot_be_waited_for() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = linear(world)
        polyshard.shard(model, polyshard.ShardConfig(collectives=Faulty(world, rank, reduction=None)))
        with pytest.raises(errors.PluginContractError) as caught:
            model(torch.ones(1, 4)).sum().backward()
        return str(caught.value)

    for rank, text in enumerate(on_ranks(2, on_rank)):
        for word in ("reduce_scatter of", "Faulty", "returned None", f"rank {rank}"):
            assert word in text, text


def test_sound_collectives_pass_the_first_step() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = linear(world)
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
        model = linear(world)
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
    manager = Offloading(capabilities=OffloadCapabilities(offloads=torch.tensor(True)))  # type: ignore[arg-type]
    config = silent(offload=manager, check_ranks=False)
    refused(Tower(), config, errors.PluginContractError, "Offloading", "offloads=tensor(True)", "rank 2", twin=Tower())
