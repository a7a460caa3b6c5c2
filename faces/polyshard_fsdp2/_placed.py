"""Where the ranks of a mesh hold the rows of a parameter, and its pieces as ``DTensor``."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from polyshard.errors import StateError
from polyshard.extension import Root, Slot, Unit
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Placed:
    """A mesh, and how a parameter lies on it."""

    mesh: DeviceMesh
    """``[shard]``, or ``[replicate, shard]``."""
    placements: tuple[Placement, ...]
    """One for each dimension of ``mesh``."""

    @classmethod
    def on(cls, mesh: DeviceMesh) -> Placed:
        """By rows over the last dimension of ``mesh``, and the same over the first of two."""
        return cls(mesh, (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0)))


#: Of each unit that ``fully_shard`` made. Optimizers are met with their parameters alone, and so is ``state_dict``.
_units: WeakKeyDictionary[Unit, Placed] = WeakKeyDictionary()


def remember(unit: Unit, placed: Placed) -> None:
    """Know how the parameter of ``unit`` lies from now on."""
    _units[unit] = placed


def is_placed(unit: Unit) -> bool:
    """Whether ``fully_shard`` made ``unit``."""
    return unit in _units


def is_whole_now(unit: Unit) -> bool:
    """Whether modules hold whole parameters, inside of ``polyshard.unsharded``."""
    root = unit.step
    assert isinstance(root, Root)
    return root.unsharded


def as_dtensor(unit: Unit, local: torch.Tensor) -> DTensor:
    """The whole of which ``local`` is this rank's piece; nothing is copied.

    ``local``: ``(rows, ...)``, the parameter of ``unit`` or state of an optimizer for it.
    """
    placed, slot = _units[unit], slot_of(unit)
    return DTensor.from_local(
        local.detach(),
        placed.mesh,
        placed.placements,
        run_check=False,
        shape=torch.Size(slot.shape),
        stride=slot.stride,
    )


def hollow_dtensor(placed: Placed, whole: torch.Tensor) -> DTensor:
    """What ``whole``, on the meta device, will be once it is sharded: no values, and its pieces' shapes."""
    last = placed.mesh.ndim - 1
    each = -(-whole.shape[0] // placed.mesh.size(last))
    start = placed.mesh.get_local_rank(last) * each
    local = whole.detach()[min(start, whole.shape[0]) : start + each]
    return DTensor.from_local(
        local, placed.mesh, placed.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def piece_of(unit: Unit, value: torch.Tensor, what: str) -> torch.Tensor:
    """This rank's rows of ``value``, a ``DTensor`` that lies as the parameter of ``unit`` does, or a whole tensor.

    ``what``: names ``value`` in messages.

    Raises:
        StateError: ``value`` has another shape, or lies on other ranks.
    """
    placed, slot = _units[unit], slot_of(unit)
    rank = unit.ranks.world.rank
    if tuple(value.shape) != slot.shape:
        raise StateError(
            f"{what} came in shape {tuple(value.shape)}, and the whole parameter has {slot.shape} (rank {rank}). Give "
            "a DTensor or a tensor of the whole shape."
        )
    if isinstance(value, DTensor):
        if value.device_mesh != placed.mesh or tuple(value.placements) != placed.placements:
            raise StateError(
                f"{what} came as a DTensor with {value.placements} on {value.device_mesh}, and the parameter has "
                f"{placed.placements} on {placed.mesh} (rank {rank}). Redistribute it, or give its full_tensor()."
            )
        return value.to_local()
    start, stop = unit.layout.range_of(0, unit.ranks.shard_rank)
    row = value[0].numel() if slot.numel else 1
    return value[start // row : stop // row]


def slot_of(unit: Unit) -> Slot:
    """The one parameter of ``unit``: shape, strides and place of the whole."""
    (slot,) = unit.layout.slots
    return slot
