"""Initial values: checksums with which ranks compare them, and the broadcast of rank 0's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..interfaces import Collectives
from .layout import dense_stride
from .plan import ModuleParameters

#: Marks what ``values_to_compare`` reports.
VALUES = "values"


def values_to_compare(modules: Iterable[ModuleParameters], *, compare: bool) -> list[list[Any]]:
    """A report of all parameters that ranks compare, in JSON: name, strides, and a checksum where ``compare``.

    Reads every parameter once, where it is, and waits once for each device. Parameters on the meta device have no
    values; they are reported as such.
    """
    parameters = [parameter for module in modules for group in module.groups for parameter in group]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places = []
    for parameter in parameters:
        original = parameter.original
        if not compare or original.is_meta or parameter.part is not None:
            places.append((original.device, -1))
            continue
        of_device = sums.setdefault(original.device, [])
        places.append((original.device, len(of_device)))
        of_device.append(checksum(original))
    found: dict[torch.device, list[int]] = {device: torch.stack(each).tolist() for device, each in sums.items()}
    return [
        [
            VALUES,
            parameter.names[0],
            list(dense_stride(parameter.original.shape, parameter.original.stride())),
            (found[device][index] if index >= 0 else device.type) if compare else None,
        ]
        for parameter, (device, index) in zip(parameters, places, strict=True)
    ]


def buffers_to_compare(named: Iterable[tuple[str, nn.Module]]) -> list[list[Any]]:
    """A report of the buffers that rank 0 sends, for ranks to compare, in JSON: name, shape and dtype."""
    return [
        ["buffer", f"{name}.{key}" if name else key, list(buffer.shape), str(buffer.dtype)]
        for name, module in named
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


def difference_text(rank: int, others: str, ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """An error message about ``others`` ("Rank 3 holds") beside ``rank``, whose reports first differ in ``ours`` and
    ``theirs``.
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
    return (
        f"{others} other values than rank {rank}: '{name}' {what}. Each rank keeps a part of its own copy, so the "
        "model would be a mixture. Seed all ranks alike before the model is built, or set sync_module_states=True, "
        "which takes rank 0's values."
    )


def send_from_first(tensors: Iterable[torch.Tensor], collectives: Collectives, device: torch.device) -> None:
    """Overwrite every tensor, in place, with rank 0's. ``device``: where the collectives take tensors.

    Shapes and dtypes must be the same on all ranks; where the tensors are, and in which memory order, need not.
    """
    with torch.no_grad():
        for tensor in tensors:
            if not tensor.numel():
                continue
            detached = tensor.detach()
            travels = detached if detached.device == device and detached.is_contiguous() else None
            carried = detached.to(device).contiguous() if travels is None else travels
            collectives.broadcast(carried.view(-1).view(torch.uint8), 0).wait()
            if travels is None:
                detached.copy_(carried)


#: Words of 8 bytes that are summed apart. A prime, so that rows of a matrix do not fall on each other.
_COLUMNS = 1021
#: Words of a parameter that does not begin at a word, and is copied in pieces to be summed.
_COPIED_WORDS = _COLUMNS << 12
#: Odd, so that a change of one column cannot vanish; about 2**64 divided by the golden ratio.
_SPREAD = -7046029254386353131


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number for the bits of ``tensor`` in the order of memory: 0-dim, int64, on its device.

    Any one changed byte changes it. It is one pass over memory, with nothing copied where the tensor begins at a
    multiple of 8 bytes.
    """
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
