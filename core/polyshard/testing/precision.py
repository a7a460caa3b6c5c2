"""The conformance suite for precision casters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from polyshard.interfaces import PrecisionCaster, UnitDtypes, UnitSpec, WireSpec

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class PrecisionSuite:
    """Subclass it, name the class ``Test…``, and override ``make``."""

    wire_tolerance: float = 0.1
    """Largest difference that encoding and decoding may make, as a share of the largest value."""

    def make(self) -> PrecisionCaster:
        """A newly constructed caster."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def units(self) -> Sequence[UnitSpec]:
        """The units that the caster is asked about."""
        return [
            UnitSpec(
                name=name,
                module_class=module_class,
                parameter_names=(f"{name}.weight".lstrip("."),),
                numel=64,
                shard_numel=32,
                master_dtype=master_dtype,
                device=torch.device("cpu"),
                is_root=not name,
            )
            for name, module_class in (
                ("", torch.nn.Module),
                ("layers.0", torch.nn.Linear),
                ("norm", torch.nn.LayerNorm),
            )
            for master_dtype in (torch.float32, torch.float64, torch.bfloat16)
        ]

    def test_dtypes_are_floats_that_fit_each_other(self) -> None:
        caster = self.make()
        for unit in self.units():
            dtypes = caster.dtypes(unit)
            assert isinstance(dtypes, UnitDtypes)
            for dtype in (dtypes.compute, dtypes.wire, dtypes.reduce, dtypes.grad):
                assert dtype.is_floating_point, f"{unit.name!r}: {dtype}"
            assert dtypes.buffer is None or dtypes.buffer.is_floating_point
            assert torch.promote_types(dtypes.wire, dtypes.reduce) is dtypes.reduce, (
                f"{unit.name!r}: gradients travel in {dtypes.wire} and are accumulated in {dtypes.reduce}"
            )

    def test_answers_do_not_change(self) -> None:
        caster, other = self.make(), self.make()
        for unit in self.units():
            first = caster.dtypes(unit)
            assert caster.dtypes(unit) == first
            assert other.dtypes(unit) == first

    def test_yes_or_no_questions_get_a_bool(self) -> None:
        caster = self.make()
        assert isinstance(caster.leaves_alone(torch.nn.LayerNorm(4)), bool)
        assert all(isinstance(caster.full_precision_in_eval(unit), bool) for unit in self.units())
        assert isinstance(caster.capabilities.loss_scaling, bool)

    @pytest.mark.parametrize("dtype", _FLOATS, ids=str)
    def test_input_casts_keep_structure_values_and_integers(self, dtype: torch.dtype) -> None:
        caster = self.make()
        tokens = torch.tensor([3, 1, 2])
        mask = torch.tensor([True, False])
        values = torch.tensor([0.5, -2.0, 3.0], dtype=dtype)
        for unit in self.units():
            cast = caster.input_cast(unit)
            if cast is None:
                continue
            args, kwargs = cast((tokens, [values, "text"], None), {"mask": mask, "nested": {"values": values}})
            assert args[0] is tokens
            assert args[2] is None
            assert kwargs["mask"] is mask
            assert args[1][1] == "text"
            assert args[1][0].is_floating_point()
            assert args[1][0].tolist() == values.tolist()
            assert kwargs["nested"]["values"].tolist() == values.tolist()

    def test_input_casts_return_gradients_in_the_inputs_dtype(self) -> None:
        caster = self.make()
        for unit in self.units():
            cast = caster.input_cast(unit)
            if cast is not None:
                values = torch.ones(3, requires_grad=True)
                args, _ = cast((values,), {})
                args[0].sum().backward()
                assert values.grad is not None
                assert values.grad.dtype is torch.float32
                assert values.grad.tolist() == [1.0, 1.0, 1.0]

    def test_output_casts_keep_structure_and_integers(self) -> None:
        caster = self.make()
        indices = torch.tensor([1, 2])
        values = torch.tensor([0.5, -2.0], dtype=torch.bfloat16)
        for unit in self.units():
            cast = caster.output_cast(unit)
            if cast is not None:
                output: Any = cast({"logits": values, "rest": (indices, None)})
                assert output["rest"][0] is indices
                assert output["rest"][1] is None
                assert output["logits"].tolist() == values.tolist()

    def test_encoded_shards_come_back(self) -> None:
        caster = self.make()
        ranks = 2
        for unit in self.units():
            spec = caster.wire(unit)
            if spec is None:
                continue
            assert isinstance(spec, WireSpec)
            assert caster.capabilities.encodes
            assert spec.nbytes_per_rank > 0
            assert spec.nbytes_per_rank % 16 == 0
            generator = torch.Generator().manual_seed(0)
            shards = torch.randn(ranks, unit.shard_numel, generator=generator, dtype=torch.float64).to(
                unit.master_dtype
            )
            wires = torch.zeros(ranks, spec.nbytes_per_rank, dtype=torch.uint8)
            for wire, shard in zip(wires, shards, strict=True):
                caster.encode(unit, wire, shard)
            out = torch.full((ranks, unit.shard_numel), float("nan"), dtype=caster.dtypes(unit).compute)
            caster.decode(unit, wires, out)
            largest = shards.abs().max().item()
            torch.testing.assert_close(out.double(), shards.double(), rtol=0.0, atol=self.wire_tolerance * largest)

    def test_state_survives_a_checkpoint(self) -> None:
        caster, restored = self.make(), self.make()
        state = caster.state_dict()
        restored.load_state_dict(state)
        assert dict(restored.state_dict()) == dict(state)
