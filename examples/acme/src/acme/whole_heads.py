"""Cuts matrices between attention heads only, which lie in so many rows each; all else is cut anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyshard.errors import ConfigError
from polyshard.interfaces import Arrangement, Layout, ParameterGeometry, PluginContext, UnitGeometry


class WholeHeads(Layout):
    """Every slice of a matrix is a number of heads of ``rows`` rows; a layer norm beside it may be cut anywhere."""

    api_version = 1

    def __init__(self, context: PluginContext, rows: int = 64) -> None:
        if rows < 1:
            raise ConfigError(f"rows of layout {context.name!r} must be 1 or more, not {rows}")
        self._rows = rows

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        grains = [self._grain(parameter) for parameter in unit.parameters]
        offsets: list[int] = []
        end = 0
        for parameter, grain in zip(unit.parameters, grains, strict=True):
            offsets.append(_up(end, math.lcm(grain or 1, unit.alignment)))
            end = offsets[-1] + parameter.numel
        step = math.lcm(*(grain or 1 for grain in grains))  # every slice ends between heads, wherever it is
        size = _up(-(-end // unit.shards), step)
        size = _up(size, math.lcm(step, unit.slice_alignment(size)))
        by_rows = frozenset(index for index, grain in enumerate(grains) if grain)
        return [Arrangement(tuple(range(len(offsets))), tuple(offsets), size, by_rows)]

    def _grain(self, parameter: ParameterGeometry) -> int:
        """How many elements one head has; 0 for what is no matrix, or whose rows do not lie together."""
        return self._rows * (parameter.row_numel or 0) if len(parameter.shape) == 2 else 0


def _up(numel: int, step: int) -> int:
    return -(-numel // step) * step
