"""Parameters that are infinite or no number, which a checkpoint would hand on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..engine.step.root import Root
from ..state.exchange import speaks


def not_finite(owner: Root) -> Sequence[str]:
    """Names of the model's sharded parameters with such elements on any rank, in module order. Every rank calls it.

    Looks at each unit's flat master once, and waits for the device once. Buffers are not looked at: masks are infinite
    on purpose.
    """
    units = [unit for unit in owner.units if unit.master.numel() and unit.master.is_floating_point()]
    sound = _all_true([_is_finite(unit.master) for unit in units])
    names = [
        parameter.names[0]
        for unit, is_sound in zip(units, sound, strict=True)
        if not is_sound
        for parameter, piece in zip(unit.parameters, unit.originals.tensors, strict=True)
        if piece.numel() and not bool(_is_finite(piece))
    ]
    if speaks(owner.collectives):
        names = [name for each in owner.collectives.all_gather_object(names) for name in each]
    order = {parameter.names[0]: None for unit in owner.units for parameter in unit.parameters}
    found = set(names)
    return [name for name in order if name in found]


@torch.no_grad()
def _is_finite(values: torch.Tensor) -> torch.Tensor:
    # By the largest of them, for which no memory is taken: a shard fills much of its device.
    return torch.isfinite(torch.linalg.vector_norm(values, math.inf))


def _all_true(flags: Sequence[torch.Tensor]) -> list[bool]:
    by_device: dict[torch.device, list[int]] = {}
    for index, flag in enumerate(flags):
        by_device.setdefault(flag.device, []).append(index)
    result = [True] * len(flags)
    for indices in by_device.values():
        told = torch.stack([flags[index] for index in indices]).tolist()
        for index, value in zip(indices, told, strict=True):
            result[index] = value
    return result
