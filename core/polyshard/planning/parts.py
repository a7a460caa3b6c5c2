"""Parameters that are parts of larger tensors, by tensor or expert parallelism: ``DTensor`` in, and out for compute.

A unit holds the local tensors, flat, like any other parameters. Modules compute with ``DTensor`` leaves over the
gathered local tensors, so that operations find the mesh and the placements that ``parallelize_module`` gave them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from .. import _torch_private
from ..errors import ParameterError
from .layout import contiguous_stride, product

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

#: The second is its name up to 2.12.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_dtensor(value: object) -> bool:
    # Importing them takes long, and without the import there are none.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


class LeafForm(ABC):
    """What modules compute with in the place of a gathered parameter's view, where that is no plain tensor."""

    __slots__ = ()

    @abstractmethod
    def as_leaf(self, local: torch.Tensor) -> torch.Tensor:
        """A leaf over the memory of ``local``, to compute with."""

    @abstractmethod
    def own(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's elements of ``value``, a gradient of that leaf. Ranks may meet in it, in one order on all."""


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """What a drop-in says of one parameter that its module and its class do not."""

    mesh: DeviceMesh | None = None
    """Over which its unit is cut: of one dimension, or (replicate, shard). None for the model's own."""
    part: TensorPart | None = None
    leaf: LeafForm | None = None
    """What computes, where that is another form than that of ``part``; the parameter's class says both where None."""
    dim: int = 0
    """Along which its unit cuts it, evenly where that is not 0."""


@dataclass(frozen=True, eq=False, slots=True)
class TensorPart(LeafForm):
    """The part of a whole tensor that one parameter of this rank is, as its ``DTensor`` said."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """One for each dimension of ``mesh``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    stride: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """First index of the part within the whole, in each dimension."""
    sizes: tuple[int, ...]
    """Shape of the part."""

    @classmethod
    def of(cls, parameter: torch.Tensor, name: str, rank: int) -> TensorPart | None:
        """The part that ``parameter`` is; None for a parameter that is no ``DTensor``.

        Raises ParameterError: it is placed in a way that a unit cannot hold: partial, or in uneven strides.
        """
        if not is_dtensor(parameter):
            return None
        placed = cast("DTensor", parameter)
        mesh, shape = placed.device_mesh, tuple(placed.shape)
        for placement in placed.placements:
            if not (placement.is_replicate() or (placement.is_shard() and type(placement).__name__ == "Shard")):
                raise ParameterError(
                    f"The parameter '{name}' is a DTensor with the placement {placement} (rank {rank}), which a unit "
                    "cannot hold. Use Shard(dim) or Replicate(), or pass it in ignored_parameters."
                )
        coordinate = mesh.get_coordinate()
        offset, sizes = (0,) * len(shape), (0,) * len(shape)
        if coordinate is not None:
            offset, sizes = _box(shape, _sizes(mesh), coordinate, placed.placements)
        local = local_of(placed)
        if tuple(local.shape) != sizes:
            raise ParameterError(
                f"The DTensor '{name}' of shape {shape} has a local tensor of shape {tuple(local.shape)} where "
                f"{placed.placements} on {mesh} cut {sizes} (rank {rank}). Make it with distribute_tensor."
            )
        return cls(mesh, tuple(placed.placements), shape, tuple(placed.stride()), offset, sizes)

    def _cuts(self) -> list[tuple[int, int, int]]:
        """Of each dimension of ``mesh`` that cuts it: which, how many ranks it has, and the dimension that it cuts."""
        sizes = zip(_sizes(self.mesh), self.placements, strict=True)
        return [(place, size, cast("Any", each).dim) for place, (size, each) in enumerate(sizes) if each.is_shard()]

    @property
    def cuts(self) -> list[int]:
        """The dimensions of ``mesh`` that cut it, but for those of one rank."""
        return [place for place, size, _ in self._cuts() if size > 1]

    @property
    def copies(self) -> int:
        """How many ranks of ``mesh`` have this part."""
        return product(_sizes(self.mesh)) // self.number

    @property
    def number(self) -> int:
        """How many different parts the ranks of ``mesh`` have."""
        return product([size for _, size, _ in self._cuts()])

    @property
    def is_even(self) -> bool:
        """Whether all ranks of ``mesh`` have parts of one shape."""
        parts: dict[int, int] = {}
        for _, size, dim in self._cuts():
            parts[dim] = parts.get(dim, 1) * size
        return all(self.shape[dim] % number == 0 for dim, number in parts.items())

    @property
    def largest_numel(self) -> int:
        """Elements of the largest part of any rank: the same number on all of them."""
        largest = list(self.shape)
        for _, size, dim in self._cuts():
            largest[dim] = -(-largest[dim] // size)
        return product(largest)

    def box_at(self, coordinate: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and sizes of the part of the rank at ``coordinate`` of ``mesh``."""
        return _box(self.shape, _sizes(self.mesh), coordinate, self.placements)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``whole``, as a view."""
        for dim, (start, size) in enumerate(zip(self.offset, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole

    @override
    def as_leaf(self, local: torch.Tensor) -> torch.Tensor:
        """A ``DTensor`` over the memory of ``local`` (``sizes``)."""
        return dtensor_leaf(local, self.mesh, self.placements, self.shape, self.stride)

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which ranks have ``local`` (``sizes``) each. Every rank of ``mesh`` calls it."""
        placed = cast("DTensor", self.as_leaf(local))
        found: torch.Tensor = placed.full_tensor()
        return found

    @torch.no_grad()
    @override
    def own(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``value``, a ``DTensor``: its local tensor, once it is placed as the parameter is.

        Where it is placed otherwise (gradients may be partial sums), every rank of ``mesh`` calls this, in one order.
        """
        placed = cast("DTensor", value)
        if placed.placements != self.placements:
            placed = placed.redistribute(self.mesh, self.placements)
        return local_of(placed)


def dtensor_leaf(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A ``DTensor`` leaf of ``shape`` over the memory of ``local``, trained where that is."""
    from torch.distributed.tensor import DTensor

    with torch.inference_mode(False), torch.no_grad():
        placed = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )
        # As the views of plain parameters are.
        return nn.Parameter(placed, requires_grad=local.requires_grad)


@torch.no_grad()
def whole_tensors(parts: Sequence[TensorPart], locals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The whole tensors of which ranks have ``locals`` each, all of one dtype. Every rank of their meshes calls it."""
    alike: dict[tuple[DeviceMesh, int], list[int]] = {}
    found: dict[int, torch.Tensor] = {}
    for index, part in enumerate(parts):
        cuts = part.cuts
        if len(cuts) == 1 and part.is_even:
            alike.setdefault((part.mesh, cuts[0]), []).append(index)
        else:
            found[index] = part.whole(locals[index])
    for (mesh, place), members in alike.items():
        own = torch.cat([locals[index].reshape(-1) for index in members])
        rows = own.new_empty(_sizes(mesh)[place], own.numel())
        # As bytes, which every backend takes.
        _all_gather(rows.view(-1).view(torch.uint8), own.view(torch.uint8), group=mesh.get_group(place))
        start = 0
        for index in members:
            part = parts[index]
            dim = cast("Any", part.placements[place]).dim
            numel = product(part.sizes)
            pieces = rows.narrow(1, start, numel).reshape(len(rows), *part.sizes)
            found[index] = pieces.movedim(0, dim).reshape(part.shape)
            start += numel
    return [found[index] for index in range(len(parts))]


def local_of(placed: torch.Tensor) -> torch.Tensor:
    """The local tensor of ``placed``, a ``DTensor``, behind the collective that makes it."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with torch.no_grad():
        local = cast("DTensor", placed).to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def placed_as(like: torch.Tensor, local: torch.Tensor, shape: Sequence[int] | None = None) -> DTensor:
    """A ``DTensor`` over ``local``, of the shape and with the placements of ``like``, which is one.

    Of its own shape, where that is not of this rank's part of ``like``, and ranks have all of it; of ``shape``, where
    that is given.
    """
    from torch.distributed.tensor import DTensor

    placed = cast("DTensor", like)
    stride = placed.stride()
    if shape is not None:
        stride = contiguous_stride(tuple(shape))
    elif local.shape != local_of(placed).shape:
        shape, stride = local.shape, local.stride()
    size = placed.shape if shape is None else torch.Size(shape)
    return DTensor.from_local(local, placed.device_mesh, placed.placements, run_check=False, shape=size, stride=stride)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's elements of the gradient of ``parameter``, whether or not that is a ``DTensor``."""
    gradient = parameter.grad
    return local_of(gradient) if gradient is not None and is_dtensor(gradient) else gradient


def plain_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of this rank's part of ``parameter``, ``DTensor`` or not, with the user's attributes of it."""
    local = local_of(parameter) if is_dtensor(parameter) else parameter
    plain = nn.Parameter(local.detach(), requires_grad=parameter.requires_grad)
    plain.__dict__.update({key: value for key, value in vars(parameter).items() if not key.startswith("_")})
    for hook in _torch_private.post_accumulate_grad_hooks(parameter):
        plain.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return plain


def _sizes(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.shape)


def _box(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and sizes of the part at ``coordinate``: each dimension of the mesh cuts what those before it left."""
    offset, sizes = [0] * len(shape), list(shape)
    for number, index, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_shard():
            dim = cast("Any", placement).dim
            # As torch.chunk does.
            chunk = -(-sizes[dim] // number)
            start = min(index * chunk, sizes[dim])
            offset[dim] += start
            sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offset), tuple(sizes)
