"""The layout of ``fully_shard``: each parameter is cut as ``Shard(0)`` says."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard.interfaces import Arrangement, Layout, UnitGeometry


class RowsOfEach(Layout):
    """Each parameter in a buffer of its own: rank ``k`` holds rows ``[k * each, (k + 1) * each)``, ``each`` being the
    number of rows over that of ranks, rounded up.

    So every piece is the local tensor of a ``DTensor`` with ``Shard(0)``. Rows must lie together in memory.
    """

    api_version = 1

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        return tuple(
            # Of nothing, too, a slice has an element.
            Arrangement(
                (index,),
                (0,),
                max(1, -(-each.shape[0] // unit.shards) * (each.row_numel or 0)),
                frozenset({index}),
                exact=True,
            )
            for index, each in enumerate(unit.parameters)
        )
