"""``fp8_linear``: linear layers that compute in fp8 with the bytes of an fp8 gather.

[Note: rowwise fp8]
A weight ``[out, in]`` travels as e4m3 codes, and one fp32 scale an output row: the largest magnitude of the row over
448, so that the rank which has the row knows it. An input has a scale a token, its codes are made beside the product.
With codes ``q`` and scales ``s``,

    output         = (q_x @ q_w.t()) * s_x[:, None] * s_w[None, :]
    input gradient = (q_g @ q_w) * s_g[:, None],  where q_g and s_g are of g * s_w[None, :]

The weight's scales are along the dimension that the second product sums over. So they go into the gradient before it
gets codes, and no second quantisation of the weight is needed. The kernel takes the second operand column by column:
backward copies ``q_w`` transposed, one byte an element.

Scales are fp32, and at least 2**-126: a row of zeros has codes of 0. A row with an infinity or a NaN has the scale NaN,
and so is its output. Without CUDA the same codes are multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from polyshard.errors import ConfigError, DeviceError
from polyshard.interfaces import FormedWeights, LinearForm, PluginContext, PrecisionCapabilities, UnitSpec
from torch import nn
from typing_extensions import override

from ._torch_private import scaled_mm
from .block_codec import Number, encode_rows, kernels_for, scale_of
from .precision import Configured, DtypeSetting, PrecisionSettings, changed_settings, resolve_dtype, switch

_NUMBER = Number.FP8
#: Kernels take matrices whose dimensions are multiples.
_MULTIPLE = 16
#: Compute capability from which on CUDA devices multiply fp8.
_CAPABILITY = (8, 9)


class Fp8Linear(Configured):
    """``fp8_linear``: plain ``nn.Linear`` layers gather and compute in fp8, everything else as with ``bf16``.

    Of the three products of a layer, the output and the gradient of the input are in fp8, and the gradient of the
    weight is in the compute dtype, or in fp8 on request. Layers whose dimensions are no multiples of 16 stay in the
    compute dtype, and so does a head that was split off the outermost module (``split_root``).
    """

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        compute: DtypeSetting = "bf16",
        weight_gradient: str = "compute",
        fast_gradients: bool = False,
        leave_out: str | Iterable[str] = (),
        reduce: DtypeSetting = "fp32",
        communication: DtypeSetting = None,
        buffer: DtypeSetting = None,
        output: DtypeSetting = None,
        cast_inputs: bool = True,
        cast_root_inputs: bool = True,
        keep_low_precision_grads: bool = False,
        leave_alone: type | str | Iterable[type | str] = (),
    ) -> None:
        """Options, all of which may be left out.

        ``compute``: dtype of everything else, and of inputs and outputs of linear layers. ``weight_gradient``:
        ``"compute"``, or ``"fp8"`` to multiply it in fp8 too. ``fast_gradients``: let the products of gradients
        accumulate as Hopper's tensor cores do fastest, with fewer bits, as the output always does. ``leave_out``: shell
        patterns of fully-qualified names of linear layers that compute in ``compute`` (``"*.head"``). The others are
        those of ``mixed``.

        Raises:
            ConfigError: naming the option, for a value that it cannot take.
            DeviceError: the CUDA device does not multiply fp8.
        """
        where = f"precision {context.name!r}"
        options = {
            "reduce": reduce,
            "communication": communication,
            "buffer": buffer,
            "output": output,
            "cast_inputs": cast_inputs,
            "cast_root_inputs": cast_root_inputs,
            "keep_low_precision_grads": keep_low_precision_grads,
        }
        computes = PrecisionSettings(param=resolve_dtype(compute, f"compute of {where}") or torch.bfloat16)
        settings = changed_settings(computes, options, where)
        super().__init__(context, settings, leave_alone)
        self.capabilities = PrecisionCapabilities(loss_scaling=settings.in_half_range())
        if weight_gradient not in ("compute", "fp8"):
            raise ConfigError(f"weight_gradient of {where} must be 'compute' or 'fp8', not {weight_gradient!r}.")
        patterns = (leave_out,) if isinstance(leave_out, str) else tuple(leave_out)
        if not all(isinstance(each, str) for each in patterns):
            raise ConfigError(f"leave_out of {where} must be patterns of names such as '*.head', not {leave_out!r}.")
        self._left_out = patterns
        self._multiplication = _Multiplication(
            emulated=context.device.type != "cuda",
            fast_gradients=switch(fast_gradients, f"fast_gradients of {where}"),
            weight_gradient_in_fp8=weight_gradient == "fp8",
        )
        if context.device.type == "cuda" and settings.param is not torch.bfloat16:
            raise ConfigError(f"compute of {where} must be 'bf16' on CUDA, whose kernels for fp8 write no other dtype.")
        if context.device.type == "cuda" and torch.cuda.is_available():
            found = torch.cuda.get_device_capability(context.device)
            if found < _CAPABILITY:
                raise DeviceError(
                    f"{where} needs a CUDA device of compute capability 8.9, and {context.device} has {found[0]}."
                    f"{found[1]}. Take precision 'bf16', or 'fp8' to gather in fp8 and compute in bf16."
                )

    @override
    def forms(self, unit: UnitSpec, linear: nn.Linear, name: str) -> bool:
        """Whether ``linear`` is not left out or alone, and its dimensions are multiples of 16."""
        return (
            not linear.out_features % _MULTIPLE
            and not linear.in_features % _MULTIPLE
            and not self._is_left_alone(unit)
            and not self.leaves_alone(linear)
            and not any(fnmatchcase(name, pattern) for pattern in self._left_out)
        )

    @override
    def form(self, weights: FormedWeights) -> LinearForm:
        """Raises ConfigError where a rank would have a part of a row, whose scale it does not know."""
        return RowwiseFp8(weights, self._multiplication, self._where)


class _Multiplication(NamedTuple):
    """How products are made."""

    emulated: bool
    """Multiply in fp32 instead of by kernels for fp8."""
    fast_gradients: bool
    weight_gradient_in_fp8: bool


class _Span(NamedTuple):
    """Rows of one length, one behind the other in a rank's shard."""

    offset: int
    """First element in the shard."""
    rows: int
    columns: int


class RowwiseFp8(LinearForm):
    """The weights of one flat buffer as e4m3 codes with a scale a row. See [Note: rowwise fp8].

    Codes lie in the first lane as elements do in the buffer, so that a weight's are a view of it. The second one has
    the scales of each rank's rows; ranks have unequal numbers of these, so scales are brought together behind a gather.
    """

    def __init__(self, weights: FormedWeights, multiplication: _Multiplication, where: str) -> None:
        self._weights = weights
        self._multiplication = multiplication
        self._spans = [_spans(weights, rank, where) for rank in range(weights.shards)]
        self._most_rows = max(sum(span.rows for span in spans) for spans in self._spans)
        self._gathered = self._scales = self._order = torch.empty(0)

    @property
    @override
    def lanes(self) -> Sequence[int]:
        return self._weights.shard_numel, _rounded(self._most_rows) * torch.float32.itemsize

    @override
    def encode(self, shard: torch.Tensor, lanes: Sequence[torch.Tensor], rank: int) -> None:
        codes, scales = lanes[0], lanes[1].view(torch.float32)
        kernels, row = kernels_for(shard, "rowwise_kernels"), 0
        for offset, rows, columns in self._spans[rank]:
            values = shard.narrow(0, offset, rows * columns).view(rows, columns)
            places = codes.narrow(0, offset, rows * columns).view(rows, columns), scales.narrow(0, row, rows)
            if kernels is None:
                encode_rows(_NUMBER, *places, values)
            else:
                kernels.encode(values, *places, _NUMBER.reciprocal)
            row += rows

    @override
    def bind(self, lanes: Sequence[torch.Tensor]) -> Sequence[Sequence[torch.Tensor]]:
        weights = self._weights
        codes = lanes[0].view(-1).view(_NUMBER.dtype)
        self._gathered = lanes[1].view(-1).view(torch.float32)
        self._order = self._order_of_scales(self._gathered.numel() // weights.shards).to(weights.device)
        self._scales = torch.empty(self._order.numel(), dtype=torch.float32, device=weights.device)
        ones = torch.ones(1, max(columns for _, columns in weights.shapes), device=weights.device)
        found, first = [], 0
        for (rows, columns), offset in zip(weights.shapes, weights.offsets, strict=True):
            own = codes.narrow(0, offset, rows * columns).view(rows, columns)
            found.append((own, self._scales.narrow(0, first, rows).unsqueeze(0), ones.narrow(1, 0, columns)))
            first += rows
        return found

    @override
    def arrived(self) -> None:
        torch.index_select(self._gathered, 0, self._order, out=self._scales)

    def _order_of_scales(self, each: int) -> torch.Tensor:
        """Of each row of each weight, where its scale arrives; ``each``: scales that a rank sends."""
        by_weight: list[list[torch.Tensor]] = [[] for _ in self._weights.shapes]
        for rank in range(self._weights.shards):
            row = rank * each
            for piece in self._weights.pieces(rank):
                rows = (piece.stop - piece.start) // self._weights.shapes[piece.weight][1]
                by_weight[piece.weight].append(torch.arange(row, row + rows, dtype=torch.int32))
                row += rows
        return torch.cat([part for parts in by_weight for part in parts])

    @override
    def product(self, input: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        weight, scales, _ = tensors
        codes, scale = quantized(input)
        return self._multiply(codes, weight.t(), scale, scales, input.dtype, fast=True)

    @override
    def input_gradient(self, gradient: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        weight, scales, ones = tensors
        codes, scale = quantized(gradient.float() * scales)
        fast = self._multiplication.fast_gradients
        return self._multiply(codes, weight.t().contiguous().t(), scale, ones, gradient.dtype, fast=fast)

    @override
    def weight_gradient(self, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor | None:
        if not self._multiplication.weight_gradient_in_fp8 or gradient.shape[0] % _MULTIPLE:
            return None
        codes, scale = quantized(gradient.t())
        inputs, input_scale = quantized(input.t())
        fast = self._multiplication.fast_gradients
        return self._multiply(codes, inputs.t(), scale, input_scale.t(), gradient.dtype, fast=fast)

    def _multiply(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        dtype: torch.dtype,
        *,
        fast: bool,
    ) -> torch.Tensor:
        if self._multiplication.emulated:
            return (a.float() @ b.float()).mul(scale_a).mul(scale_b).to(dtype)
        return scaled_mm(a, b, scale_a, scale_b, dtype, fast_accumulation=fast)


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` (``[n, m]``) as e4m3 codes, and the scale of each row (``[n, 1]``, fp32)."""
    scale = scale_of(_NUMBER, values.abs().amax(1, keepdim=True).float())
    return (values.float() / scale).to(_NUMBER.dtype).contiguous(), scale


def _spans(weights: FormedWeights, rank: int, where: str) -> list[_Span]:
    """The rows of ``rank``, neighbours of one length together."""
    found: list[_Span] = []
    for piece in weights.pieces(rank):
        columns = weights.shapes[piece.weight][1]
        if piece.start % columns or piece.stop % columns:
            raise ConfigError(
                f"{where} needs whole rows on each rank, and rank {rank} of {weights.shards} has elements "
                f"{piece.start} to {piece.stop} of '{weights.names[piece.weight]}', whose rows have {columns}. Cut "
                "it along its first dimension."
            )
        rows = (piece.stop - piece.start) // columns
        last = found[-1] if found else None
        if last is not None and last.columns == columns and last.offset + last.rows * columns == piece.offset:
            found[-1] = last._replace(rows=last.rows + rows)
        else:
            found.append(_Span(piece.offset, rows, columns))
    return found


def _rounded(rows: int) -> int:
    return max(4, -(-rows // 4) * 4)
