"""The contract of precision casters: the dtypes in which units compute, travel, reduce and reach the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .collectives import Collectives
from .units import UnitSpec

#: Takes and returns a forward's ``(args, kwargs)``.
InputCast = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
#: Takes and returns a forward's output.
OutputCast = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class UnitDtypes:
    """The dtypes of one unit."""

    compute: torch.dtype
    """Parameters in forward and backward; the gather buffer, and, without a ``WireSpec``, what the gather sends."""
    wire: torch.dtype
    """Gradients while they travel."""
    reduce: torch.dtype
    """In which gradients are accumulated over ranks and over microbatches. Never narrower than ``wire``."""
    grad: torch.dtype
    """Dtype of ``.grad`` as the optimizer sees it."""
    buffer: torch.dtype | None = None
    """Floating-point buffers of the unit's modules; None leaves them alone."""


@dataclass(frozen=True, slots=True)
class WireSpec:
    """A gather whose bytes are not the parameters in compute dtype: fp8 or int8 with scales."""

    nbytes_per_rank: int
    """Bytes that each rank sends, the same on every rank; a multiple of 16."""


@dataclass(frozen=True, slots=True)
class PrecisionCapabilities:
    """The features of a caster beyond dtypes."""

    loss_scaling: bool = False
    """Gradients can underflow in its dtypes: an optimizer that steps without a gradient scaler is warned of."""
    encodes: bool = False
    """``wire`` returns a ``WireSpec`` for some units."""


class PrecisionCaster(ABC):
    """Chooses dtypes and casts.

    A plugin is a callable ``(context: PluginContext, **options) -> PrecisionCaster``. ``dtypes`` to ``wire`` are called
    at wrap, and must answer alike each time and on every rank. Casts and codecs run in steps.
    """

    api_version: ClassVar[int]
    """The version of this contract that a plugin was written for. Each class states its own; none is inherited."""
    capabilities: PrecisionCapabilities = PrecisionCapabilities()

    @abstractmethod
    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        """The dtypes of ``unit``."""

    def leaves_alone(self, module: torch.nn.Module) -> bool:
        """Whether ``module``, and the parameters directly in it, keep full precision (a unit of their own)."""
        return False

    def full_precision_in_eval(self, unit: UnitSpec) -> bool:
        """Whether ``unit`` computes in its master dtype while its module is in eval mode."""
        return False

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        """A cast of the unit's forward inputs, or None. Integer tensors must pass unchanged."""
        return None

    def output_cast(self, unit: UnitSpec) -> OutputCast | None:
        """A cast of the unit's forward output, or None."""
        return None

    def wire(self, unit: UnitSpec) -> WireSpec | None:
        """The unit's bytes in a gather. None: compute dtype, one cast from the master into the own slice."""
        return None

    def prepare(self, units: Sequence[UnitSpec], collectives: Collectives) -> None:
        """Called at the start of each outermost forward, on every rank, where ``capabilities.encodes``."""
        return None

    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        """Write ``shard`` (``[shard_numel]``, master dtype) as bytes into ``wire`` (``[nbytes_per_rank]``, uint8).

        Called before the gather, on its stream.
        """
        raise NotImplementedError(f"{type(self).__name__} answered wire() with a WireSpec and must implement encode()")

    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Read every rank's bytes (``[world_size, nbytes_per_rank]``) into ``out`` (``[world_size, shard_numel]``).

        Called behind the gather, on the stream that waits for it.
        """
        raise NotImplementedError(f"{type(self).__name__} answered wire() with a WireSpec and must implement decode()")

    def encode_many(
        self, units: Sequence[UnitSpec], wires: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> None:
        """``encode`` for each unit in turn: the units of one communication, in the same order on every rank.

        Override it where one launch of many takes less time than many launches.
        """
        for unit, wire, shard in zip(units, wires, shards, strict=True):
            self.encode(unit, wire, shard)

    def decode_many(
        self, units: Sequence[UnitSpec], wires: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """``decode`` for each unit in turn, as ``encode_many``."""
        for unit, wire, out in zip(units, wires, outs, strict=True):
            self.decode(unit, wire, out)

    def state_dict(self) -> Mapping[str, Any]:
        """State for checkpoints, such as amax histories."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        return None
