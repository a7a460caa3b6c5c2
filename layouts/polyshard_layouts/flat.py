"""``flat``: parameters one after the other, cut evenly, wherever that falls."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard.interfaces import Arrangement, Layout, PluginContext, UnitGeometry


class Flat(Layout):
    """``flat``: the least padding. A cut may fall inside a row.

    Every slice has ``ceil(total / shards)`` elements, as in PyTorch's FSDP, and large ones are rounded up to 256 bytes.
    """

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        offsets, cursor, alignment = [], 0, unit.alignment
        for parameter in unit.parameters:
            offset = -(-cursor // alignment) * alignment
            offsets.append(offset)
            cursor = offset + parameter.numel
        shard_numel = unit.aligned_slice(-(-cursor // unit.shards))
        return (Arrangement(tuple(range(len(offsets))), tuple(offsets), shard_numel),)
