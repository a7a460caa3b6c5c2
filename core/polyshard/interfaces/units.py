"""Units as plugins see them, and the contracts of wrap policies and layouts, which choose and arrange them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..errors import warn_once


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit as plugins see it: parameters that are gathered together, in one flat buffer."""

    name: str
    """Unique in the model: the fully-qualified name of the unit's module in the root (empty for the root), then
    ``suffix``. It changes where a sharded model becomes part of a larger one: key state of a unit's life by the unit's
    master, not by its name."""
    module_class: type[torch.nn.Module]
    """Class of the unit's module; for a module that was split off the root, the root's class."""
    parameter_names: tuple[str, ...]
    """Fully-qualified names of its parameters, in layout order."""
    numel: int
    """Elements of the whole unit, padding included."""
    shard_numel: int
    """Elements of one rank's shard."""
    master_dtype: torch.dtype
    """Dtype of the parameters as the user made them, which the optimizer updates."""
    device: torch.device
    """Device on which the unit computes."""
    is_root: bool
    """Whether the unit's module is the outermost one, or was split off it."""
    suffix: str = ""
    """End of ``name`` that tells the second and later units of one module apart: ``"[float64]"``, ``"[float32,
    frozen]"``. Empty for the first."""
    trained: bool = True
    """Whether its parameters had ``requires_grad`` when the model was sharded: all of them, or none."""
    keeps_dtype: bool = False
    """Whether its caster said so of its parameters."""
    ranks: str = ""
    """The dimensions of the mesh over which it is cut, and over which it is replicated: ``"dp"``,
    ``"edp and dp_replicate"``. Empty where the configuration names none."""

    @property
    def module_name(self) -> str:
        """``name`` without ``suffix``, which several units may share: for settings by name."""
        return self.name.removesuffix(self.suffix)

    @property
    def label(self) -> str:
        """``name`` for messages, with ``(root)`` for the outermost module."""
        return f"{self.module_name or '(root)'}{self.suffix}"


#: For each chosen module, settings that differ from the model's: keys of ``UNIT_OVERRIDES``.
UnitPlan = Mapping[torch.nn.Module, Mapping[str, Any]]

#: The settings that a policy may override for one unit.
UNIT_OVERRIDES: tuple[str, ...] = (
    "precision",
    "offload",
    "layout",
    "reshard_after_forward",
    "mesh",
    "gradient_divisor",
)


def _warn(text: str) -> bool:
    return warn_once(text, rank=0)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Facts for a policy beside the model."""

    ignored_modules: Collection[torch.nn.Module] = field(default_factory=frozenset)
    """Modules that are not sharded, with all inside of them."""
    ignored_parameters: Collection[torch.nn.Parameter] = field(default_factory=frozenset)
    """Parameters that are not sharded; they do not count towards sizes."""
    shards: int = 1
    """Number of ranks that share each unit: each holds one shard of it between uses."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device on which the model computes."""
    warn: Callable[[str], bool] = _warn
    """Warns users on one of the ranks, of each text once a process; returns whether this is that rank."""


class WrapPolicy(ABC):
    """Chooses units.

    A plugin is a callable ``(context: PluginContext, **options) -> WrapPolicy``.
    """

    api_version: ClassVar[int]
    """The version of this contract that a plugin was written for. Each class states its own; none is inherited."""

    def reason(self, module: torch.nn.Module, name: str) -> str:
        """The rule by which ``plan`` chose ``module``, ``name`` in the root; for people, and empty where unknown.

        Called by ``polyshard explain``, after ``plan``, for modules that it chose.
        """
        return ""

    @abstractmethod
    def plan(self, root: torch.nn.Module, context: PolicyContext) -> UnitPlan:
        """The modules inside ``root`` that become units, each with its overrides (an empty mapping for none).

        ``root`` becomes a unit in any case; modules without parameters are skipped. Called at wrap. Must not change the
        model, and must answer alike on every rank.
        """


#: Each parameter starts at a multiple of this many bytes, so that kernels may use 16-byte accesses.
PARAMETER_ALIGNMENT_BYTES = 16
#: Slices of at least this many bytes have a multiple of ``SLICE_ALIGNMENT_BYTES`` ...
SLICE_ALIGNMENT_THRESHOLD_BYTES = 64 * 1024
#: ... because NCCL falls off its fast path on misaligned ones (3, 5, 6, 7 ranks). Small slices gain nothing.
SLICE_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class ParameterGeometry:
    """A parameter as layouts see it."""

    name: str
    """Its first fully-qualified name."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    stride: tuple[int, ...]
    """Strides of the whole parameter in the flat buffer: a permutation of contiguous ones, without gaps."""
    dtype: torch.dtype
    """As the user made it."""
    trained: bool
    """Whether it required a gradient when the model was sharded."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int | None:
        """Elements of one index of dimension 0; None without dimensions, or where these do not lie together."""
        row = math.prod(self.shape[1:])
        if not self.shape or (self.shape[0] > 1 and row and self.stride[0] != row):
            return None
        return row


@dataclass(frozen=True, slots=True)
class UnitGeometry:
    """Parameters that are to be gathered together."""

    name: str
    """The unit's name, for messages."""
    parameters: tuple[ParameterGeometry, ...]
    """At least one, in the order of the model; all of one dtype, all trained or all frozen."""
    shards: int
    """Number of equal slices that the buffer is cut into, one for each rank that shares the unit."""
    itemsize: int
    """Bytes of an element as it travels."""

    @property
    def alignment(self) -> int:
        """Elements: every parameter starts at a multiple."""
        return max(1, PARAMETER_ALIGNMENT_BYTES // self.itemsize)

    def slice_alignment(self, shard_numel: int) -> int:
        """Elements: a slice of about ``shard_numel`` has a multiple."""
        large = shard_numel * self.itemsize >= SLICE_ALIGNMENT_THRESHOLD_BYTES
        return max(1, SLICE_ALIGNMENT_BYTES // self.itemsize) if large else 1

    def aligned_slice(self, shard_numel: int) -> int:
        """The smallest size of a slice that is at least ``shard_numel``."""
        multiple = self.slice_alignment(shard_numel)
        return -(-shard_numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A segment of a unit's flat buffer, nearly always all of it: which parameters lie in it, and where."""

    order: tuple[int, ...]
    """Indices of its parameters in ``UnitGeometry.parameters``, in the order in which they lie."""
    offsets: tuple[int, ...]
    """First element of each in the segment, in the order of ``order``: a multiple of ``UnitGeometry.alignment``."""
    shard_numel: int
    """Elements of a slice: slice ``k`` is ``[k * shard_numel, (k + 1) * shard_numel)``. The rest is padding."""
    by_rows: frozenset[int] = frozenset()
    """Indices of parameters that are cut between rows of dimension 0 only. This rank's piece of one is shown as
    ``(rows, ...)``; of any other as 1-D."""
    exact: bool = False
    """Whether ``shard_numel`` is prescribed, and need be no multiple of ``UnitGeometry.slice_alignment``. Gathers of
    large slices may then be slower."""
    dim: int = 0
    """The dimension along which its one parameter is cut, which the ranks must divide evenly: slices have ``numel /
    shards`` elements then. Above 0 this rank's piece is shown with all dimensions, ``[.., n / shards, ..]``, and a
    gather and a reduction copy the parameter once more."""


class Layout(ABC):
    """Decides where each parameter of a unit lies in the flat buffer.

    A plugin is a callable ``(context: PluginContext, **options) -> Layout``.

    A parameter is one contiguous range, in the memory order of its strides, and slices are equal in size, so that a
    gather needs no copy out. A layout chooses order, alignment, padding, and the number of segments.
    """

    api_version: ClassVar[int]
    """The version of this contract that a plugin was written for. Each class states its own; none is inherited."""

    @abstractmethod
    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        """The segments of ``unit``, nearly always one. Each parameter lies in exactly one of them.

        Each is cut into slices by itself, and one launch gathers, or reduces, all of them. Each of several costs an
        operation there; they pay where parameters that must be cut alike would leave much padding in one. Arithmetic
        alone: the same answer on every rank and for each equal ``unit``. Called a few times for each unit at wrap, with
        up to thousands of ``shards``, and never in a step.
        """
