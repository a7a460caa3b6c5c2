"""Computes in bfloat16, to which parameters are rounded at random: on average they are the masters."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from polyshard.interfaces import (
    Collectives,
    GatherEncoding,
    InputCast,
    PluginContext,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
)
from polyshard.nested import map_tensors

#: The bits of an fp32 number that bfloat16 has not.
_DROPPED = 16


class StochasticBf16(PrecisionPlugin):
    """Units with masters in fp32 compute in bfloat16; others in the dtype of their masters.

    An element between two neighbours of bfloat16 becomes the upper one with the probability of its distance from the
    lower one (Gupta et al., 2015, arXiv:1502.02551). Each outermost forward rounds anew, and its backward gathers the
    same numbers. Gradients travel and are reduced in fp32.
    """

    api_version = 1
    capabilities = PrecisionCapabilities(encodes=True)

    def __init__(self, context: PluginContext, seed: int = 0) -> None:
        del context
        self._seed, self._forwards = seed, 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        master = unit.master_dtype
        compute = torch.bfloat16 if master is torch.float32 else master
        return UnitDtypes(compute=compute, communication=master, reduce=master, grad=master)

    def input_cast(self, unit: UnitSpec) -> InputCast:
        compute = self.dtypes(unit).compute

        def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            arguments: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
                lambda tensor: tensor.to(compute) if tensor.is_floating_point() else tensor, (args, kwargs)
            )
            return arguments

        return cast

    def encoding(self, unit: UnitSpec) -> GatherEncoding | None:
        if unit.master_dtype is not torch.float32 or not unit.shard_numel:
            return None
        return GatherEncoding(nbytes_per_rank=-(-2 * unit.shard_numel // 16) * 16)

    def prepare(self, units: Sequence[UnitSpec], collectives: Collectives) -> None:
        self._forwards += 1

    def encode(self, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
        generator = self._generators.get(shard.device)
        if generator is None:
            generator = self._generators[shard.device] = torch.Generator(shard.device)
        # Of the forward and the unit alone: backward's gather, and replicas of a hybrid strategy, round alike.
        generator.manual_seed(zlib.crc32(f"{self._seed} {self._forwards} {unit.name}".encode()))
        noise = torch.randint(2**_DROPPED, shard.shape, generator=generator, dtype=torch.int32, device=shard.device)
        # Integers that are added to the bits of a float move it away from zero; what is left has bfloat16's bits alone.
        rounded = ((shard.view(torch.int32) + noise) >> _DROPPED << _DROPPED).view(torch.float32)
        message.view(torch.bfloat16)[: unit.shard_numel].copy_(torch.where(shard.isfinite(), rounded, shard))

    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(message.view(torch.bfloat16)[:, : unit.shard_numel])

    def state_dict(self) -> Mapping[str, Any]:
        return {"forwards": self._forwards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forwards = state["forwards"]
