"""What a plugin answers about a unit and its contract does not allow is refused by name, before the model changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, adam, assert_parity, on_ranks, seeded, square_step, threaded, units_of
from polyshard import errors
from polyshard.interfaces import (
    OffloadCapabilities,
    OffloadManager,
    PrecisionCapabilities,
    PrecisionCaster,
    UnitDtypes,
    UnitSpec,
    WireSpec,
)
from polyshard_backends.threaded import ThreadedWorld
from refusal import Tower, refused, silent
from torch import nn

F32 = torch.float32


class Parking(OffloadManager):
    """Parks what ``park`` makes of a shard, and what ``store`` makes of a gradient."""

    def __init__(
        self,
        park: Callable[[torch.Tensor], Any] = torch.clone,
        store: Callable[[torch.Tensor], Any] = torch.clone,
        capabilities: Any = None,
    ) -> None:
        self._park, self._store = park, store
        self._capabilities = capabilities or OffloadCapabilities(parks=True)

    @property
    def capabilities(self) -> OffloadCapabilities:
        capabilities: OffloadCapabilities = self._capabilities
        return capabilities

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        parked: torch.Tensor = self._park(shard)
        return parked

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

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
    "numbers": (lambda shard: shard.tolist()[:2], ("returned [",)),
    "meta": (lambda shard: shard.to("meta"), ("meta device",)),
    "sparse": (lambda shard: shard.to_sparse(), ("torch.sparse_coo",)),
    "inference": (made_in_inference, ("inference mode",)),
}


@pytest.mark.parametrize(("park", "words"), TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_place_for_masters_that_no_parameter_can_view(
    strategy: str, park: Callable[[torch.Tensor], Any], words: tuple[str, ...]
) -> None:
    config = silent(offload=Parking(park), strategy=strategy, policy="always", check_ranks=False)
    words = ("place of ", "Parking", "unit 'first'", "rank 2", *words)
    refused(Tower(), config, errors.PluginContractError, *words, twin=Tower())


@pytest.mark.parametrize(("store", "words"), TENSORS.values(), ids=TENSORS)
def test_a_stored_gradient_that_grad_cannot_view(store: Callable[[torch.Tensor], Any], words: tuple[str, ...]) -> None:
    model = seeded(Net).float()

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            mine = copy.deepcopy(model)
        polyshard.shard(mine, threaded(world, rank, offload=Parking(store=store), policy=units_of(Block)))
        with pytest.raises(errors.PluginContractError) as caught:
            mine(torch.ones(2, 3)).sum().backward()
        return str(caught.value)

    for rank, text in enumerate(on_ranks(2, on_rank)):
        for word in ("store_grad of ", "Parking", "unit '", f"rank {rank}", *words):
            assert word in text, text


def test_masters_and_gradients_elsewhere_train_right() -> None:
    assert_parity(seeded(Net), square_step, 2, optimizer=adam, settings={"offload": Parking(), "policy": "always"})


class Says(PrecisionCaster):
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

    def wire(self, unit: UnitSpec) -> WireSpec | None:
        return self._answers.get("wire")


WRONG: Any = None
CASTERS: dict[str, tuple[PrecisionCaster, tuple[str, ...]]] = {
    "one dtype": (Says(dtypes=torch.bfloat16), ("dtypes of", "torch.bfloat16", "UnitDtypes")),
    "no dtypes": (Says(dtypes=WRONG), ("dtypes of", "None", "UnitDtypes")),
    "an integer dtype": (Says(dtypes=UnitDtypes(torch.int8, F32, F32, F32)), ("compute is torch.int8", "floating")),
    "a name": (Says(dtypes=UnitDtypes(F32, F32, F32, "fp32")), ("grad is 'fp32'",)),  # type: ignore[arg-type]
    "a complex dtype": (Says(dtypes=UnitDtypes(F32, torch.complex64, F32, F32)), ("wire is torch.complex64",)),
    "an integer buffer": (Says(dtypes=UnitDtypes(F32, F32, F32, F32, torch.int32)), ("buffer is torch.int32",)),
    "a narrow reduction": (
        Says(dtypes=UnitDtypes(F32, F32, torch.bfloat16, F32)),
        ("travel in torch.float32", "accumulated in torch.bfloat16"),
    ),
    "a reduction beside": (
        Says(dtypes=UnitDtypes(F32, torch.float16, torch.bfloat16, F32)),
        ("travel in torch.float16", "accumulated in torch.bfloat16"),
    ),
    "a number for a wire": (Says(encodes=True, wire=64), ("wire of", "64", "WireSpec")),
    "an odd wire": (Says(encodes=True, wire=WireSpec(40)), ("nbytes_per_rank=40", "multiple of 16")),
    "an empty wire": (Says(encodes=True, wire=WireSpec(0)), ("nbytes_per_rank=0", "positive")),
    "a wire that is not announced": (Says(wire=WireSpec(64)), ("capabilities", "encodes=True")),
    "an input cast": (Says(input_cast="bf16"), ("input_cast of", "'bf16'", "called")),
    "an output cast": (Says(output_cast=torch.float32), ("output_cast of", "torch.float32", "called")),
    "full precision": (Says(full_precision_in_eval="yes"), ("full_precision_in_eval of", "'yes'", "True or False")),
    "left alone": (Says(leaves_alone="norm"), ("leaves_alone of", "'norm'", "True or False", "'first'")),
    "capabilities": (Says(capabilities={"encodes": True}), ("capabilities of", "PrecisionCapabilities")),
}


@pytest.mark.parametrize(("caster", "words"), CASTERS.values(), ids=CASTERS)
def test_casters_that_answer_something_else(caster: PrecisionCaster, words: tuple[str, ...]) -> None:
    words = ("Says", "rank 2", *words)
    refused(Tower(), silent(precision=caster, check_ranks=False), errors.PluginContractError, *words, twin=Tower())


def test_a_manager_without_capabilities() -> None:
    manager = Parking(capabilities={"parks": True})
    words = ("capabilities of", "Parking", "{'parks': True}", "rank 2", "OffloadCapabilities")
    refused(Tower(), silent(offload=manager), errors.PluginContractError, *words, twin=Tower())


def test_masters_that_share_memory() -> None:
    shelf = torch.zeros(64)
    manager = Parking(lambda shard: shelf[: shard.numel()].copy_(shard))
    words = ("place of", "Parking", "'first'", "same memory", "rank 2")
    config = silent(offload=manager, policy="always", check_ranks=False)
    refused(Tower(), config, errors.PluginContractError, *words, twin=Tower())
