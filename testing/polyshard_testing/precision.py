"""The conformance suite for precision plugins."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from polyshard.interfaces import (
    Collectives,
    FormedWeights,
    GatherEncoding,
    Group,
    LinearForm,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
)
from typing_extensions import override

from .plugin import LocalPluginSuite, as_rank, plugin_context
from .training import Training

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MODULES = (torch.nn.Module, torch.nn.Linear, torch.nn.LayerNorm)
#: Elements of one rank's shard: slices of units are multiples of 16 bytes, but for what a layout cuts exactly.
_SHARDS = (32, 17, 1)
#: That of a unit of 128 KiB in a 16-bit dtype.
_LARGE_SHARD = 1 << 15
_WIRE_ALIGNMENT = 16
#: ``(out, in)`` of weights that lie in one buffer, and by number of ranks the elements of a shard, which cuts no row.
_WEIGHTS = ((48, 64), (64, 32))
_FORMED_SHARDS = {1: 5120, 2: 2560, 3: 1728}


class PrecisionSuite(LocalPluginSuite):
    """Subclass it, name the class ``Test…``, and override ``make``; override ``device`` to test on another one.

    Every rule of ``polyshard.interfaces.PrecisionPlugin``; then a few steps, and an evaluation, of a small fp32 model
    sharded with the precision plugin over two ranks, compared with those of the unsharded model.
    """

    group = Group.PRECISION

    encoding_tolerance: float = 0.1
    """Largest difference that encoding and decoding may make, as a share of the largest value."""
    form_tolerance: float = 0.1
    """Largest difference that the output and the gradients of a layer that computes with bytes (``forms``) may have
    from those of its weight, as a share of the largest."""
    training_tolerance: float = 0.1
    """Largest difference that computing in the precision plugin's dtypes may make of parameters after three steps, as a
    share of the largest change, and of a forward's output, as a share of the largest. Where it computes in fp32, 1e-5
    holds."""

    @override
    def make(self) -> PrecisionPlugin:
        """A newly constructed precision plugin."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def units(self) -> Sequence[UnitSpec]:
        """The units that the precision plugin is asked about."""
        small = [
            self._unit(name, _SHARDS[(index + place) % len(_SHARDS)], master_dtype, module_class)
            for index, (name, module_class) in enumerate(zip(("", "layers.0", "norm"), _MODULES, strict=True))
            for place, master_dtype in enumerate(_FLOATS)
        ]
        # A precision plugin may leave small units alone.
        return [*small, self._unit("layers.2", _LARGE_SHARD)]

    def test_capabilities_are_real_bools_that_do_not_change(self) -> None:
        precision = self.make()
        capabilities: object = precision.capabilities
        assert isinstance(capabilities, PrecisionCapabilities), f"capabilities are {capabilities!r}"
        for field in dataclasses.fields(capabilities):
            value = getattr(capabilities, field.name)
            assert isinstance(value, bool), f"{field.name} is {value!r}"
        assert precision.capabilities == capabilities
        assert self.make().capabilities == capabilities

    def test_dtypes_are_floats_that_fit_each_other(self) -> None:
        precision = self.make()
        for unit in self.units():
            dtypes = precision.dtypes(unit)
            assert isinstance(dtypes, UnitDtypes)
            for dtype in (dtypes.compute, dtypes.communication, dtypes.reduce, dtypes.grad):
                assert isinstance(dtype, torch.dtype), _about(unit)
                assert dtype.is_floating_point, f"{dtype}, {_about(unit)}"
            assert dtypes.buffer is None or dtypes.buffer.is_floating_point, _about(unit)
            assert torch.promote_types(dtypes.communication, dtypes.reduce) is dtypes.reduce, (
                f"gradients travel in {dtypes.communication} and are accumulated in {dtypes.reduce}, {_about(unit)}"
            )

    def test_loss_scaling_is_said_of_fp16(self) -> None:
        precision = self.make()
        for unit in self.units():
            dtypes = precision.dtypes(unit)
            underflows = torch.float16 in (dtypes.compute, dtypes.communication, dtypes.reduce)
            if underflows and unit.master_dtype is not torch.float16:
                assert precision.capabilities.loss_scaling, f"small gradients become zero, {_about(unit)}"

    def test_answers_are_the_same_each_time_and_on_every_rank(self) -> None:
        with as_rank(0):
            precision = self.make()
            first = self._answers(precision)
            again = self._answers(precision, backwards=True)
        with as_rank(1):
            other = self._answers(self.make(), backwards=True)
        assert first == again
        assert first == other

    def test_yes_or_no_questions_get_a_bool(self) -> None:
        precision = self.make()
        for module in (torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4), torch.nn.Linear(2, 2), torch.nn.Sequential()):
            answer: object = precision.leaves_alone(module)
            assert isinstance(answer, bool), f"leaves_alone answers {answer!r} for a {type(module).__name__}"
        for unit in self.units():
            answer = precision.full_precision_in_eval(unit)
            assert isinstance(answer, bool), f"full_precision_in_eval answers {answer!r}, {_about(unit)}"

    @pytest.mark.parametrize("dtype", _FLOATS, ids=str)
    def test_input_casts_keep_structure_values_and_integers(self, dtype: torch.dtype) -> None:
        tokens = torch.tensor([3, 1, 2], device=self.device)
        bytes_ = tokens.to(torch.uint8)
        mask = torch.tensor([True, False], device=self.device)
        values = self._values(dtype)
        for unit, cast in self._casts("input_cast"):
            args, kwargs = cast(
                (tokens, [values, "text"], None), {"mask": mask, "nested": {"values": (values, bytes_)}}
            )
            assert isinstance(args, tuple), _about(unit)
            assert args[0] is tokens, _about(unit)
            assert args[2] is None, _about(unit)
            assert kwargs["mask"] is mask, _about(unit)
            assert args[1][1] == "text", _about(unit)
            assert args[1][0].is_floating_point(), _about(unit)
            assert args[1][0].tolist() == values.tolist(), _about(unit)
            assert isinstance(kwargs["nested"]["values"], tuple), _about(unit)
            assert kwargs["nested"]["values"][0].tolist() == values.tolist(), _about(unit)
            assert kwargs["nested"]["values"][1] is bytes_, _about(unit)

    def test_input_casts_leave_what_they_are_given_as_it_was(self) -> None:
        for unit, cast in self._casts("input_cast"):
            values = self._values(torch.float64)
            listed, named = [values], {"values": values}
            cast((listed,), named)
            assert listed[0] is values, _about(unit)
            assert named["values"] is values, _about(unit)
            assert values.dtype is torch.float64, _about(unit)

    @pytest.mark.parametrize("dtype", _FLOATS, ids=str)
    def test_input_casts_return_gradients_in_the_inputs_dtype(self, dtype: torch.dtype) -> None:
        for unit, cast in self._casts("input_cast"):
            values = self._values(dtype).requires_grad_()
            _assert_ones_come_back(values, cast((values,), {})[0][0], unit)

    def test_output_casts_keep_structure_values_and_integers(self) -> None:
        indices = torch.tensor([1, 2], device=self.device)
        values = self._values(torch.bfloat16)
        for unit, cast in self._casts("output_cast"):
            output: Any = cast({"logits": values, "rest": (indices, None)})
            assert isinstance(output["rest"], tuple), _about(unit)
            assert output["rest"][0] is indices, _about(unit)
            assert output["rest"][1] is None, _about(unit)
            assert output["logits"].tolist() == values.tolist(), _about(unit)

    @pytest.mark.parametrize("dtype", _FLOATS, ids=str)
    def test_output_casts_return_gradients_in_the_outputs_dtype(self, dtype: torch.dtype) -> None:
        for unit, cast in self._casts("output_cast"):
            values = self._values(dtype).requires_grad_()
            _assert_ones_come_back(values, cast(values), unit)

    def test_encoded_gathers_are_multiples_of_16_bytes_of_a_plugin_that_encodes(self) -> None:
        precision = self.make()
        for unit, spec in self._encodings(precision):
            assert isinstance(spec, GatherEncoding), _about(unit)
            assert precision.capabilities.encodes, (
                "it answers a GatherEncoding: say so, PrecisionCapabilities(encodes=True)"
            )
            assert type(spec.nbytes_per_rank) is int, _about(unit)
            assert spec.nbytes_per_rank > 0, _about(unit)
            assert spec.nbytes_per_rank % _WIRE_ALIGNMENT == 0, f"{spec.nbytes_per_rank} bytes, {_about(unit)}"

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_encoded_shards_come_back(self, ranks: int) -> None:
        precision = self._prepared(ranks)
        for unit, spec in self._encodings(precision):
            shards = self._shards(unit, ranks)
            messages = self._encoded(precision, unit, spec, shards)
            dtypes = {precision.dtypes(unit).compute}
            if precision.full_precision_in_eval(unit):
                dtypes.add(unit.master_dtype)
            for dtype in dtypes:
                self._assert_near(self._decoded(precision, unit, messages, dtype), shards, _about(unit))

    def test_shards_encoded_together_come_back(self) -> None:
        precision = self._prepared(2)
        specs = dict(self._encodings(precision))
        units = list(specs)
        if not units:
            return
        messages = [self._bytes(2, spec) for spec in specs.values()]
        shards = [self._shards(unit, 2) for unit in units]
        outs = [
            torch.full_like(shard, float("nan"), dtype=precision.dtypes(unit).compute)
            for unit, shard in zip(units, shards, strict=True)
        ]
        for rank in range(2):
            precision.encode_many(
                units, [message[rank] for message in messages], [shard[rank].clone() for shard in shards]
            )
        precision.decode_many(units, messages, outs)
        for unit, shard, out in zip(units, shards, outs, strict=True):
            self._assert_near(out, shard, _about(unit))

    def test_encoded_zeros_come_back_as_zeros(self) -> None:
        precision = self._prepared(2)
        for unit, spec in self._encodings(precision):
            zeros = torch.zeros(2, unit.shard_numel, dtype=unit.master_dtype, device=self.device)
            out = self._decoded(precision, unit, self._encoded(precision, unit, spec, zeros))
            assert not out.any(), f"{out.tolist()}, {_about(unit)}"

    def test_a_shard_without_elements_is_encoded(self) -> None:
        # A unit whose parameters have no element is gathered like any other.
        precision = self._prepared(2)
        for dtype in _FLOATS:
            unit = self._unit("layers.1", 0, dtype)
            spec = precision.encoding(unit)
            if spec is not None:
                assert spec.nbytes_per_rank > 0, _about(unit)
                self._decoded(precision, unit, self._encoded(precision, unit, spec, self._shards(unit, 2)))

    def test_encoding_leaves_the_shard_as_it_was(self) -> None:
        precision = self._prepared(2)
        for unit, spec in self._encodings(precision):
            shards = self._shards(unit, 2)
            before = shards.clone()
            for message, shard in zip(self._bytes(2, spec), shards, strict=True):
                precision.encode(unit, message, shard)
            assert torch.equal(shards, before), _about(unit)

    def test_encoding_writes_all_that_decoding_reads(self) -> None:
        # The engine takes memory for each gather, with whatever was there.
        for leftover in (0, 255):
            precision = self._prepared(2)
            for unit, spec in self._encodings(precision):
                shards = self._shards(unit, 2)
                messages = self._encoded(precision, unit, spec, shards, leftover)
                self._assert_near(
                    self._decoded(precision, unit, messages), shards, f"over bytes of {leftover}, {_about(unit)}"
                )

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_formed_layers_compute_as_their_weights(self, ranks: int) -> None:
        for gather in self._formed(ranks):
            gather.fill(self._shard_of_weights(ranks))
            gather.check(self.form_tolerance)

    def test_formed_weights_follow_each_gather(self) -> None:
        for gather in self._formed(2):
            for seed in range(2):
                gather.fill(self._shard_of_weights(2, seed))
                gather.check(self.form_tolerance)

    def test_forming_leaves_the_shard_as_it_was(self) -> None:
        for gather in self._formed(2):
            shards = self._shard_of_weights(2)
            before = shards.clone()
            gather.fill(shards)
            assert torch.equal(shards, before), "encode changed the master"

    def test_forms_write_all_that_layers_read(self) -> None:
        # The engine takes memory for each gather, with whatever was there.
        for leftover in (0, 255):
            for gather in self._formed(2):
                for lane in gather.lanes:
                    lane.fill_(leftover)
                gather.fill(self._shard_of_weights(2))
                gather.check(self.form_tolerance)

    def test_state_survives_a_checkpoint(self) -> None:
        precision, restored = self._prepared(2), self.make()
        for unit, spec in self._encodings(precision):
            self._encoded(precision, unit, spec, self._shards(unit, 2))
        state = copy.deepcopy(dict(precision.state_dict()))
        stream = io.BytesIO()
        torch.save(state, stream)
        stream.seek(0)
        restored.load_state_dict(torch.load(stream, weights_only=False))
        assert _equal(dict(restored.state_dict()), state)

    def test_training_is_near_that_of_the_unsharded_model(self) -> None:
        training = Training(device=self.device, loss_scaling=self.make().capabilities.loss_scaling)
        sharded = training.sharded(lambda: {"precision": self.make()})
        sharded.check(training.reference(), self.training_tolerance)

    def test_evaluation_is_near_that_of_the_unsharded_model(self) -> None:
        training = Training(device=self.device)
        scores = training.scores(lambda: {"precision": self.make()}).double()
        expected = training.reference_scores().double()
        difference = (scores - expected).abs().max().item()
        assert difference <= self.training_tolerance * expected.abs().max().item(), f"scores are {difference:.3g} off"

    def _answers(self, precision: PrecisionPlugin, backwards: bool = False) -> list[Any]:
        units = list(self.units())
        answers = [
            (
                precision.dtypes(unit),
                precision.encoding(unit),
                precision.full_precision_in_eval(unit),
                precision.input_cast(unit) is None,
                precision.output_cast(unit) is None,
            )
            for unit in (reversed(units) if backwards else units)
        ]
        alone = [precision.leaves_alone(module) for module in (torch.nn.LayerNorm(4), torch.nn.Linear(2, 2))]
        return [*alone, *(answers[::-1] if backwards else answers)]

    def _formed(self, ranks: int) -> Iterator[_FormedGather]:
        """The weights of a buffer, of a precision plugin that lets linear layers compute with bytes."""
        precision, unit = self.make(), self._unit("layers.0", _FORMED_SHARDS[ranks])
        layers = [torch.nn.Linear(columns, rows, device=self.device) for rows, columns in _WEIGHTS]
        if all(precision.forms(unit, layer, f"layers.0.{index}") for index, layer in enumerate(layers)):
            yield _FormedGather(precision, precision.dtypes(unit).compute, ranks, self.device)

    def _shard_of_weights(self, ranks: int, seed: int = 0) -> torch.Tensor:
        """``[ranks, shard_numel]``: rows of ``_WEIGHTS``, and what the last rank has behind them."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(ranks, _FORMED_SHARDS[ranks], generator=generator).to(self.device)

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([0.5, -2.0, 3.0], dtype=dtype, device=self.device)

    def _casts(self, method: str) -> Iterator[tuple[UnitSpec, Any]]:
        """Units with the casts that ``method`` of a new precision plugin answers."""
        precision = self.make()
        casts = ((unit, getattr(precision, method)(unit)) for unit in self.units())
        return ((unit, cast) for unit, cast in casts if cast is not None)

    def _encodings(self, precision: PrecisionPlugin) -> Iterator[tuple[UnitSpec, GatherEncoding]]:
        for unit in self.units():
            spec = precision.encoding(unit)
            if spec is not None:
                yield unit, spec

    def _prepared(self, ranks: int) -> PrecisionPlugin:
        """A new precision plugin, before the gathers of a forward."""
        precision = self.make()
        if precision.capabilities.encodes:
            precision.prepare(self.units(), _pretended(ranks, self.device))
        return precision

    def _shards(self, unit: UnitSpec, ranks: int) -> torch.Tensor:
        """``[ranks, shard_numel]``, larger from rank to rank."""
        generator = torch.Generator().manual_seed(0)
        shards = torch.randn(ranks, unit.shard_numel, generator=generator, dtype=torch.float64)
        return (shards * torch.arange(1, ranks + 1).unsqueeze(1)).to(unit.master_dtype).to(self.device)

    def _encoded(
        self, precision: PrecisionPlugin, unit: UnitSpec, spec: GatherEncoding, shards: torch.Tensor, leftover: int = 0
    ) -> torch.Tensor:
        messages = self._bytes(len(shards), spec, leftover)
        for message, shard in zip(messages, shards.clone(), strict=True):
            precision.encode(unit, message, shard)
        return messages

    def _bytes(self, ranks: int, spec: GatherEncoding, leftover: int = 0) -> torch.Tensor:
        return torch.full((ranks, spec.nbytes_per_rank), leftover, dtype=torch.uint8, device=self.device)

    def _decoded(
        self, precision: PrecisionPlugin, unit: UnitSpec, messages: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """In ``dtype``, by default that of compute."""
        dtype = dtype or precision.dtypes(unit).compute
        out = torch.full((len(messages), unit.shard_numel), float("nan"), dtype=dtype, device=self.device)
        precision.decode(unit, messages, out)
        return out

    def _assert_near(self, out: torch.Tensor, shards: torch.Tensor, about: str) -> None:
        largest = shards.abs().max().item()
        # A NaN is not near.
        assert (out.double() - shards.double()).abs().max() <= self.encoding_tolerance * largest, about


class _FormedGather:
    """The lanes of ``_WEIGHTS`` over some ranks, and what layers compute with."""

    def __init__(self, precision: PrecisionPlugin, compute: torch.dtype, ranks: int, device: torch.device) -> None:
        offsets = (0, _WEIGHTS[0][0] * _WEIGHTS[0][1])
        names = ("layers.0.0.weight", "layers.0.1.weight")
        weights = FormedWeights("layers.0", names, _WEIGHTS, offsets, ranks, _FORMED_SHARDS[ranks], compute, device)
        self._weights, self._compute = weights, compute
        self.form = precision.form(weights)
        assert isinstance(self.form, LinearForm), f"form() answered {self.form!r}"
        for nbytes in self.form.lanes:
            assert type(nbytes) is int, f"a lane of {nbytes!r} bytes"
            assert nbytes > 0, f"a lane of {nbytes} bytes"
        self.lanes = [torch.zeros(ranks, nbytes, dtype=torch.uint8, device=device) for nbytes in self.form.lanes]
        # As in the engine: the tensors are made before anything was gathered.
        self.tensors = [tuple(each) for each in self.form.bind(self.lanes)]
        assert len(self.tensors) == len(_WEIGHTS), f"bind() answered tensors of {len(self.tensors)} weights"

    def fill(self, shards: torch.Tensor) -> None:
        """Gather ``shards`` (``[ranks, shard_numel]``)."""
        for rank, shard in enumerate(shards):
            self.form.encode(shard, [lane[rank] for lane in self.lanes], rank)
        self.form.arrived()
        self._whole = shards.flatten()

    def check(self, tolerance: float) -> None:
        """Compare the products of every weight with those of its values."""
        for (rows, columns), offset, tensors in zip(_WEIGHTS, self._weights.offsets, self.tensors, strict=True):
            weight = self._whole.narrow(0, offset, rows * columns).view(rows, columns).double()
            generator = torch.Generator().manual_seed(1)
            input = torch.randn(32, columns, generator=generator).to(weight.device, self._compute)
            gradient = torch.randn(32, rows, generator=generator).to(weight.device, self._compute)
            found = {
                "product": (self.form.product(input, tensors), input.double() @ weight.t()),
                "input_gradient": (self.form.input_gradient(gradient, tensors), gradient.double() @ weight),
            }
            of_weight = self.form.weight_gradient(gradient, input)
            if of_weight is not None:
                found["weight_gradient"] = of_weight, gradient.double().t() @ input.double()
            for name, (answer, wanted) in found.items():
                assert answer.dtype is self._compute, f"{name}() answered {answer.dtype}"
                assert answer.shape == wanted.shape, f"{name}() answered a tensor {tuple(answer.shape)}"
                difference = (answer.double() - wanted).abs().max()
                # A NaN is not near.
                assert difference <= tolerance * wanted.abs().max(), f"{name}() is {difference:.3g} off"


@functools.cache
def _pretended(ranks: int, device: torch.device) -> Collectives:
    choice = {"name": "polyshard:fake", "world_size": ranks}
    return plugin_context(device=device).construct(Group.COLLECTIVES, choice)


def _about(unit: UnitSpec) -> str:
    return f"unit {unit.label!r} of {unit.shard_numel} {unit.master_dtype}"


def _assert_ones_come_back(leaf: torch.Tensor, cast: torch.Tensor, unit: UnitSpec) -> None:
    assert cast.requires_grad, f"no gradient goes through the cast, {_about(unit)}"
    cast.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None, _about(unit)
    assert leaf.grad.dtype is leaf.dtype, _about(unit)
    assert leaf.grad.tolist() == [1.0, 1.0, 1.0], _about(unit)


def _equal(one: Any, other: Any) -> bool:
    """Whether nested states hold the same, tensors by their values."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        alike = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return alike and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
