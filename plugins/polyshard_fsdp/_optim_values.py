"""Optimizer state as distributed tensors, each rank's rows of every tensor, and whole again."""

from __future__ import annotations

from typing import Any

import torch
from polyshard.errors import StateError
from torch.distributed.tensor import DTensor

from . import _torch_private
from ._collectives import collectives_of
from ._optim_names import Flattened
from ._state_dict_sharded import _as_dtensor, rows_of


def distribute(whole: torch.Tensor, flattened: Flattened, *, offload: bool) -> torch.Tensor:
    """This rank's rows of ``whole``: a ``DTensor`` where the instance has a mesh, else a ``ShardedTensor``.

    Copies, and does not communicate.
    """
    instance = flattened.instance
    rows = rows_of(whole.shape[0], instance.world_size)
    first, count = rows[instance.rank]
    if instance._device_mesh is not None:
        # Made of a tensor in host memory, it would move that to the mesh's device.
        own = whole.narrow(0, first, count).to(flattened.device, copy=True).contiguous()
        made = _as_dtensor(own, instance._device_mesh, whole)
        return made.cpu() if offload else made
    device = torch.device("cpu") if offload else whole.device
    own = whole.narrow(0, first, count).to(device, copy=True).contiguous()
    rest = tuple(whole.shape[1:])
    # An empty tensor has one piece all the same: a sharded tensor cannot have none.
    pieces = [((start, *(0 for _ in rest)), (size, *rest)) for start, size in rows if size] or [
        (tuple(0 for _ in whole.shape), tuple(whole.shape))
    ]
    return _torch_private.make_sharded_tensor(own, tuple(whole.shape), pieces, instance.process_group)


def shape_of(value: Any) -> torch.Size:
    """The shape of a whole tensor, by whatever kind of tensor it is held."""
    # Asked for an attribute, a sharded tensor warns that its class is deprecated.
    return value.metadata().size if _torch_private.is_sharded_tensor(value) else torch.Size(value.shape)


def dtype_of(value: Any) -> torch.dtype:
    """The dtype of a tensor of whatever kind."""
    if _torch_private.is_sharded_tensor(value):
        value = value.metadata().tensor_properties
    found: torch.dtype = value.dtype
    return found


def refuse_other_cut(value: object, flattened: Flattened, name: str) -> None:
    """Refuse a sharded tensor that other ranks hold than those of the instance."""
    if not _torch_private.is_sharded_tensor(value):
        return
    ranks = flattened.instance.world_size
    pieces = [size[0] for size in _torch_private.piece_sizes(value)]
    wanted = [count for _, count in rows_of(shape_of(value)[0], ranks)]
    if [rows for rows in pieces if rows] != [rows for rows in wanted if rows]:
        raise StateError(
            f"Optimizer state of '{name}' is cut into {pieces} rows, and {ranks} ranks need {wanted} (rank "
            f"{flattened.instance.rank}). Load it with the number of ranks that saved it, or through "
            "torch.distributed.checkpoint."
        )


def collect(value: torch.Tensor, flattened: Flattened) -> torch.Tensor:
    """The whole of ``value``, on every rank that has a part of it; a plain tensor is whole already.

    Every rank of the instance's group must call this, in the same order.
    """
    if isinstance(value, DTensor):
        # Offloaded values keep the mesh of the device where they were gathered.
        on_mesh: DTensor = value.to(value.device_mesh.device_type)  # type: ignore[assignment]
        return on_mesh.full_tensor()
    return _collect_rows(value, flattened) if _torch_private.is_sharded_tensor(value) else value


def _collect_rows(value: Any, flattened: Flattened) -> torch.Tensor:
    instance, shape = flattened.instance, shape_of(value)
    most = rows_of(shape[0], instance.world_size)[0][1]
    with torch.inference_mode(False):
        gathered = torch.empty((most * instance.world_size, *shape[1:]), dtype=dtype_of(value), device=flattened.device)
    mine = gathered.narrow(0, instance.rank * most, most)
    for rows in _torch_private.shards_of(value):
        mine.narrow(0, 0, rows.shape[0]).copy_(rows)
    # All ranks but the last have as many rows as there is room for, so that no gap lies between them.
    collectives = collectives_of(instance.process_group, flattened.device)
    collectives.all_gather(gathered.view(-1), mine.view(-1)).wait()
    return gathered.narrow(0, 0, shape[0])
