"""Which ranks share what, from the dimensions of a mesh: arithmetic over its ranks, without process groups.

A ``DeviceMesh`` that is a slice of another shows the ranks of this rank's slice alone. A group is made by all ranks
together, so here each dimension is known by the groups of *all* slices, which every rank knows: it is then refused, or
served, on all ranks alike, and with the same words.

Three kinds of ranks follow. Those that share a unit's shards (``shard``), those that hold the same shard
(``replicate``), and the rest of the world: ranks with other parts of the model, or copies of the whole. A group of one
kind and a group of another form a grid, in which each rank of the one meets each of the other once. That is what
orthogonal means, and without it a sum over one kind and then the other would count some ranks twice and some never.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .. import _torch_private
from ..config import ShardConfig, Strategy, did_you_mean
from ..errors import ConfigError, ParameterError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Ranks of each group, in their order.
Groups = list[list[int]]
#: What ``gradient_divisor`` names; see ``divisor_of``.
DIVISORS = ("data", "group", "sum")


@dataclass(frozen=True, slots=True, eq=False)
class WorldMesh:
    """All ranks of a model by the dimensions of its mesh."""

    slices: torch.Tensor
    """``[worlds, *dimensions]``: their ranks in the job. More than one world where the mesh is a slice of another."""
    names: tuple[str, ...]
    """Of the dimensions; empty ones where they have none."""
    own: int = 0
    """Which of the worlds is this rank's."""
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Answers that hold for many units: each takes a pass over all ranks."""

    @classmethod
    def pretended(cls, sizes: Mapping[str, int]) -> WorldMesh:
        """A mesh of ranks that need not exist, by sizes of dimensions. Where nothing travels it serves as the
        configuration's ``mesh``: for plans, explanations and ``fake`` collectives.
        """
        ranks = torch.arange(math.prod(sizes.values())).view(1, *sizes.values())
        return cls(ranks, tuple(sizes))

    # As ``DeviceMesh`` has them.

    @property
    def ndim(self) -> int:
        return len(self.names)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks of this world, ``[*dimensions]``."""
        return self.slices[self.own]

    @property
    def ranks(self) -> list[int]:
        """Those, in ascending order: the world's group numbers them so."""
        return sorted(self.mesh.flatten().tolist())


@dataclass(frozen=True)
class UnitLists:
    """The groups of a unit, of all ranks of the world, which go by their positions in the world's group."""

    shard: Groups
    """Ranks among which it is cut, in the order of its shards."""
    replicate: Groups
    """Ranks that hold the same shard."""
    data: Groups
    """Ranks whose gradients are added up: each computes with other samples. Groups of the other kinds lie in these."""
    label: str = ""
    """The dimensions: ``"dp"``, ``"edp and dp_replicate"``; empty where they have no names."""
    near: Groups | None = None
    """Groups that divide those of ``shard``, such as the ranks of a host; None where the strategy knows none."""

    @property
    def data_ranks(self) -> int:
        return len(self.data[0])

    def alike(self, other: UnitLists) -> bool:
        """Whether units over both communicate among the same ranks."""
        return (self.shard, self.replicate, self.near) == (other.shard, other.replicate, other.near)

    @cached_property
    def _homes(self) -> dict[int, tuple[int, ...]]:
        return {rank: each for each in map(tuple, self.data) for rank in each}

    def of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the unit that ``rank`` has a part of, in ascending order."""
        return self._homes[rank]

    def post_forward_ranks(self, size: int) -> Groups:
        """The ranks of ``shard`` in groups of ``size``: ``near`` ones, or one behind the other."""
        if self.near is not None and len(self.near[0]) == size:
            return self.near
        return [each[start : start + size] for each in self.shard for start in range(0, len(each), size)]

    @cached_property
    def joined(self) -> UnitLists:
        """The same ranks, where replicas share shards as well, and those that shared them before are ``near``."""
        if len(self.replicate[0]) == 1:
            return self
        alone = [[rank] for rank in sorted(itertools.chain(*self.data))]
        label = ", ".join(reversed([each for each in self.label.split(" and ") if each]))
        return UnitLists(self.data, alone, self.data, label, self.shard)

    @cached_property
    def whole(self) -> UnitLists:
        """The same ranks, where each of them holds the whole unit."""
        alone = [[rank] for rank in sorted(itertools.chain(*self.data))]
        return UnitLists(alone, self.data, self.data, self.label)


def world_mesh(mesh: DeviceMesh | WorldMesh, others: Iterable[DeviceMesh] = ()) -> WorldMesh:
    """All ranks of a model: those of ``mesh``, and those that ``others``, the meshes of its DTensors, reach from there.

    With ``mesh=whole["dp"]`` and DTensors over ``whole["tp"]`` the world is that of both dimensions, in this order.

    Raises ConfigError: ``mesh`` holds a rank twice, or not this one, or a dimension is not orthogonal to it.
    """
    ranks: list[int] = sorted(mesh.mesh.flatten().tolist())
    if len(set(ranks)) != len(ranks):
        raise ConfigError(f"A mesh holds each rank once, but this one holds {ranks}. Make it with init_device_mesh.")
    if not isinstance(mesh, WorldMesh) and mesh.get_coordinate() is None:
        raise ConfigError(
            f"This rank is not in the mesh of ranks {ranks}. Call shard() on the ranks of the mesh alone."
        )
    slices = mesh.slices if isinstance(mesh, WorldMesh) else _torch_private.mesh_slices(mesh)
    names = _names_of(mesh)
    first = int(mesh.mesh.flatten()[0])
    # The largest first: a dimension that was made of others has them inside.
    further = sorted((each for other in others for each in _dimensions(other)), key=lambda each: -len(each[1][0]))
    while further := [each for each in further if not _inside(each[1], slices.flatten(1).tolist())]:
        # Experts may lie along ``mesh`` and along another dimension, and are inside behind that one.
        fits = ((name, made) for name, groups in further if (made := _extended(slices, groups)) is not None)
        name, made = next(fits, (further[0][0], None))
        if made is None:
            raise _not_orthogonal(*further[0], slices)
        slices, names = made, (*names, name)
    own = next(index for index, world in enumerate(slices) if first in world)
    return WorldMesh(slices, names, own)


def lists_of(config: ShardConfig, strategy: Strategy, world: WorldMesh) -> UnitLists:
    """The groups of a unit without a mesh of its own. ``world``: of the configuration's mesh."""
    mesh = config.mesh
    assert mesh is not None
    if config.shard is not None:
        lists = unit_lists(world, config.shard, config.replicate or ())
        over = config.shard_parameters
        if isinstance(over, tuple) and set(over) != set(config.shard):
            lists = replace(lists, near=unit_lists(world, over).shard)
    elif config.strategy.grouped:
        lists = _lists(world, (1,), (0,))
    else:
        lists = _lists(world, tuple(range(mesh.ndim)), ())
    if strategy is Strategy.NO_SHARD:
        return lists.whole
    return lists.joined if strategy.joins else lists


def unit_lists(mesh: DeviceMesh | WorldMesh, shard: Sequence[str], replicate: Sequence[str] = ()) -> UnitLists:
    """The groups of a unit that is cut over the dimensions ``shard``, and replicated over ``replicate``.

    Several dimensions of one kind count as one. Their order is that of the mesh, whatever the order of the names.

    Raises ConfigError: the mesh has no such dimension, or its ranks have another order from one group to the next.
    """
    world = world_mesh(mesh)
    return _lists(world, *(tuple(_axis(world.names, name) for name in names) for names in (shard, replicate)))


def override_lists(
    world: WorldMesh, model: UnitLists, value: str | Sequence[str] | DeviceMesh, replicate: Sequence[str], where: str
) -> UnitLists:
    """The groups of a unit whose ``mesh`` a policy overrides by ``value``.

    Args:
        world, model: Of the configuration's mesh; the groups of units without one of their own, not ``whole``.
        value: Dimensions of that mesh, which the unit is cut over; or a mesh: of one dimension, or (replicate, shard).
        replicate: The configuration's dimensions of replicas, over which this unit is replicated as well, unless
            ``value`` is a mesh of two dimensions.
        where: Whose mesh it is, in messages.

    Raises:
        ConfigError: there is no such dimension; or the mesh lacks ranks of the world, has others, or is not orthogonal
            to the groups of the model.
    """
    if isinstance(value, str | Sequence):
        value = (value,) if isinstance(value, str) else tuple(value)
    key = value, tuple(replicate)
    before, lists = world._known.get(key, (None, None))
    if before is not model:
        lists = _override_lists(world, model, value, replicate, where)
        world._known[key] = model, lists
    found: UnitLists = lists
    return found


def _override_lists(
    world: WorldMesh, model: UnitLists, value: tuple[str, ...] | DeviceMesh, replicate: Sequence[str], where: str
) -> UnitLists:
    if isinstance(value, tuple):
        try:
            # Ranks that share its shards are no replicas of it.
            return unit_lists(world, value, [name for name in replicate if name not in value])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    table = _table_of(value, world, where)
    label = _names_of(value)
    axes = [_axis(world.names, name) for name in replicate]
    replicas = _rows(_table(world, axes, ()))
    if value.ndim == 1 and replicate and not _inside(replicas, table.flatten(0, 1).tolist()):
        made = _extended(table[:, 0], replicas)
        if made is None:
            raise _not_orthogonal(" and ".join(replicate), replicas, table[:, 0])
        table, label = made.movedim(2, 1), (*replicate, *label)
    lists = _from_table(table, world, _label(label[-1:], label[:-1]))
    for mine, theirs in itertools.product((lists.shard, lists.replicate), (model.shard, model.replicate)):
        if not _orthogonal(mine, theirs):
            ranks = world.ranks
            raise ConfigError(
                f"{where} is not orthogonal to the model's: its groups {_named(mine, ranks)} have more ranks of one "
                f"than of another of the model's groups {_named(theirs, ranks)}. Make both of one mesh."
            )
    return lists


def refuse_overlap(lists: UnitLists, mesh: DeviceMesh, world: WorldMesh, name: str) -> None:
    """Raise if the parameter ``name``, a DTensor over ``mesh``, cannot be in a unit with the groups ``lists``.

    Raises:
        ParameterError: a dimension of ``mesh`` has ranks that share its shards, or that hold the same ones.
        ConfigError: a dimension of ``mesh`` is not orthogonal to the unit's groups.
    """
    if world._known.get((id(lists), mesh)) is lists:
        return
    ranks = world.ranks
    position = {rank: index for index, rank in enumerate(ranks)}
    place = {member: index for each in lists.shard for index, member in enumerate(each)}
    for dimension, groups in _dimensions(mesh):
        mine = [[position[rank] for rank in each] for each in groups if position.keys() >= set(each)]
        what = f"the dimension {dimension!r} of its mesh" if dimension else "its mesh"
        for kind, theirs in (("cut", lists.shard), ("replicated", lists.replicate)):
            home = {member: index for index, each in enumerate(theirs) for member in each}
            if any(len({home[member] for member in each}) < len(each) for each in mine):
                raise ParameterError(
                    f"'{name}' is a DTensor, and its unit is {kind} over ranks {_named(theirs, ranks)}, of which "
                    f"{what} has several in one group, {_named(mine, ranks)}. Parallelize over a dimension that is in "
                    "neither shard nor replicate, or let a policy give its module another mesh."
                )
        across = all(len({place[member] for member in each}) == 1 for each in mine)
        covers = across and sum(map(len, mine)) == len(ranks)
        if not covers or not (_orthogonal(mine, lists.shard) and _orthogonal(mine, lists.replicate)):
            raise ConfigError(
                f"{what[0].upper()}{what[1:]} of the DTensor '{name}' has the groups {_named(mine, ranks)}, which are "
                f"not orthogonal to those that share shards, {_named(lists.shard, ranks)}. Make both of one mesh."
            )
        part = {member: index for each in mine for index, member in enumerate(each)}
        for kind, theirs in (("cut", lists.shard), ("replicated", lists.replicate)):
            if any(len({part[member] for member in each}) > 1 for each in theirs):
                raise ParameterError(
                    f"'{name}' is a DTensor, and its unit is {kind} over ranks {_named(theirs, ranks)}, which have "
                    f"different parts of it: {what} has the groups {_named(mine, ranks)}. Make both of one mesh."
                )
    world._known[id(lists), mesh] = lists


def divisor_of(choice: str | float, unit: UnitLists, model: UnitLists) -> float:
    """What a sum of gradients over the ranks of ``unit`` is divided by.

    =========  ==================================================================  =============
    choice     divisor                                                             as in
    =========  ==================================================================  =============
    "data"     all ranks with other samples: ``model.data_ranks``                  Megatron
    "group"    the ranks that add up: ``unit.data_ranks``                          Transformers
    "sum"      1: the loss was divided by the samples or tokens of all ranks       torchtitan
    a number   itself
    =========  ==================================================================  =============
    """
    if isinstance(choice, str):
        return float({"data": model.data_ranks, "group": unit.data_ranks, "sum": 1}[choice])
    return float(choice)


def refuse_wrong_overrides(overrides: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a ``mesh`` or ``gradient_divisor`` that no unit can have. ``where`` is its module."""
    mesh, divisor = overrides.get("mesh"), overrides.get("gradient_divisor")
    if mesh is not None:
        names = (mesh,) if isinstance(mesh, str) else tuple(mesh) if isinstance(mesh, Sequence) else None
        dimensions = getattr(mesh, "ndim", 0) if names is None else 1
        named = names is None or (names and len(set(names)) == len(names) and all(isinstance(n, str) for n in names))
        if not named or dimensions not in (1, 2):
            raise ConfigError(
                f"A wrap policy overrides mesh for {where} by {mesh!r}. Give a dimension of the configuration's mesh, "
                "several different ones, or a DeviceMesh of one dimension or of two, (replicate, shard)."
            )
    if divisor is None or (isinstance(divisor, str) and divisor in DIVISORS):
        return
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
        hint = did_you_mean(divisor, DIVISORS) if isinstance(divisor, str) else ""
        raise ConfigError(
            f"A wrap policy overrides gradient_divisor for {where} by {divisor!r}.{hint} Give "
            f"{', '.join(map(repr, DIVISORS))}, or a number above 0."
        )


def _names_of(mesh: DeviceMesh | WorldMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or [""] * mesh.ndim)


def _axis(names: Sequence[str], name: str) -> int:
    if name in names:
        return names.index(name)
    known = [each for each in names if each]
    has = f"It has: {', '.join(known)}." if known else "Its dimensions have no names: make it with mesh_dim_names=."
    raise ConfigError(f"{name!r} is no dimension of the mesh.{did_you_mean(name, known)} {has}")


def _label(shard: Sequence[str], replicate: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(shard), ", ".join(replicate)]))


def _lists(world: WorldMesh, shard: Sequence[int], replicate: Sequence[int]) -> UnitLists:
    # In the order of the mesh.
    shard, replicate = sorted(shard), sorted(replicate)
    label = _label([world.names[axis] for axis in shard], [world.names[axis] for axis in replicate])
    return _from_table(_table(world, replicate, shard), world, label)


def _table(world: WorldMesh, replicate: Sequence[int], shard: Sequence[int]) -> torch.Tensor:
    """``[rest, replicate, shard]``: the ranks of the world, with several dimensions of one kind as one."""
    mesh = world.mesh
    rest = [axis for axis in range(mesh.ndim) if axis not in replicate and axis not in shard]
    sizes = [math.prod(mesh.shape[axis] for axis in axes) for axes in (rest, replicate, shard)]
    return mesh.permute(*rest, *replicate, *shard).reshape(sizes)


def _rows(table: torch.Tensor) -> Groups:
    """The groups along the middle dimension of ``[rest, replicate, shard]``."""
    rows: Groups = table.transpose(1, 2).flatten(0, 1).tolist()
    return rows


def _from_table(table: torch.Tensor, world: WorldMesh, label: str) -> UnitLists:
    """The groups of ``[rest, replicate, shard]``, by positions in the world and in ascending order."""
    position = {rank: index for index, rank in enumerate(world.ranks)}
    places = torch.tensor([position[rank] for rank in table.flatten().tolist()]).view(table.shape)
    order = places.argsort(dim=-1)
    # Process groups number their ranks in ascending order, and replicas must agree on who has which shard.
    if not bool((order == order[0, 0]).all()):
        raise ConfigError(
            f"The ranks of the mesh ascend in one group that shares shards and descend in another: "
            f"{_named(table.flatten(0, 1).tolist())}. Make the mesh with init_device_mesh."
        )
    places = places[..., order[0, 0]]
    # Equal groups in equal lists: these may share communicators.
    shard, data = sorted(places.flatten(0, 1).tolist()), sorted(map(sorted, places.flatten(1).tolist()))
    return UnitLists(shard, sorted(map(sorted, _rows(places))), data, label)


def _dimensions(mesh: DeviceMesh) -> list[tuple[str, Groups]]:
    """Name and groups of each dimension of more than one rank."""
    slices = _torch_private.mesh_slices(mesh)
    found = []
    for axis, name in enumerate(_names_of(mesh)):
        size = slices.shape[axis + 1]
        if size > 1:
            found.append((name, slices.movedim(axis + 1, -1).reshape(-1, size).tolist()))
    return found


def _extended(slices: torch.Tensor, groups: Groups) -> torch.Tensor | None:
    """``[slices, *dimensions]`` with one more dimension, of ``groups``; None where they are not orthogonal to it."""
    group_of = {rank: each for each in groups for rank in each}
    made: dict[tuple[int, ...], torch.Tensor] = {}
    lines = {tuple(each) for each in slices.flatten(1).tolist()}
    for each in slices:
        ranks = each.flatten().tolist()
        world = torch.tensor([group_of[rank] for rank in ranks]) if group_of.keys() >= set(ranks) else None
        if world is None or any(tuple(line) not in lines for line in world.t().tolist()):
            return None
        made.setdefault(tuple(world.flatten().tolist()), world.view(*each.shape, -1))
    members = [rank for world in made for rank in world]
    if len(set(members)) != len(members):
        return None
    return torch.stack(list(made.values()))


def _not_orthogonal(name: str, groups: Groups, slices: torch.Tensor) -> ConfigError:
    what = f"The mesh dimension {name!r}" if name else "A mesh dimension"
    return ConfigError(
        f"{what} of ranks {_named(groups)} is not orthogonal to the mesh of ranks "
        f"{_named(slices.flatten(1).tolist())}, or reaches "
        "others. Give a mesh of all ranks that the model is spread over, as init_device_mesh makes it, and name the "
        "dimensions to shard over."
    )


def _table_of(mesh: DeviceMesh, world: WorldMesh, where: str) -> torch.Tensor:
    """``[rest, replicate, shard]`` of a policy's mesh, which must have exactly the ranks of the world."""
    slices, ranks = _torch_private.mesh_slices(mesh), set(world.ranks)
    table = slices.unsqueeze(1) if mesh.ndim == 1 else slices
    # A slice may belong to a mesh of several worlds.
    kept = [each for each in table if not ranks.isdisjoint(each.flatten().tolist())]
    members = [rank for each in kept for rank in each.flatten().tolist()]
    if sorted(members) != sorted(ranks):
        raise ConfigError(
            f"{where} has the ranks {sorted(members)}, where those of the model are {sorted(ranks)}. Give a slice of a "
            "mesh over all of them."
        )
    return torch.stack(kept)


def _inside(groups: Groups, worlds: Groups) -> bool:
    """Whether each of ``groups`` lies in one of ``worlds``, or meets none."""
    home = {rank: index for index, each in enumerate(worlds) for rank in each}
    return all(len({home.get(rank) for rank in each}) == 1 for each in groups)


def _orthogonal(one: Groups, other: Groups) -> bool:
    """Whether, where groups are connected, each of one kind meets each of the other in as many ranks."""
    home = {rank: index for index, each in enumerate(other) for rank in each}
    # Of each of one kind, which of the other it meets, and in how many ranks.
    met = [Counter(home[rank] for rank in each) for each in one]
    first: dict[int, Counter[int]] = {}
    return all(
        len(set(found.values())) == 1 and all(first.setdefault(index, found) == found for index in found)
        for found in met
    )


#: Groups that a message shows, of more.
_SHOWN = 8


def _named(groups: Groups, ranks: Sequence[int] | None = None) -> str:
    """``groups`` for messages, by ranks of the job: those at their positions in ``ranks``, where that is given."""
    shown = ", ".join(str([rank if ranks is None else ranks[rank] for rank in each]) for each in groups[:_SHOWN])
    return f"{shown} and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else shown
