"""The suite of precision casters fails for those that break their contract, each in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from polyshard.interfaces import InputCast, PrecisionCapabilities, PrecisionCaster, UnitDtypes, UnitSpec, WireSpec
from polyshard.testing import PrecisionSuite


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
