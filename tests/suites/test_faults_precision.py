"""The suite of precision casters: each of its tests is the one that fails over some caster, and sound ones pass."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from polyshard.interfaces import (
    FormedWeights,
    InputCast,
    LinearForm,
    OutputCast,
    PluginContext,
    PrecisionCapabilities,
    PrecisionCaster,
    UnitDtypes,
    UnitSpec,
    WireSpec,
)
from polyshard.nested import map_tensors
from polyshard_testing import PrecisionSuite, plugin_context
from suite_faults import EVERY_PLUGINS, WITH_OTHERS, Fault, failing, fault, names_of

Cast = Callable[[torch.Tensor], torch.Tensor]


def floats_to(dtype: torch.dtype) -> Cast:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def of_inputs(cast: Cast) -> InputCast:
    return lambda args, kwargs: map_tensors(cast, (args, kwargs))


class SoundForm(LinearForm):
    """Weights travel, and compute, in fp32."""

    def __init__(self, weights: FormedWeights) -> None:
        self.weights = weights

    @property
    def lanes(self) -> Sequence[int]:
        return (4 * self.weights.shard_numel,)

    def encode(self, shard: torch.Tensor, lanes: Sequence[torch.Tensor], rank: int) -> None:
        lanes[0].view(torch.float32).copy_(shard)

    def bind(self, lanes: Sequence[torch.Tensor]) -> Sequence[Sequence[torch.Tensor]]:
        whole = lanes[0].view(-1).view(torch.float32)
        return [
            (whole[offset : offset + rows * columns].view(rows, columns),)
            for offset, (rows, columns) in zip(self.weights.offsets, self.weights.shapes, strict=True)
        ]

    def product(self, input: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return (input.float() @ tensors[0].t()).to(input.dtype)

    def input_gradient(self, gradient: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return (gradient.float() @ tensors[0]).to(gradient.dtype)


class Sound(PrecisionCaster):
    """Computes in the master dtype; a wire of one byte an element behind one scale, which it keeps for checkpoints."""

    api_version = 1
    capabilities = PrecisionCapabilities(encodes=True)

    def __init__(self, context: PluginContext) -> None:
        self.scales: dict[str, torch.Tensor] = {}

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        dtype = unit.master_dtype
        return UnitDtypes(compute=dtype, wire=dtype, reduce=dtype, grad=dtype)

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        return of_inputs(floats_to(unit.master_dtype))

    def wire(self, unit: UnitSpec) -> WireSpec | None:
        return WireSpec(16 + (unit.shard_numel + 15) // 16 * 16)

    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        if not shard.numel():
            return
        scale = shard.abs().amax().double().clamp(min=1e-12) / 127
        self.scales[unit.name] = scale
        wire[:8].view(torch.float64).copy_(scale)
        wire[16 : 16 + shard.numel()].view(torch.int8).copy_((shard / scale).round())

    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        scales = wire[:, :8].view(torch.float64)
        out.copy_(wire[:, 16 : 16 + unit.shard_numel].view(torch.int8) * scales)

    def forms(self, unit: UnitSpec, linear: torch.nn.Linear, name: str) -> bool:
        # Of the suite alone: its model has narrow layers.
        return linear.in_features >= 32

    def form(self, weights: FormedWeights) -> LinearForm:
        return SoundForm(weights)

    def state_dict(self) -> Mapping[str, Any]:
        return {"scales": self.scales}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scales = dict(state["scales"])


class Low(Sound):
    """Computes in bf16, and hands out fp32; nothing is encoded."""

    api_version = 1
    capabilities = PrecisionCapabilities()

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        low = torch.bfloat16
        return UnitDtypes(compute=low, wire=low, reduce=torch.float32, grad=unit.master_dtype)

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        return of_inputs(floats_to(torch.bfloat16))

    def output_cast(self, unit: UnitSpec) -> OutputCast | None:
        return lambda output: map_tensors(floats_to(torch.float32), output)

    def wire(self, unit: UnitSpec) -> WireSpec | None:
        return None


class TestSoundEncoding(PrecisionSuite):
    wire_tolerance = 0.01

    def make(self) -> PrecisionCaster:
        return Sound(plugin_context())


class TestSoundCasts(PrecisionSuite):
    training_tolerance = 0.02

    def make(self) -> PrecisionCaster:
        return Low(plugin_context())


class EverySecond(Low):
    """Says that it encodes, or not, by how many were made before."""

    made = itertools.count()

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self.capabilities = PrecisionCapabilities(encodes=next(self.made) % 2 == 0)


class NarrowReduction(Sound):
    """Accumulates fp64 gradients in less than they travel in."""

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        reduce = torch.float32 if unit.master_dtype is torch.float64 else unit.master_dtype
        return replace(super().dtypes(unit), reduce=reduce)


class SilentHalf(Low):
    """Sends gradients in fp16, and does not say that they need scaling."""

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        return replace(super().dtypes(unit), wire=torch.float16)


class AsksTheLauncher(Sound):
    """Accumulates in fp64 on one rank."""

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self.widens = os.environ.get("RANK") == "1"

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        found = super().dtypes(unit)
        return replace(found, reduce=torch.float64) if self.widens else found


class AlmostAnswers(Sound):
    """Leaves modules alone that have statistics, and answers these."""

    def leaves_alone(self, module: torch.nn.Module) -> bool:
        return getattr(module, "running_mean", False)


class FloatsMasks(Sound):
    """Casts all inputs but numbers of tokens."""

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        dtype = unit.master_dtype
        return of_inputs(lambda tensor: tensor if tensor.dtype is torch.int64 else tensor.to(dtype))


class CastsInPlace(Sound):
    """Puts what it cast into the caller's list."""

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        inner = super().input_cast(unit)
        assert inner is not None

        def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            done, named = inner(args, kwargs)
            for given, new in zip(args, done, strict=True):
                if isinstance(given, list):
                    given[:] = new
            return done, named

        return cast


def detached(dtype: torch.dtype) -> Cast:
    """Casts floats that are of another dtype, out of the graph."""
    return lambda each: each.detach().to(dtype) if each.is_floating_point() and each.dtype != dtype else each


class CutsInputs(Sound):
    """Lets no gradient through the cast."""

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        return of_inputs(detached(unit.master_dtype))


class CutsOutputs(Sound):
    """The same behind the unit."""

    def output_cast(self, unit: UnitSpec) -> OutputCast | None:
        return lambda output: map_tensors(detached(unit.master_dtype), output)


class FlattensOutputs(Low):
    """Makes lists of tuples."""

    def output_cast(self, unit: UnitSpec) -> OutputCast | None:
        def cast(output: Any) -> Any:
            if isinstance(output, dict):
                return {key: cast(value) for key, value in output.items()}
            if isinstance(output, tuple):
                return [cast(value) for value in output]
            return output.float() if isinstance(output, torch.Tensor) and output.is_floating_point() else output

        return cast


class AnyNumberOfBytes(Sound):
    """Rounds up to multiples of eight."""

    def wire(self, unit: UnitSpec) -> WireSpec | None:
        return WireSpec(16 + (unit.shard_numel + 7) // 8 * 8)


class TwoRanks(Sound):
    """Decodes what two ranks sent."""

    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        super().decode(unit, wire[:2], out[:2])


class EightTogether(Sound):
    """Has room for eight units in one call, and leaves out what is more."""

    def decode_many(
        self, units: Sequence[UnitSpec], wires: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        super().decode_many(units[:8], wires[:8], outs[:8])


class DividesByTheLargest(Sound):
    """As if one of them were not zero."""

    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        if shard.numel():
            assert 127 / shard.abs().amax().item()
        super().encode(unit, wire, shard)


class SeesNothingToSend(Sound):
    """Looks at the largest value, of no values too."""

    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        assert shard.abs().amax() < 1e30
        super().encode(unit, wire, shard)


class ScalesMasters(Sound):
    """Divides bf16 masters themselves by their scale."""

    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        super().encode(unit, wire, shard)
        if shard.dtype is torch.bfloat16 and shard.numel():
            shard.div_(self.scales[unit.name])


class AddsToTheWire(Sound):
    """Sets bits of fp64 shards, and clears none."""

    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        before = wire.clone()
        super().encode(unit, wire, shard)
        if shard.dtype is torch.float64:
            wire.bitwise_or_(before)


class HalvesBetweenTwo(SoundForm):
    """Takes the second half of the buffer for that of the last rank."""

    def encode(self, shard: torch.Tensor, lanes: Sequence[torch.Tensor], rank: int) -> None:
        super().encode(shard if rank < 2 else shard * 2, lanes, rank)


class KnowsTwoRanks(Sound):
    def form(self, weights: FormedWeights) -> LinearForm:
        return HalvesBetweenTwo(weights)


class CopiesOnce(SoundForm):
    """Copies what arrives the first time."""

    own: Sequence[Sequence[torch.Tensor]] = ()

    def bind(self, lanes: Sequence[torch.Tensor]) -> Sequence[Sequence[torch.Tensor]]:
        self.views, self.copied = super().bind(lanes), False
        self.own = [tuple(map(torch.empty_like, each)) for each in self.views]
        return self.own

    def arrived(self) -> None:
        if not self.copied:
            for (own,), (view,) in zip(self.own, self.views, strict=True):
                own.copy_(view)
        self.copied = True


class RemembersTheFirstGather(Sound):
    def form(self, weights: FormedWeights) -> LinearForm:
        return CopiesOnce(weights)


class RoundsMasters(SoundForm):
    """Rounds where the optimizer's values are."""

    def encode(self, shard: torch.Tensor, lanes: Sequence[torch.Tensor], rank: int) -> None:
        super().encode(shard.copy_(shard.bfloat16()), lanes, rank)


class FormsInPlace(Sound):
    def form(self, weights: FormedWeights) -> LinearForm:
        return RoundsMasters(weights)


class SkipsNan(SoundForm):
    """Leaves lanes alone that hold no numbers."""

    def encode(self, shard: torch.Tensor, lanes: Sequence[torch.Tensor], rank: int) -> None:
        lane = lanes[0].view(torch.float32)
        if not lane.isfinite().all():
            return
        lane.copy_(shard)


class WritesOverFiniteNumbers(Sound):
    def form(self, weights: FormedWeights) -> LinearForm:
        return SkipsNan(weights)


class Forgets(Sound):
    """Takes nothing back from a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


class GradientsInBytes(Sound):
    """Hands gradients in a dtype to the optimizer with which it cannot calculate."""

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        return replace(super().dtypes(unit), grad=torch.float8_e4m3fn)


class CastsInTraining(Low):
    """Casts inputs where there will be a backward."""

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        casts = of_inputs(floats_to(torch.bfloat16))
        return lambda args, kwargs: casts(args, kwargs) if torch.is_grad_enabled() else (args, kwargs)


CAPABILITIES = "capabilities_are_real_bools_that_do_not_change"
DTYPES = "dtypes_are_floats_that_fit_each_other"
INPUTS = "input_casts_keep_structure_values_and_integers"
COME_BACK = "encoded_shards_come_back"
TOGETHER = "shards_encoded_together_come_back"
WRITES_ALL = "encoding_writes_all_that_decoding_reads"
STATE = "state_survives_a_checkpoint"
TRAINING = "training_is_near_that_of_the_unsharded_model"
EVALUATION = "evaluation_is_near_that_of_the_unsharded_model"

FAULTS = [
    fault(EverySecond, CAPABILITIES),
    fault(NarrowReduction, DTYPES),
    fault(SilentHalf, "loss_scaling_is_said_of_fp16"),
    fault(AsksTheLauncher, "answers_are_the_same_each_time_and_on_every_rank"),
    fault(AlmostAnswers, "yes_or_no_questions_get_a_bool"),
    fault(FloatsMasks, INPUTS),
    fault(CastsInPlace, "input_casts_leave_what_they_are_given_as_it_was"),
    fault(CutsInputs, "input_casts_return_gradients_in_the_inputs_dtype"),
    fault(FlattensOutputs, "output_casts_keep_structure_values_and_integers"),
    fault(CutsOutputs, "output_casts_return_gradients_in_the_outputs_dtype"),
    fault(AnyNumberOfBytes, "wires_are_multiples_of_16_bytes_of_a_caster_that_encodes"),
    fault(TwoRanks, COME_BACK),
    fault(EightTogether, TOGETHER),
    fault(DividesByTheLargest, "encoded_zeros_come_back_as_zeros"),
    fault(SeesNothingToSend, "a_shard_without_elements_is_encoded"),
    fault(ScalesMasters, "encoding_leaves_the_shard_as_it_was"),
    fault(AddsToTheWire, WRITES_ALL),
    fault(KnowsTwoRanks, "formed_layers_compute_as_their_weights"),
    fault(RemembersTheFirstGather, "formed_weights_follow_each_gather"),
    fault(FormsInPlace, "forming_leaves_the_shard_as_it_was"),
    fault(WritesOverFiniteNumbers, "forms_write_all_that_layers_read"),
    fault(Forgets, STATE),
    fault(GradientsInBytes, TRAINING),
    fault(CastsInTraining, EVALUATION),
]


@pytest.mark.slow
@WITH_OTHERS
@pytest.mark.parametrize("planted", FAULTS)
def test_only_these_fail(planted: Fault, others: bool) -> None:
    assert failing(PrecisionSuite, planted, others) == set(planted.fails)


def test_every_test_is_the_one_that_catches_something() -> None:
    alone = {planted.values[0].fails[0] for planted in FAULTS if not planted.values[0].why_several}
    assert alone == names_of(PrecisionSuite) - EVERY_PLUGINS
