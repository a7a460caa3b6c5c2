"""``blocks``: parameters are cut between blocks of elements, or between tiles of matrices, only."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard.errors import ConfigError
from polyshard.interfaces import Arrangement, Layout, ParameterGeometry, PluginContext, UnitGeometry

from .grained import arranged


class Blocks(Layout):
    """``blocks``: for optimizers and casters that treat some elements together, such as 8-bit states.

    Args:
        size: elements of a block, counted in the memory order of the parameter, whose last block may be shorter; or the
            height and width of a tile. A tile of a row-major matrix lies in as many rows as it is high, so that
            matrices are cut between these, and pieces are ``(rows, ...)``. Whatever is no row-major matrix is then cut
            anywhere.

    Raises:
        ConfigError: ``size`` is neither a positive number nor two of them.
    """

    api_version = 1

    def __init__(self, context: PluginContext, *, size: int | Sequence[int] = 256) -> None:
        del context
        sizes = [size] if isinstance(size, int) else list(size) if isinstance(size, Sequence) else []
        sound = all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in sizes)
        if not sound or len(sizes) not in (1, 2) or isinstance(size, bool | str):
            raise ConfigError(
                f"size of the layout 'blocks' must be a number of elements above 0, or [height, width] of a tile, not "
                f"{size!r}."
            )
        self._size = sizes[0]
        self._tiles = len(sizes) == 2

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        if not self._tiles:
            return arranged(unit, [min(self._size, max(1, each.numel)) for each in unit.parameters], frozenset())
        by_rows = frozenset(index for index, each in enumerate(unit.parameters) if _is_matrix(each))
        grains = [
            min(self._size, max(1, each.shape[0])) * (each.row_numel or 1) if index in by_rows else 1
            for index, each in enumerate(unit.parameters)
        ]
        return arranged(unit, [max(1, grain) for grain in grains], by_rows)


def _is_matrix(parameter: ParameterGeometry) -> bool:
    return len(parameter.shape) == 2 and parameter.row_numel is not None
