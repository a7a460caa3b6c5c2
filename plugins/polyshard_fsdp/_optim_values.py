"""Optimizer state as distributed tensors, each rank's rows of every tensor, and whole again."""

from __future__ import annotations

from typing import Any

import torch
from polyshard.errors import StateError
from torch.distributed.tensor import DTensor

from . import _torch_private
from ._collectives import collectives_of
from ._optim_names import Flattened
from ._rows import cut_otherwise, gather_rows, own_rows


def distribute(whole: torch.Tensor, flattened: Flattened, *, offload: bool) -> torch.Tensor:
    """This rank's rows of ``whole``: a ``DTensor`` where the instance has a mesh, else a ``ShardedTensor``.

    Copies, and does not communicate.
    """
    instance = flattened.instance
    return own_rows(whole, instance, instance._device_mesh, offload=offload)


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
    otherwise = cut_otherwise(value, flattened.instance.world_size)
    if otherwise is not None:
        raise StateError(
            f"Optimizer state of '{name}' {otherwise} (rank {flattened.instance.rank}). Load it with the number of "
            "ranks that saved it, or through torch.distributed.checkpoint."
        )


def collect(value: torch.Tensor, flattened: Flattened) -> torch.Tensor:
    """The whole of ``value``, on every rank that has a part of it; a plain tensor is whole already.

    Every rank of the instance's group must call this, in the same order.
    """
    if isinstance(value, DTensor):
        # Offloaded values keep the mesh of the device where they were gathered.
        on_mesh: DTensor = value.to(value.device_mesh.device_type)  # type: ignore[assignment]
        return on_mesh.full_tensor()
    if not _torch_private.is_sharded_tensor(value):
        return value
    collectives = collectives_of(flattened.instance.process_group, flattened.device)
    return gather_rows([value], collectives, dtype_of(value), flattened.device)[0]
