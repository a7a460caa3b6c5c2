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
        smallest: elements below which a parameter may be cut anywhere. 8-bit optimizers keep the state of small ones in
            full precision: torchao's and bitsandbytes' those of fewer than 4096.

    Raises:
        ConfigError: ``size`` is neither a positive number nor two of them, or ``smallest`` is negative.
    """

    api_version = 1

    def __init__(self, context: PluginContext, *, size: int | Sequence[int] = 256, smallest: int = 4096) -> None:
        del context
        sizes = [size] if isinstance(size, int) else list(size) if isinstance(size, Sequence) else []
        sound = all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in sizes)
        if not sound or len(sizes) not in (1, 2) or isinstance(size, bool | str):
            raise ConfigError(
                f"size of the layout 'blocks' must be a number of elements above 0, or [height, width] of a tile, not "
                f"{size!r}."
            )
        if not isinstance(smallest, int) or isinstance(smallest, bool) or smallest < 0:
            raise ConfigError(f"smallest of the layout 'blocks' must be a number of elements, not {smallest!r}.")
        self._size = sizes[0]
        self._smallest = smallest
        self._tiles = len(sizes) == 2

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        if not self._tiles:
            return arranged(unit, [self._size if self._rules(each) else 1 for each in unit.parameters], frozenset())
        by_rows = frozenset(
            index for index, each in enumerate(unit.parameters) if _is_matrix(each) and self._rules(each)
        )
        grains = [
            self._size * (each.row_numel or 1) if index in by_rows else 1 for index, each in enumerate(unit.parameters)
        ]
        return arranged(unit, grains, by_rows)

    def _rules(self, parameter: ParameterGeometry) -> bool:
        return parameter.numel >= max(1, self._smallest)


def _is_matrix(parameter: ParameterGeometry) -> bool:
    return len(parameter.shape) == 2 and parameter.row_numel is not None
