"""Where FSDP lays the parameters of one instance: one after the other, cut evenly and nowhere rounded up."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard.interfaces import PARAMETER_ALIGNMENT_BYTES
from polyshard.planning.layout import FlatLayout, Slot, dense_stride, product
from torch import nn


def flat_layout(parameters: Sequence[nn.Parameter], *, shards: int, itemsize: int, aligned: bool) -> FlatLayout:
    """The layout of ``parameters`` in slices of ``ceil(total / shards)`` elements of ``itemsize`` bytes.

    ``aligned``: each begins at a multiple of 16 bytes. Otherwise they lie back to back.
    """
    alignment = max(1, PARAMETER_ALIGNMENT_BYTES // itemsize) if aligned else 1
    slots, cursor = [], 0
    for parameter in parameters:
        shape = tuple(parameter.shape)
        offset = -(-cursor // alignment) * alignment
        slots.append(Slot(offset, product(shape), shape, dense_stride(shape, parameter.stride())))
        cursor = slots[-1].end
    return FlatLayout(tuple(slots), cursor, -(-cursor // shards), shards)
