"""The suite of precision plugins: each of its tests fails over some plugin, and sound ones pass."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from polyshard.interfaces import (
    FormedWeights,
    GatherEncoding,
    InputCast,
    LinearForm,
    OutputCast,
    PluginContext,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
)
from polyshard.nested import map_tensors
from polyshard_testing import PrecisionSuite, plugin_context
from suite_faults import EVERY_PLUGINS, Fault, fault, is_caught, names_of, rules_of

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


class Sound(PrecisionPlugin):
    """Computes in the master dtype; encodes a byte an element behind one scale, which it keeps for checkpoints."""

    api_version = 1
    capabilities = PrecisionCapabilities(encodes=True)

    def __init__(self, context: PluginContext) -> None:
        self.scales: dict[str, torch.Tensor] = {}

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        dtype = unit.master_dtype
        return UnitDtypes(compute=dtype, communication=dtype, reduce=dtype, grad=dtype)

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        return of_inputs(floats_to(unit.master_dtype))

    def encoding(self, unit: UnitSpec) -> GatherEncoding | None:
        return GatherEncoding(16 + (unit.shard_numel + 15) // 16 * 16)

    def encode(self, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
        if not shard.numel():
            return
        scale = shard.abs().amax().double().clamp(min=1e-12) / 127
        self.scales[unit.name] = scale
        message[:8].view(torch.float64).copy_(scale)
        message[16 : 16 + shard.numel()].view(torch.int8).copy_((shard / scale).round())

    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        scales = message[:, :8].view(torch.float64)
        out.copy_(message[:, 16 : 16 + unit.shard_numel].view(torch.int8) * scales)

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
        return UnitDtypes(compute=low, communication=low, reduce=torch.float32, grad=unit.master_dtype)

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        return of_inputs(floats_to(torch.bfloat16))

    def output_cast(self, unit: UnitSpec) -> OutputCast | None:
        return lambda output: map_tensors(floats_to(torch.float32), output)

    def encoding(self, unit: UnitSpec) -> GatherEncoding | None:
        return None


class TestSoundEncoding(PrecisionSuite):
    encoding_tolerance = 0.01

    def make(self) -> PrecisionPlugin:
        return Sound(plugin_context())


class TestSoundCasts(PrecisionSuite):
    training_tolerance = 0.02

    def make(self) -> PrecisionPlugin:
        return Low(plugin_context())


def detached(dtype: torch.dtype) -> Cast:
    """Casts floats that are of another dtype, out of the graph."""
    return lambda each: each.detach().to(dtype) if each.is_floating_point() and each.dtype != dtype else each


def _alternate(self: Sound, context: PluginContext, made: Iterator[int] = itertools.count()) -> None:  # noqa: B008
    Sound.__init__(self, context)
    self.capabilities = PrecisionCapabilities(encodes=next(made) % 2 == 0)


def _dtypes(sound: type[Sound], **changes: Any) -> Callable[..., UnitDtypes]:
    return lambda self, unit: replace(sound.dtypes(self, unit), **changes)


def _narrow(self: Sound, unit: UnitSpec) -> UnitDtypes:
    reduce = torch.float32 if unit.master_dtype is torch.float64 else unit.master_dtype
    return replace(Sound.dtypes(self, unit), reduce=reduce)


def _by_launcher(self: Sound, unit: UnitSpec) -> UnitDtypes:
    found = Sound.dtypes(self, unit)
    return replace(found, reduce=torch.float64) if os.environ.get("RANK") == "1" else found


def _cast_masks(self: Sound, unit: UnitSpec) -> InputCast | None:
    return of_inputs(lambda tensor: tensor if tensor.dtype is torch.int64 else tensor.to(unit.master_dtype))


def _cast_in_place(self: Sound, unit: UnitSpec) -> InputCast | None:
    inner = Sound.input_cast(self, unit)
    assert inner is not None

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        done, named = inner(args, kwargs)
        for given, new in zip(args, done, strict=True):
            if isinstance(given, list):
                given[:] = new
        return done, named

    return cast


def _flatten(self: Low, unit: UnitSpec) -> OutputCast | None:
    def cast(output: Any) -> Any:
        if isinstance(output, dict):
            return {key: cast(value) for key, value in output.items()}
        if isinstance(output, tuple):
            return [cast(value) for value in output]
        return output.float() if isinstance(output, torch.Tensor) and output.is_floating_point() else output

    return cast


def _in_training(self: Low, unit: UnitSpec) -> InputCast | None:
    casts = of_inputs(floats_to(torch.bfloat16))
    return lambda args, kwargs: casts(args, kwargs) if torch.is_grad_enabled() else (args, kwargs)


def _divide(self: Sound, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
    assert not shard.numel() or 127 / shard.abs().amax().item()
    Sound.encode(self, unit, message, shard)


def _look(self: Sound, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
    assert shard.abs().amax() < 1e30
    Sound.encode(self, unit, message, shard)


def _scale(self: Sound, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
    Sound.encode(self, unit, message, shard)
    if shard.dtype is torch.bfloat16 and shard.numel():
        shard.div_(self.scales[unit.name])


def _add(self: Sound, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
    before = message.clone()
    Sound.encode(self, unit, message, shard)
    if shard.dtype is torch.float64:
        message.bitwise_or_(before)


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


def _form(of: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> Callable[..., LinearForm]:
    """A form that sends what ``of`` makes of the shard, what its lane holds, and the rank."""

    def encode(self: SoundForm, shard: torch.Tensor, lanes: Sequence[torch.Tensor], rank: int) -> None:
        SoundForm.encode(self, of(shard, lanes[0].view(torch.float32), rank), lanes, rank)

    changed = type("Changed", (SoundForm,), {"encode": encode})
    return lambda self, weights: changed(weights)


FAULTS = [
    # Says that it encodes, or not, by how many were made before.
    fault(Low, "capabilities_are_real_bools_that_do_not_change", "EverySecond", __init__=_alternate),
    # Accumulates fp64 gradients in less than they travel in.
    fault(Sound, "dtypes_are_floats_that_fit_each_other", "NarrowReduction", dtypes=_narrow),
    # Sends gradients in fp16, and does not say that they need scaling.
    fault(Low, "loss_scaling_is_said_of_fp16", "SilentHalf", dtypes=_dtypes(Low, communication=torch.float16)),
    # Accumulates in fp64 on one rank.
    fault(Sound, "answers_are_the_same_each_time_and_on_every_rank", "AsksTheLauncher", dtypes=_by_launcher),
    # Leaves modules alone that have statistics, and answers these.
    fault(Sound, "yes_or_no_questions_get_a_bool", "AlmostAnswers",
          leaves_alone=lambda self, module: getattr(module, "running_mean", False)),
    # Casts all inputs but numbers of tokens.
    fault(Sound, "input_casts_keep_structure_values_and_integers", "FloatsMasks", input_cast=_cast_masks),
    # Puts what it cast into the caller's list.
    fault(Sound, "input_casts_leave_what_they_are_given_as_it_was", "CastsInPlace", input_cast=_cast_in_place),
    # Lets no gradient through the cast, and the same behind the unit.
    fault(Sound, "input_casts_return_gradients_in_the_inputs_dtype", "CutsInputs",
          input_cast=lambda self, unit: of_inputs(detached(unit.master_dtype))),
    fault(Sound, "output_casts_return_gradients_in_the_outputs_dtype", "CutsOutputs",
          output_cast=lambda self, unit: lambda output: map_tensors(detached(unit.master_dtype), output)),
    # Makes lists of tuples.
    fault(Low, "output_casts_keep_structure_values_and_integers", "FlattensOutputs", output_cast=_flatten),
    # Rounds up to multiples of eight.
    fault(Sound, "encoded_gathers_are_multiples_of_16_bytes_of_a_plugin_that_encodes", "AnyNumberOfBytes",
          encoding=lambda self, unit: GatherEncoding(16 + (unit.shard_numel + 7) // 8 * 8)),
    # Decodes what two ranks sent.
    fault(Sound, "encoded_shards_come_back", "TwoRanks",
          decode=lambda self, unit, message, out: Sound.decode(self, unit, message[:2], out[:2])),
    # Has room for eight units in one call, and leaves out what is more.
    fault(Sound, "shards_encoded_together_come_back", "EightTogether",
          decode_many=lambda self, units, messages, outs: Sound.decode_many(self, units[:8], messages[:8], outs[:8])),
    # Divides by the largest value, as if one of them were not zero.
    fault(Sound, "encoded_zeros_come_back_as_zeros", "DividesByTheLargest", encode=_divide),
    # Looks at the largest value, of no values too.
    fault(Sound, "a_shard_without_elements_is_encoded", "SeesNothingToSend", encode=_look),
    # Divides bf16 masters themselves by their scale.
    fault(Sound, "encoding_leaves_the_shard_as_it_was", "ScalesMasters", encode=_scale),
    # Sets bits of fp64 shards, and clears none.
    fault(Sound, "encoding_writes_all_that_decoding_reads", "AddsToTheEncoding", encode=_add),
    # Takes the second half of the buffer for that of the last rank.
    fault(Sound, "formed_layers_compute_as_their_weights", "KnowsTwoRanks",
          form=_form(lambda shard, lane, rank: shard if rank < 2 else shard * 2)),
    fault(Sound, "formed_weights_follow_each_gather", "RemembersTheFirstGather",
          form=lambda self, weights: CopiesOnce(weights)),
    # Rounds where the optimizer's values are.
    fault(Sound, "forming_leaves_the_shard_as_it_was", "FormsInPlace",
          form=_form(lambda shard, lane, rank: shard.copy_(shard.bfloat16()))),
    # Leaves lanes alone that hold no numbers.
    fault(Sound, "forms_write_all_that_layers_read", "WritesOverFiniteNumbers",
          form=_form(lambda shard, lane, rank: shard if lane.isfinite().all() else lane.clone())),
    # Takes nothing back from a checkpoint.
    fault(Sound, "state_survives_a_checkpoint", "Forgets", load_state_dict=lambda self, state: None),
    # Hands gradients in a dtype to the optimizer with which it cannot calculate.
    fault(Sound, "training_is_near_that_of_the_unsharded_model", "GradientsInBytes",
          dtypes=_dtypes(Sound, grad=torch.float8_e4m3fn)),
    # Casts inputs where there will be a backward.
    fault(Low, "evaluation_is_near_that_of_the_unsharded_model", "CastsInTraining", input_cast=_in_training),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("planted", FAULTS)
def test_the_rule_catches_the_fault(planted: Fault) -> None:
    assert is_caught(PrecisionSuite, planted)


def test_every_test_catches_something() -> None:
    assert rules_of(FAULTS) == names_of(PrecisionSuite) - EVERY_PLUGINS
