"""Tensors that are cut along their first dimension, as in state dicts: each rank's rows, and whole again."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from polyshard.errors import StateError, UnsupportedError
from polyshard.extension import TensorPart, contiguous_stride, is_dtensor, local_of, product, rows_of
from torch.distributed.device_mesh import DeviceMesh

from . import _torch_private
from ._state import FSDPInstance


def own_rows(whole: torch.Tensor, instance: FSDPInstance, mesh: DeviceMesh | None, *, offload: bool) -> torch.Tensor:
    """This rank's rows of ``whole``, as a copy: a ``DTensor`` on ``mesh``, or without one a ``ShardedTensor``.

    ``offload``: in host memory, else where the instance computes. Does not communicate.
    """
    rows = [rows_of(whole.shape[0], rank, instance.world_size) for rank in range(instance.world_size)]
    start, stop = rows[instance.rank]
    own = whole.narrow(0, start, stop - start)
    if mesh is not None:
        # Made of a tensor in host memory, it would move that to the mesh's device.
        made = _as_dtensor(own.to(instance.compute_device, copy=True).contiguous(), mesh, whole)
        return made.cpu() if offload else made
    own = own.to("cpu" if offload else instance.compute_device, copy=True).contiguous()
    rest = tuple(whole.shape[1:])
    # An empty tensor has one piece all the same: a sharded tensor cannot have none.
    pieces = [((start, *(0 for _ in rest)), (stop - start, *rest)) for start, stop in rows if stop > start] or [
        (tuple(0 for _ in whole.shape), tuple(whole.shape))
    ]
    return _torch_private.make_sharded_tensor(own, tuple(whole.shape), pieces, instance.process_group)


@dataclass(frozen=True, slots=True)
class PartPlacement:
    """Where state dicts place the parameter that ``part`` is a part of: on the mesh of all ranks that hold it."""

    part: TensorPart
    mesh: DeviceMesh
    gathered: tuple[Any, ...]
    """Placements while each rank has its whole part."""
    cut: tuple[Any, ...]
    """Placements once the ranks of one instance have its rows."""

    @classmethod
    def of(cls, part: TensorPart, instance: FSDPInstance, name: str) -> PartPlacement:
        """The placement on the mesh that both parallelisms were cut out of.

        Raises:
            UnsupportedError: the instance was given none, or another.
        """
        from torch.distributed.tensor import Replicate, Shard

        own, inner = instance._device_mesh, part.mesh
        root = None if own is None else _torch_private.root_mesh(own)
        names = () if root is None else root.mesh_dim_names or ()
        along = dict(zip(inner.mesh_dim_names or (), part.placements, strict=False))
        sharded = () if own is None else own.mesh_dim_names or ()
        if root is None or root != _torch_private.root_mesh(inner) or not {*along, *sharded} <= set(names) or not along:
            raise UnsupportedError(
                f"'{name}' is a DTensor on {inner}, and its instance is sharded over {own} (rank {instance.rank}): a "
                "distributed state dict needs one mesh for both. Cut both out of one mesh with named dimensions: "
                "parallelize_module(model, mesh['tp'], ...), then FSDP(model, device_mesh=mesh['dp'])."
            )
        gathered = tuple(along.get(each, Replicate()) for each in names)
        cut = tuple(Shard(0) if each == sharded[-1] else along.get(each, Replicate()) for each in names)
        return cls(part, root, gathered, cut)

    def own_rows(self, local: torch.Tensor, *, offload: bool) -> torch.Tensor:
        """This rank's rows of the parameter, as a copy, of which ``local`` is this rank's part. Communicates where the
        part is rows of it, too.
        """
        from torch.distributed.tensor import DTensor

        part = self.part
        shape, stride = torch.Size(part.shape), contiguous_stride(part.shape)
        placed = DTensor.from_local(
            local.contiguous(), self.mesh, self.gathered, run_check=False, shape=shape, stride=stride
        )
        made = placed.redistribute(self.mesh, self.cut).clone()
        return made.cpu() if offload else made

    def own_part(self, value: Any, dtype: torch.dtype) -> torch.Tensor:
        """The part, as tensor parallelism alone would have it, of which all ranks have their rows in ``value``."""
        on_mesh = value.to(self.mesh.device_type).redistribute(self.mesh, self.gathered)
        return self.part.as_leaf(local_of(on_mesh).to(dtype))

    def holds(self, value: object) -> bool:
        """Whether ``value`` is a ``DTensor`` that ``own_part`` can take."""
        return is_dtensor(value) and cast("Any", value).device_mesh == self.mesh


class PartExtension:
    """What torch's functions cut whole values of an instance's parameters by, and parts by tensor parallelism."""

    def __init__(self, instance: FSDPInstance) -> None:
        self._instance = instance

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, mesh: DeviceMesh) -> torch.Tensor:
        """This rank's rows of ``tensor``."""
        part = TensorPart.of(tensor, "optimizer state", rank)
        if part is None:
            return own_rows(tensor, self._instance, mesh, offload=False)
        return PartPlacement.of(part, self._instance, "optimizer state").own_rows(local_of(tensor), offload=False)


def _as_dtensor(own: torch.Tensor, mesh: DeviceMesh, whole: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    stride = contiguous_stride(whole.shape)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def gathered(value: Any, instance: FSDPInstance) -> torch.Tensor:
    """The whole tensor of which each rank has its rows in ``value``. All ranks call it together, in one order."""
    shape = shape_of(value)
    if not product(shape):
        return torch.empty(shape, device=instance.compute_device)
    with warnings.catch_warnings():
        # The class of ``value`` is going away, which its owner was told of.
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        return _torch_private.gather({"": value}, pg=instance.process_group, device=instance.compute_device)[""]


def shape_of(value: Any) -> torch.Size:
    """The shape of a whole tensor, by whatever kind of tensor it is held."""
    return _torch_private.shape_of(value) if _torch_private.is_sharded_tensor(value) else torch.Size(value.shape)


def refuse_other_cut(value: Any, ranks: int, where: str, rank: int) -> None:
    """Refuse a ``ShardedTensor`` that is not cut as ``ranks`` ranks cut it; other values pass.

    Raises ``StateError`` (a ``RuntimeError``).
    """
    if not _torch_private.is_sharded_tensor(value):
        return
    pieces = [size[0] for size in _torch_private.piece_sizes(value)]
    bounds = (rows_of(shape_of(value)[0], each, ranks) for each in range(ranks))
    wanted = [stop - start for start, stop in bounds]
    if [rows for rows in pieces if rows] != [rows for rows in wanted if rows]:
        raise StateError(
            f"{where} is cut into {pieces} rows, and {ranks} ranks need {wanted} (rank {rank}). Load it with the "
            "number of ranks that saved it, or through torch.distributed.checkpoint."
        )


def is_cut_along_rows(value: object, ranks: int) -> bool:
    """Whether ``value`` is a ``DTensor`` whose rows lie on ``ranks`` ranks."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(value, DTensor):
        return False
    *outer, last = value.placements
    return last == Shard(0) and all(each.is_replicate() for each in outer) and value.device_mesh.size(-1) == ranks
