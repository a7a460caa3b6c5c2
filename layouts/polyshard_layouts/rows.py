"""``rows``: matrices are cut between rows only."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard.interfaces import Arrangement, Layout, PluginContext, UnitGeometry

from .grained import arranged


class Rows(Layout):
    """``rows``: no index of dimension 0 is cut, so that a rank's piece is ``(rows, ...)``, and its shape says so.

    A vector is cut anywhere: each of its elements is a row. Parameters whose rows do not lie together in memory, such
    as a transposed matrix, lie as in ``flat``, and their pieces are 1-D.
    """

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        rows = [parameter.row_numel for parameter in unit.parameters]
        by_rows = frozenset(index for index, row in enumerate(rows) if row is not None)
        return arranged(unit, [max(1, row or 1) for row in rows], by_rows)
