"""Parts of tensors over the ranks of tensor parallelism: what of a tensor is whole there, and the way to one rank.

[Note: parts across a mesh]
The ranks that share a unit's shards have pieces of one part of a tensor. The other parts are with other such groups.
One rank of each group puts its part together; these ranks are a group of the mesh, and the parts cross over between
them to the one that computes with the tensor. So nothing is computed twice, and an element crosses there and back; an
``all_gather`` would bring all tensors to all of these ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed as dist

from .. import _torch_private
from ..errors import CollectiveError, UnsupportedError
from ..inspect import TensorPart
from ..io.boxes import Box, box_within
from ..planning.layout import contiguous_stride

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Across:
    """Ranks that have different parts of the same tensors, and stand at one place of the groups that share shards."""

    group: Any
    """Their process group."""
    size: int
    rank: int

    @classmethod
    def along(cls, mesh: DeviceMesh, axis: int) -> Across:
        """Those along the dimension ``axis`` of ``mesh``."""
        return cls(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis))

    def exchange(
        self, out: torch.Tensor, out_splits: Sequence[int], source: torch.Tensor, in_splits: Sequence[int]
    ) -> None:
        """``Collectives.all_to_all``, whose results are there for what is computed next."""
        # Every backend carries bytes.
        itemsize = source.element_size()
        try:
            dist.all_to_all_single(
                out.view(torch.uint8),
                source.view(torch.uint8),
                [each * itemsize for each in out_splits],
                [each * itemsize for each in in_splits],
                group=self.group,
            )
        except RuntimeError as error:
            raise CollectiveError(
                f"all_to_all of parts of tensors over the mesh of tensor parallelism failed (rank {self.rank} of "
                f"{self.size} there): {error}"
            ) from error

    def all_gather_object(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone


@dataclass(frozen=True, slots=True)
class Part:
    """What the ranks that share shards hold of a tensor that others hold parts of as well."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In which order its elements lie."""
    boxes: tuple[Box, ...]
    """Where the parts of all ``Across`` lie in the whole."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Crossing:
    """The way of one round's parts to whoever computes with their wholes, and back.

    ``batches``: for each of the ranks ``across``, this rank's parts of the tensors that it computes with. ``shape``: of
    each tensor that this rank computes with.
    """

    def __init__(self, across: Across, batches: Sequence[Sequence[Part]], shape: tuple[int, ...]) -> None:
        self._across = across
        self._shape = shape
        own = batches[across.rank]
        self._count = len(own)
        self._leaving = [sum(part.numel for part in batch) for batch in batches]
        #: The boxes of what arrives, in its order, and of which tensor.
        self._boxes = [(row, part.boxes[source]) for source in range(across.size) for row, part in enumerate(own)]
        self._sizes = [box.numel for _, box in self._boxes]
        self._arriving = [sum(part.boxes[source].numel for part in own) for source in range(across.size)]
        parts = [part for batch in batches for part in batch]
        offsets = itertools.accumulate((part.numel for part in parts), initial=0)
        # What crosses over has the order of its indices.
        self._reordered = [
            (offset, part)
            for offset, part in zip(offsets, parts, strict=False)
            if part.stride != contiguous_stride(part.shape)
        ]

    def bring(self, together: torch.Tensor) -> torch.Tensor:
        """The wholes of this rank's tensors, one behind the other, of the parts in ``together``, which may be changed.

        ``together``: this rank's parts, those of each batch behind those before, each in the order of its memory.
        """
        for offset, part in self._reordered:
            flat = together.narrow(0, offset, part.numel)
            flat.copy_(flat.as_strided(part.shape, part.stride).flatten())
        crossed = together.new_empty(sum(self._arriving))
        self._across.exchange(crossed, self._arriving, together, self._leaving)
        wholes = together.new_empty((self._count, *self._shape))
        copy_each(self._places(wholes), self._blocks(crossed))
        return wholes.view(-1)

    def bring_back(self, results: torch.Tensor) -> torch.Tensor:
        """What ``bring`` was given, of the results of this rank's tensors, which lie as those that it returned."""
        crossed = results.new_empty(sum(self._arriving))
        copy_each(self._blocks(crossed), self._places(results.view(self._count, *self._shape)))
        together = results.new_empty(sum(self._leaving))
        self._across.exchange(together, self._leaving, crossed, self._arriving)
        for offset, part in self._reordered:
            flat = together.narrow(0, offset, part.numel)
            flat.as_strided(part.shape, part.stride).copy_(flat.clone().view(part.shape))
        return together

    def _places(self, wholes: torch.Tensor) -> list[torch.Tensor]:
        return [box_within(wholes[row], Box.whole(self._shape), box) for row, box in self._boxes]

    def _blocks(self, crossed: torch.Tensor) -> list[torch.Tensor]:
        blocks = torch.split(crossed, self._sizes)
        return [block.view(box.sizes) for block, (_, box) in zip(blocks, self._boxes, strict=True)]


def copy_each(places: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy ``values`` into ``places``, of which there may be none."""
    if places:
        _torch_private.foreach_copy_(places, values)


def parted(
    part: TensorPart, stacked: bool, where: str, optimizer: str
) -> tuple[tuple[int, ...], Across | None, tuple[Box, ...]]:
    """What has to be whole of a tensor: its shape, the ranks that have parts of it, and where theirs lie in it.

    No ranks, and no boxes, where this rank's ``part`` is whole. ``stacked``: whether the indices of dimension 0 are
    tensors by themselves, which a cut between them leaves whole. ``where`` names the parameter and the rank.

    Raises UnsupportedError: several dimensions of its mesh cut what has to be whole.
    """
    axes = [
        axis
        for axis, placement in enumerate(part.placements)
        if placement.is_shard() and part.mesh.size(axis) > 1 and not (stacked and cast("Any", placement).dim == 0)
    ]
    if len(axes) > 1:
        raise UnsupportedError(
            f"{optimizer} cannot put {where} together: several dimensions of its mesh cut what has to be whole, "
            f"{part.placements} on {part.mesh}. Cut it over one of them, or give it to another optimizer."
        )
    # What the other dimensions of the mesh cut off is not there.
    kept = {cast("Any", each).dim for axis, each in enumerate(part.placements) if each.is_shard() and axis not in axes}
    shape = tuple(part.sizes[dim] if dim in kept else size for dim, size in enumerate(part.shape))
    if not axes:
        return shape, None, ()
    coordinate = part.mesh.get_coordinate()
    assert coordinate is not None
    boxes = []
    for index in range(part.mesh.size(axes[0])):
        offset, sizes = part.box_at([index if axis == axes[0] else each for axis, each in enumerate(coordinate)])
        boxes.append(Box(tuple(0 if dim in kept else each for dim, each in enumerate(offset)), sizes))
    return shape, Across.along(part.mesh, axes[0]), tuple(boxes)
