"""The contract for where parameters lie in a unit's flat buffer, and so where ranks cut them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

#: Each parameter starts at a multiple of this many bytes, so that kernels may use 16-byte accesses.
PARAMETER_ALIGNMENT_BYTES = 16
#: Slices of at least this many bytes have a multiple of ``SLICE_ALIGNMENT_BYTES`` ...
SLICE_ALIGNMENT_THRESHOLD_BYTES = 64 * 1024
#: ... because NCCL falls off its fast path on misaligned ones (3, 5, 6, 7 ranks). Small slices gain nothing.
SLICE_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class ParameterGeometry:
    """What a layout may know of a parameter."""

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
    """Of the unit, for messages."""
    parameters: tuple[ParameterGeometry, ...]
    """At least one, in the order of the model; all of one dtype, all trained or all frozen."""
    shards: int
    """Number of equal slices that the buffer is cut into, one for each rank that shares the unit."""
    itemsize: int
    """Bytes of an element as it travels."""

    @property
    def alignment(self) -> int:
        """Elements of which every parameter's start is a multiple."""
        return max(1, PARAMETER_ALIGNMENT_BYTES // self.itemsize)

    def slice_alignment(self, shard_numel: int) -> int:
        """Elements of which the size of a slice, if it is about ``shard_numel``, is a multiple."""
        large = shard_numel * self.itemsize >= SLICE_ALIGNMENT_THRESHOLD_BYTES
        return max(1, SLICE_ALIGNMENT_BYTES // self.itemsize) if large else 1

    def aligned_slice(self, shard_numel: int) -> int:
        """The smallest size of a slice that is at least ``shard_numel``."""
        multiple = self.slice_alignment(shard_numel)
        return -(-shard_numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One flat buffer: which parameters lie in it, and where."""

    order: tuple[int, ...]
    """Indices of its parameters in ``UnitGeometry.parameters``, in the order in which they lie."""
    offsets: tuple[int, ...]
    """First element of each, in the order of ``order``: a multiple of ``UnitGeometry.alignment``."""
    shard_numel: int
    """Elements of a slice: slice ``k`` is ``[k * shard_numel, (k + 1) * shard_numel)``. What lies in no parameter is
    padding."""
    by_rows: frozenset[int] = frozenset()
    """Indices of parameters that are cut between rows of dimension 0 only. This rank's piece of one is shown as
    ``(rows, ...)``; of any other as 1-D."""
    exact: bool = False
    """Whether ``shard_numel`` is meant as it is, although ``UnitGeometry.slice_alignment`` does not divide it: for
    layouts that others prescribe. Gathers of large slices may be slower then."""


class Layout(ABC):
    """Decides where each parameter of a unit lies in the flat buffer.

    A plugin is a callable ``(context: PluginContext, **options) -> Layout``.

    A parameter is one contiguous range, in the memory order that its strides give, and slices are equal in size: so a
    gather needs no copy out. What is left to a layout is order, alignment, padding, and whether one buffer serves.
    """

    api_version: ClassVar[int]
    """Which version of this contract a plugin was written for. Each says its own: there is none to inherit."""

    @abstractmethod
    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        """The buffers of ``unit``, nearly always one. Each parameter lies in exactly one of them.

        Several are gathered one after the other and cost a communication each; they pay where parameters that must be
        cut alike would leave much padding in one.

        Arithmetic alone: the same answer on every rank and for each equal ``unit``. Called some times for each unit
        when a model is sharded, with up to thousands of ``shards``, and never in a step.
        """
