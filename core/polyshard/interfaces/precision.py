"""The contract of precision plugins: the dtypes in which units compute, travel, reduce and reach the optimizer."""

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
    """Parameters in forward and backward; the gather buffer, and what gathers send without a ``GatherEncoding``."""
    communication: torch.dtype
    """Gradients of one backward while they travel. Sums of several travel in ``reduce``."""
    reduce: torch.dtype
    """In which gradients are accumulated over ranks and over microbatches. Never narrower than ``communication``."""
    grad: torch.dtype
    """Dtype of ``.grad`` as the optimizer sees it."""
    buffer: torch.dtype | None = None
    """Floating-point buffers of the unit's modules; None leaves them alone."""


@dataclass(frozen=True, slots=True)
class GatherEncoding:
    """A gather whose bytes are not the parameters in compute dtype: fp8 or int8 with scales."""

    nbytes_per_rank: int
    """Bytes that each rank sends, the same on every rank; a multiple of 16."""


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """The elements of one weight that one rank has."""

    weight: int
    """Index of the weight in ``FormedWeights.shapes``."""
    start: int
    """First element within the weight, which is row-major."""
    stop: int
    """One past the last element within the weight."""
    offset: int
    """First element within the rank's shard."""


@dataclass(frozen=True, slots=True)
class FormedWeights:
    """Weights of linear layers that lie in one flat buffer, which is cut into equal shards, one a rank."""

    unit: str
    """The unit's label, for messages."""
    names: tuple[str, ...]
    """The weights' fully-qualified names, in order of offset."""
    shapes: tuple[tuple[int, int], ...]
    """``(out, in)`` of each."""
    offsets: tuple[int, ...]
    """First element of each in the buffer: a multiple of 16. Between weights may be padding."""
    shards: int
    """Number of ranks that share the buffer."""
    shard_numel: int
    """Elements of one rank's shard: rank ``k`` has elements ``[k * shard_numel, (k + 1) * shard_numel)``."""
    compute: torch.dtype
    """Dtype of inputs, outputs and gradients of the layers."""
    device: torch.device
    """Device on which the unit computes."""

    def pieces(self, rank: int) -> tuple[WeightPiece, ...]:
        """What ``rank`` has of the weights, in order; empty pieces are left out."""
        begin, found = rank * self.shard_numel, []
        for index, (offset, (rows, columns)) in enumerate(zip(self.offsets, self.shapes, strict=True)):
            low, high = max(offset, begin), min(offset + rows * columns, begin + self.shard_numel)
            if low < high:
                found.append(WeightPiece(index, low - offset, high - offset, low - begin))
        return tuple(found)


class LinearForm(ABC):
    """Weights that linear layers compute with as they were gathered, in bytes of their own: fp8 with scales, say.

    One object serves the weights of one flat buffer (``PrecisionPlugin.form``). A gather fills *lanes*: byte tensors
    that hold what every rank sends, rank by rank. The engine gives them memory and takes it away, gathers them beside
    other units in one communication, and copies nothing behind it. ``bind`` makes the tensors that layers compute with:
    views of lanes, made once. Masters, gradients, optimizers and checkpoints stay as they are.

    ``product`` and the gradients run in forward and backward, also while ``torch.compile`` traces them, and once for
    each layer: keep to tensor operations there. Where one of them is called, tensors are what ``bind`` made for that
    layer.
    """

    @property
    @abstractmethod
    def lanes(self) -> Sequence[int]:
        """Bytes that each rank sends in each lane, above 0 and the same on every rank.

        Ranks' parts lie one behind the other. Large ones travel fastest in multiples of 256.
        """

    @abstractmethod
    def encode(self, shard: torch.Tensor, lanes: Sequence[torch.Tensor], rank: int) -> None:
        """Write ``shard`` (``[shard_numel]``, master dtype), which ``rank`` has, into its part of each lane.

        ``lanes``: each ``[nbytes]``, uint8. Called before the gather, on its stream.
        """

    @abstractmethod
    def bind(self, lanes: Sequence[torch.Tensor]) -> Sequence[Sequence[torch.Tensor]]:
        """The tensors that each layer computes with, one sequence a weight.

        ``lanes``: each ``[shards, nbytes]``, uint8, without values yet. Return views of them, which each gather fills,
        or tensors of your own, which ``arrived`` fills. Called once, before the first gather.
        """

    def arrived(self) -> None:
        """Called behind each gather, on the stream that waits for it: to fill in place what is no view of a lane."""
        return None

    @abstractmethod
    def product(self, input: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """``input @ weight.t()``: ``[n, in]`` to ``[n, out]``, both in the compute dtype."""

    @abstractmethod
    def input_gradient(self, gradient: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """``gradient @ weight``: ``[n, out]`` to ``[n, in]``, both in the compute dtype."""

    def weight_gradient(self, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor | None:
        """``gradient.t() @ input``, ``[out, in]`` in the compute dtype.

        None: the engine multiplies in the compute dtype, and writes the result where the reduction reads it.
        """
        return None


@dataclass(frozen=True, slots=True)
class PrecisionCapabilities:
    """The features of a precision plugin beyond dtypes."""

    loss_scaling: bool = False
    """Gradients can underflow in its dtypes: an optimizer that steps without a gradient scaler is warned of."""
    encodes: bool = False
    """``encoding`` returns a ``GatherEncoding`` for some units."""


class PrecisionPlugin(ABC):
    """Chooses dtypes and casts.

    A plugin is a callable ``(context: PluginContext, **options) -> PrecisionPlugin``. ``dtypes`` to ``encoding`` are
    called at wrap, and must answer alike each time and on every rank. Casts and codecs run in steps.

    Two ways to send fewer bytes: ``encoding``, ``encode`` and ``decode`` for a unit that computes in a plain dtype, and
    ``forms`` and ``form`` for linear layers that compute with the bytes themselves.
    """

    api_version: ClassVar[int]
    """The version of this contract that a plugin was written for. Each class states its own; none is inherited."""
    capabilities: PrecisionCapabilities = PrecisionCapabilities()

    @abstractmethod
    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        """The dtypes of ``unit``."""

    def leaves_alone(self, module: torch.nn.Module) -> bool:
        """Whether ``module``, which no policy chose, is a unit of its own, and no more.

        ``dtypes`` and the casts answer for it by ``unit.module_class``, as for any other unit.
        """
        return False

    def keeps_dtype(self, unit: UnitSpec, name: str) -> bool:
        """Whether the parameter ``name``, in the model, computes in its own dtype, beside others that do not.

        Those of a module are a unit of their own, whose ``keeps_dtype`` says so. ``unit`` has no sizes yet.
        """
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

    def encoding(self, unit: UnitSpec) -> GatherEncoding | None:
        """The unit's bytes in a gather. None: compute dtype, one cast from the master into the own slice."""
        return None

    def forms(self, unit: UnitSpec, linear: torch.nn.Linear, name: str) -> bool:
        """Whether ``linear``, ``name`` in the model, computes with bytes that ``form`` describes.

        Asked at wrap of every plain ``nn.Linear`` whose floating-point weight is its own alone. Such weights are units
        of their own, beside what else the module of ``unit`` owns. ``unit`` has no sizes yet.
        """
        return False

    def form(self, weights: FormedWeights) -> LinearForm:
        """How ``weights``, for which ``forms`` answered True, travel and compute: an object for them alone.

        Raises:
            ConfigError: they cannot, as they are cut; the message says which layout cuts them otherwise.
        """
        raise NotImplementedError(f"{type(self).__name__} answered forms() with True and must implement form()")

    def prepare(self, units: Sequence[UnitSpec], collectives: Collectives) -> None:
        """Called at the start of each outermost forward, on every rank, where ``capabilities.encodes``."""
        return None

    def encode(self, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
        """Write ``shard`` (``[shard_numel]``, master dtype) as bytes into ``message`` (``[nbytes_per_rank]``, uint8).

        Called before the gather, on its stream.
        """
        raise NotImplementedError(
            f"{type(self).__name__} answered encoding() with a GatherEncoding and must implement encode()"
        )

    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        """Read every rank's bytes (``[world_size, nbytes_per_rank]``) into ``out`` (``[world_size, shard_numel]``).

        Called behind the gather, on the stream that waits for it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} answered encoding() with a GatherEncoding and must implement decode()"
        )

    def encode_many(
        self, units: Sequence[UnitSpec], messages: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> None:
        """``encode`` for each unit in turn: the units of one communication, in the same order on every rank.

        Override it where one launch of many takes less time than many launches.
        """
        for unit, message, shard in zip(units, messages, shards, strict=True):
            self.encode(unit, message, shard)

    def decode_many(
        self, units: Sequence[UnitSpec], messages: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """``decode`` for each unit in turn, as ``encode_many``."""
        for unit, message, out in zip(units, messages, outs, strict=True):
            self.decode(unit, message, out)

    def state_dict(self) -> Mapping[str, Any]:
        """State for checkpoints, such as amax histories."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        return None
