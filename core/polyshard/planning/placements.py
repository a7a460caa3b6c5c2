"""How parameters lie: the mesh and the placements of the ``DTensor`` that each becomes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .. import _torch_private
from ..config import Strategy
from ..interfaces import Collectives, UnitDtypes
from .extensions import ExtensionArguments
from .groups import FormedGroups, ModelRanks, UnitRanks
from .meshes import WorldMesh
from .parts import TensorPart
from .plan import ManagedParameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Placing:
    """The mesh of a parameter, and how it lies there but for the dimension that its unit cuts."""

    mesh: DeviceMesh
    before: tuple[Placement, ...]
    """One for each dimension of ``mesh``, without the unit's cut."""
    at: int | None
    """Which dimension of ``mesh`` cuts; None for none."""

    def cut(self, dim: int) -> tuple[Placement, ...]:
        """The placements of a parameter that is cut along ``dim``."""
        from torch.distributed.tensor import Shard

        placements = list(self.before)
        if self.at is not None:
            # The dimensions to the right cut first, so where they cut the same dimension these parts are strided.
            behind = range(self.at + 1, self.mesh.ndim)
            factor = math.prod(self.mesh.size(index) for index in behind if placements[index].is_shard(dim))
            placements[self.at] = _torch_private.strided_shard(dim, factor) if factor > 1 else Shard(dim)
        return tuple(placements)


class Placings:
    """The placings of a model's parameters, over the meshes of its units."""

    def __init__(self, ranks: ModelRanks, groups: FormedGroups, device_type: str) -> None:
        """``device_type``: where they compute; the ranks of meshes of their own are those of the process group."""
        self._ranks = ranks
        self._model = groups.model
        self._world = groups.world
        self.device_type = device_type
        self._known: dict[tuple[int, int, DeviceMesh | None], Placing] = {}

    def of(self, ranks: UnitRanks, part: TensorPart | None) -> Placing:
        """How parameters of a unit over ``ranks`` lie; ``part``: what each is of a larger tensor."""
        if ranks.owner is None and self._model.owner is not None and ranks.lists is self._ranks.lists.whole:
            # On the mesh of the others, since functions of torch's that are given all parameters want one.
            return replace(self.of(self._model, part), at=None)
        key = id(ranks.owner), id(ranks.replicate), None if part is None else part.mesh
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._of_mesh(ranks, None if part is None else part.mesh)
        if part is None:
            return found
        return replace(found, before=(*found.before[: found.mesh.ndim - len(part.placements)], *part.placements))

    def _of_mesh(self, ranks: UnitRanks, others: DeviceMesh | None) -> Placing:
        from torch.distributed.tensor import Replicate

        from .device_mesh import mesh_over

        given = self._given(ranks)
        if given is not None:
            mesh, at = given
            joined = mesh if others is None else _torch_private.joined_mesh([mesh, others])
            if joined is not None:
                return Placing(joined, (Replicate(),) * joined.ndim, at)
        groups = [each for each in (ranks.replicate, ranks.owner) if each is not None]
        at = None if ranks.owner is None else len(groups) - 1
        if others is not None or len(groups) > 1:
            mesh = self._grid(ranks, groups, others)
        else:
            mesh = mesh_over(groups[0] if groups else None, self.device_type)
            if not groups and self._ranks.config.strategy is not Strategy.NO_SHARD:
                # What a single rank has is all there is to cut.
                at = 0
        return Placing(mesh, (Replicate(),) * mesh.ndim, at)

    def _given(self, ranks: UnitRanks) -> tuple[DeviceMesh, int | None] | None:
        """Of a unit without a mesh of its own: the dimensions that the configuration names, in its mesh, and which of
        them cuts. None where they are none, or several that count as one."""
        config, mesh = self._ranks.config, self._ranks.config.mesh
        of_model = any(ranks.lists is each for each in (self._ranks.lists, self._ranks.lists.whole))
        if mesh is None or isinstance(mesh, WorldMesh) or not of_model or (ranks.lists and ranks.lists.near):
            return None
        cuts = ranks.owner is not None
        if config.shard is None:
            if mesh.ndim == 1 and not config.strategy.hybrid:
                return mesh, 0 if cuts else None
            return (mesh, 1) if mesh.ndim == 2 and config.strategy.hybrid and cuts else None
        shard, replicate = tuple(config.shard), tuple(config.replicate or ())
        known = list(mesh.mesh_dim_names or ())
        names = (*replicate, *shard)
        if len(shard) != 1 or len(replicate) > 1 or names != tuple(sorted(names, key=known.index)):
            return None
        return mesh[names], len(replicate) if cuts else None

    def _grid(self, ranks: UnitRanks, groups: Sequence[Collectives], others: DeviceMesh | None) -> DeviceMesh:
        """A mesh by its groups: those of the unit, and those of ``others``."""
        from .device_mesh import grid_over

        lists, job = ranks.lists, self._job_ranks
        assert lists is not None
        # ``[replicate, shard]``, without dimensions of one rank: the ranks of this rank's unit.
        mine = next(group for group in lists.shard if self._world.rank in group)
        home = {rank: group for group in lists.replicate for rank in group}
        table = torch.tensor([[job[rank] for rank in home[each]] for each in mine]).t()
        table = table[0] if ranks.replicate is None else table
        table = table[..., 0] if ranks.owner is None else table
        shard, _, replicate = lists.label.replace(", ", "_").partition(" and ")
        kinds = ((replicate or "replicate", ranks.replicate), (shard or "shard", ranks.owner))
        names = tuple(name for name, each in kinds if each is not None)
        more: list[Any] = []
        if others is not None:
            slices = _torch_private.mesh_slices(others)
            of_rank = {rank: each for each in slices for rank in each.flatten().tolist()}
            table = torch.stack([of_rank[rank] for rank in table.flatten().tolist()]).view(*table.shape, *others.shape)
            names += tuple(others.mesh_dim_names or (f"part{index}" for index in range(others.ndim)))
            more = [others.get_group(index) for index in range(others.ndim)]
        return grid_over([*groups, *more], self.device_type, table, job[self._world.rank], names)

    @property
    def _job_ranks(self) -> Sequence[int]:
        """The ranks of the world, as process groups of the job know them; as they count themselves where there are
        none."""
        if self._ranks.mesh is not None:
            return self._ranks.mesh.ranks
        group = self._world.process_group
        if isinstance(group, torch.distributed.ProcessGroup):
            return torch.distributed.get_process_group_ranks(group)
        return range(self._world.world_size)


@dataclass(frozen=True, slots=True)
class OwnPlacements:
    """How the parameters of one unit of ``polyshard.shard`` lie."""

    placings: Placings
    ranks: UnitRanks
    called: str = "Parameters"
    answers_state_dicts: bool = False
    keeps_whole: bool = False

    def spec_of(self, parameter: ManagedParameter, whole: torch.Tensor) -> Any:
        part = parameter.part
        placing = self.placings.of(self.ranks, part)
        placements = placing.cut(parameter.dim) if whole.shape else placing.before
        shape, stride = (whole.shape, whole.stride()) if part is None else (part.shape, part.stride)
        return _torch_private.dtensor_spec(placing.mesh, placements, shape, stride, whole.dtype)

    def flat_spec(self, numel: int, dtype: torch.dtype) -> Any:
        placing = self.placings.of(self.ranks, None)
        placements = placing.before if self.ranks.owner is None else placing.cut(0)
        return _torch_private.dtensor_spec(placing.mesh, placements, (numel,), (1,), dtype)

    def extension_arguments(
        self, parameter: ManagedParameter, kept: torch.dtype, dtypes: UnitDtypes
    ) -> ExtensionArguments:
        # Imported late: it takes long, and few models need it.
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from .device_mesh import mesh_over

        ranks = self.ranks
        among = ranks.world if ranks.gather is None and ranks.world.world_size == 1 else ranks.gather
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtypes.compute == kept else dtypes.compute,
            reduce_dtype=None if dtypes.reduce == dtypes.compute else dtypes.reduce,
        )
        return ExtensionArguments(mesh_over(among, self.placings.device_type), policy)
