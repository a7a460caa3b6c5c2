"""Initial values: checksums with which ranks compare them, and the broadcast of rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..interfaces import Collectives
from .extensions import inner_tensors
from .groups import PlannedRanks
from .layout import dense_stride
from .plan import ManagedParameter
from .units import PlannedModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

#: Marks what ``values_to_compare`` reports.
VALUES = "values"
#: Characters of a scope that are shown.
_LONG = 200


def values_to_compare(modules: Iterable[PlannedModule], *, compare: bool) -> dict[str, list[list[Any]]]:
    """Reports of all parameters, in JSON: name, strides, and a checksum where ``compare``.

    By what the ranks have in common that must report the same (see ``scope_of``). Reads every parameter once, where it
    is, and waits once for each device. Parameters on the meta device have no values; they are reported as such.
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places = []
    for module in modules:
        for unit, parameter in module.placed_parameters:
            original, scope = parameter.original, scope_of(unit.ranks, parameter)
            if not compare or original.is_meta:
                places.append((scope, parameter, -1))
                continue
            of_device = sums.setdefault(original.device, [])
            places.append((scope, parameter, len(of_device)))
            of_device.append(checksum(original))
            if parameter.packed is not None:
                beside = [checksum(each).to(original.device) for each in parameter.packed.tensors if not each.is_meta]
                of_device[-1] = torch.stack([of_device[-1], *beside]).sum()
    found: dict[torch.device, list[int]] = {device: torch.stack(each).tolist() for device, each in sums.items()}
    reports: dict[str, list[list[Any]]] = {}
    for scope, parameter, index in places:
        original = parameter.original
        value = found[original.device][index] if index >= 0 else original.device.type
        strides = list(dense_stride(original.shape, original.stride()))
        reports.setdefault(scope, []).append([VALUES, parameter.names[0], strides, value if compare else None])
    return reports


def scope_of(ranks: PlannedRanks, parameter: ManagedParameter) -> str:
    """What ranks have in common that begin with the same values of ``parameter``; empty where all ranks of a model do.

    Of a part, the place in the mesh that cuts the whole tensor: a text, in messages too, and one for most parameters.
    """
    mine = [] if ranks.scope is None else [f"ranks {list(ranks.scope)}"]
    part = parameter.part
    if part is not None:
        names, coordinate = dimension_names(part.mesh), part.mesh.get_coordinate() or ()
        for name, index, size, placement in zip(names, coordinate, part.mesh.mesh.shape, part.placements, strict=True):
            mine += [f"{name} {index} of {size}"] if placement.is_shard() and size > 1 else []
    return ", ".join(mine)


def dimension_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Those of ``mesh``, or numbers where it has none."""
    return tuple(mesh.mesh_dim_names or (f"dimension {dim}" for dim in range(mesh.ndim)))


def buffers_to_compare(named: Iterable[tuple[str, nn.Module]]) -> list[list[Any]]:
    """A report of the buffers that rank 0 sends, for ranks to compare, in JSON: name, shape and dtype."""
    return [
        ["buffer", f"{name}.{key}" if name else key, list(buffer.shape), str(buffer.dtype)]
        for name, module in named
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


def difference_text(rank: int, others: str, ours: Sequence[Any], theirs: Sequence[Any], scope: str) -> str:
    """An error message about ``others`` ("Rank 3 holds") beside ``rank``, whose reports first differ in ``ours`` and
    ``theirs``. ``scope``: what they have in common; empty where they are any ranks of the model.
    """
    name = ours[1]
    if ours[2] != theirs[2]:
        return (
            f"{others} '{name}' in another order of memory (strides {theirs[2]}) than rank {rank} ({ours[2]}), so the "
            "parts would not make a whole. Build the model alike on all ranks."
        )
    what = "is the first parameter that differs"
    if "meta" in (ours[3], theirs[3]):
        what = f"is on the meta device {f'on rank {rank}' if ours[3] == 'meta' else 'there'} alone"
    if scope:
        what += f", of those that are the same on {scope if len(scope) <= _LONG else f'{scope[:_LONG]}...'}"
    return (
        f"{others} other values than rank {rank}: '{name}' {what}. Each rank keeps a part of its own copy, so the "
        "model would be a mixture. Seed all ranks alike before the model is built; or take rank 0's values, by "
        "sync_module_states=True of polyshard.shard, or by set_model_state_dict with broadcast_from_rank0=True behind "
        "fully_shard of a model on the meta device."
    )


def send_from_first(tensors: Iterable[torch.Tensor], collectives: Collectives, device: torch.device) -> None:
    """Overwrite every tensor, in place, with rank 0's. ``device``: where the collectives take tensors.

    Shapes and dtypes must be the same on all ranks; where the tensors are, and in which memory order, need not.
    """
    for tensor in tensors:
        _send(tensor, device, lambda carried: collectives.broadcast(carried, 0).wait())


def send_over_copies(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], device: torch.device
) -> None:
    """Overwrite a local tensor that ``mesh`` holds several of, in place, with that of the first of these ranks."""
    for dim, placement in enumerate(placements):
        if placement.is_replicate() and mesh.size(dim) > 1:
            _send(tensor, device, partial(torch.distributed.broadcast, group=mesh.get_group(dim), group_src=0))


@torch.no_grad()
def _send(tensor: torch.Tensor, device: torch.device, broadcast: Callable[[torch.Tensor], object]) -> None:
    if not tensor.numel():
        return
    detached = tensor.detach()
    travels = detached if detached.device == device and detached.is_contiguous() else None
    carried = detached.to(device).contiguous() if travels is None else travels
    broadcast(carried.view(-1).view(torch.uint8))
    if travels is None:
        detached.copy_(carried)


#: Words of 8 bytes that are summed apart. A prime, so that rows of a matrix do not fall on each other.
_COLUMNS = 1021
#: Words of a parameter that does not begin at a word, and is copied in pieces to be summed.
_COPIED_WORDS = _COLUMNS << 12
_PLAIN = (torch.Tensor, nn.Parameter)
#: Odd, so that a change of one column cannot vanish; about 2**64 divided by the golden ratio.
_SPREAD = -7046029254386353131


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number for the bits of ``tensor`` in the order of memory: 0-dim, int64, on its device.

    Any one changed byte changes it. It is one pass over memory, with nothing copied where the tensor begins at a
    multiple of 8 bytes.
    """
    if type(tensor) not in _PLAIN:
        # Parameters that gather themselves may have no memory of their own.
        plain = [inner.as_subclass(torch.Tensor) for inner in inner_tensors(tensor)]
        # Of a class that does not say what it is made of nobody can read the bits.
        sums = [checksum(inner) for inner in plain if type(inner) is torch.Tensor]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=tensor.device)
    tensor = tensor.detach()
    stride = dense_stride(tensor.shape, tensor.stride())
    if tensor.stride() != stride:
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=flat.device)
    if flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0:
        _add(columns, flat[:whole].view(torch.int64))
    else:
        for start in range(0, whole, 8 * _COPIED_WORDS):
            _add(columns, flat[start : min(start + 8 * _COPIED_WORDS, whole)].clone().view(torch.int64))
    rest = flat[whole:]
    # In a column of its own for each byte, from behind.
    columns[_COLUMNS - rest.numel() :] += rest.flip(0).to(torch.int64) + 1
    weights = torch.arange(1, 2 * _COLUMNS, 2, device=flat.device) * _SPREAD
    return (columns * weights).sum()


def _add(columns: torch.Tensor, words: torch.Tensor) -> None:
    rows = words.numel() // _COLUMNS
    columns += words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
    rest = words[rows * _COLUMNS :]
    columns[: rest.numel()] += rest
