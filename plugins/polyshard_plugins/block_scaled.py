"""Precision plugins whose gathers carry eight bits an element, with a scale for every block of elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import GatherEncoding, PluginContext, PrecisionCapabilities, UnitSpec
from typing_extensions import override

from .block_codec import BlockCode, Number, kernels_for
from .precision import Configured, DtypeSetting, PrecisionSettings, changed_settings, resolve_dtype, whole_number

#: Sizes of a block: the kernels take powers of two, and a tile of them holds four blocks.
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 1024


class BlockScaled(Configured):
    """Weights travel as codes and scales and compute in a plain dtype.

    Each gather encodes the master itself, so errors do not add up from step to step. Every rank decodes the gathered
    codes, its own too, so all compute with the same weights. Backward's gather carries the same bytes as forward's,
    unless something wrote to the master in between.

    If the master has an infinity or a NaN, its whole block computes with NaN.
    """

    api_version = 1

    #: The kind of codes in which weights travel.
    number: ClassVar[Number]

    def __init__(
        self,
        context: PluginContext,
        block: int = 128,
        compute: DtypeSetting = "bf16",
        min_numel: int = 65536,
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

        ``block``: elements that share a scale of four bytes, a power of two from 16 to 1024. ``compute``: the dtype of
        parameters in forward and backward. ``min_numel``: a unit of fewer elements, padding included, travels in
        ``compute``: its gather takes as long as its latency. ``communication`` is that of gradients that travel. The
        others are those of ``mixed``; modules that are left alone travel in their own dtype.

        Raises:
            ConfigError: naming the option, for a value that it cannot take, and for a ``reduce`` that is narrower than
                ``communication``.
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
        computes = PrecisionSettings(param=resolve_dtype(compute, f"compute of {where}"))
        settings = changed_settings(computes, options, where)
        super().__init__(context, settings, leave_alone)
        self.capabilities = PrecisionCapabilities(loss_scaling=settings.in_half_range(), encodes=True)
        self._code = BlockCode(self.number, _block(block, f"block of {where}"))
        self._min_numel = whole_number(min_numel, 0, f"min_numel of {where}")

    @override
    def encoding(self, unit: UnitSpec) -> GatherEncoding | None:
        """None for a unit that is small, left alone, not floating-point, or would not travel in fewer bytes."""
        if unit.numel < self._min_numel or self._is_left_alone(unit) or not unit.master_dtype.is_floating_point:
            return None
        nbytes = self._code.nbytes(unit.shard_numel)
        return GatherEncoding(nbytes) if nbytes < unit.shard_numel * self.dtypes(unit).compute.itemsize else None

    @override
    def encode(self, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
        self.encode_many([unit], [message], [shard])

    @override
    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        self.decode_many([unit], [message], [out])

    @override
    def encode_many(
        self, units: Sequence[UnitSpec], messages: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> None:
        """On CUDA one launch for up to 16 units of one master dtype."""
        kernels = kernels_for(messages[0], "block_kernels")
        if kernels is None:
            for message, shard in zip(messages, shards, strict=True):
                self._code.encode(message, shard)
            return
        for few in _by_dtype(shards):
            kernels.encode(self._code, [messages[i] for i in few], [shards[i] for i in few])

    @override
    def decode_many(
        self, units: Sequence[UnitSpec], messages: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """On CUDA one launch for up to 16 units of one compute dtype."""
        kernels = kernels_for(messages[0], "block_kernels")
        if kernels is None:
            for message, out in zip(messages, outs, strict=True):
                self._code.decode(message, out)
            return
        for few in _by_dtype(outs):
            kernels.decode(self._code, [messages[i] for i in few], [outs[i] for i in few])


class Int8(BlockScaled):
    """``int8``: gathers in int8 with a scale a block; computes in bf16, sends gradients in bf16, reduces in fp32."""

    api_version = 1
    number = Number.INT8


class Fp8(BlockScaled):
    """``fp8``: the same in ``float8_e4m3fn``."""

    api_version = 1
    number = Number.FP8


def _by_dtype(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """Positions in ``tensors``, those of one dtype together."""
    found: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        found[tensor.dtype].append(position)
    return found.values()


def _block(value: object, where: str) -> int:
    number = whole_number(value, SMALLEST_BLOCK, where)
    if number > LARGEST_BLOCK or number & (number - 1):
        raise ConfigError(
            f"{value!r} is no size of a block, in {where}. Give a power of two from {SMALLEST_BLOCK} to "
            f"{LARGEST_BLOCK}: smaller ones err less and send more."
        )
    return number
