import math
from collections.abc import Sequence

from polyshard.errors import ConfigError
from polyshard.interfaces import Arrangement, Layout, ParameterGeometry, PluginContext, UnitGeometry


def up(numel: int, step: int) -> int:
    return -(-numel // step) * step


class WholeHeads(Layout):
    api_version = 1

    def __init__(self, context: PluginContext, rows: int = 64) -> None:
        if rows < 1:
            raise ConfigError(f"rows of the layout {context.name!r} must be 1 or more, not {rows}")
        self._rows = rows

    def _grain(self, parameter: ParameterGeometry) -> int:
        # None where the rows do not lie together: that cannot be cut between them.
        return self._rows * (parameter.row_numel or 0) if len(parameter.shape) == 2 else 0

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        grains = [self._grain(parameter) for parameter in unit.parameters]
        offsets, end = [], 0
        for parameter, grain in zip(unit.parameters, grains, strict=True):
            offsets.append(up(end, math.lcm(grain or 1, unit.alignment)))
            end = offsets[-1] + parameter.numel
        step = math.lcm(*(grain or 1 for grain in grains))  # every slice ends between heads, wherever it is
        size = up(-(-end // unit.shards), step)
        size = up(size, math.lcm(step, unit.slice_alignment(size)))
        by_rows = frozenset(index for index, grain in enumerate(grains) if grain)
        return [Arrangement(tuple(range(len(offsets))), tuple(offsets), size, by_rows)]
