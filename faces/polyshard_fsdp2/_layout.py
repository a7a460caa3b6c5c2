"""The layout of ``fully_shard``: each parameter is cut as ``Shard(0)`` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from polyshard.interfaces import Arrangement, Layout, ParameterGeometry, UnitGeometry


class RowsOfEach(Layout):
    """Each parameter in a segment of its own: rank ``k`` holds rows ``[k * each, (k + 1) * each)``, ``each`` being the
    number of rows over that of ranks, rounded up. Some may be cut along another dimension, evenly.

    So every piece is the local tensor of a ``DTensor`` with ``Shard(0)``. What has no rows that lie together is cut
    anywhere; ``fully_shard`` refuses it.
    """

    api_version = 1

    def __init__(self, dims: Mapping[str, int] = MappingProxyType({})) -> None:
        """``dims``: the dimension along which a parameter is cut, by its name, where that is not 0."""
        self._dims = dict(dims)

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        return tuple(self._alone(unit, index, each) for index, each in enumerate(unit.parameters))

    def _alone(self, unit: UnitGeometry, index: int, parameter: ParameterGeometry) -> Arrangement:
        dim = self._dims.get(parameter.name, 0)
        if dim:
            return Arrangement((index,), (0,), parameter.numel // unit.shards, exact=True, dim=dim)
        return _rows(unit, index, parameter)


def _rows(unit: UnitGeometry, index: int, parameter: ParameterGeometry) -> Arrangement:
    row = parameter.row_numel
    if row is None:
        return Arrangement((index,), (0,), unit.aligned_slice(-(-parameter.numel // unit.shards)))
    # Of nothing, too, a slice has an element.
    each = max(1, -(-parameter.shape[0] // unit.shards) * row)
    return Arrangement((index,), (0,), each, frozenset({index}), exact=True)
