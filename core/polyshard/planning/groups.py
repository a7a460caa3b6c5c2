"""The ranks that share a unit's shards, and those that hold the same shard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from .. import _torch_private
from ..config import PluginChoice, ShardConfig, Strategy
from ..errors import ConfigError, WorldSizeError
from ..interfaces import COMPLETED, BufferRole, Collectives, RankAndSize, ReduceOp, Work
from ..interfaces.collectives import issued
from .meshes import Groups, UnitLists, WorldMesh, divisor_of, lists_of, override_lists, world_mesh
from .parts import TensorPart
from .plan import ModuleParameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class UnitRanks:
    """The ranks of one unit: who holds its parts, and whom its communication reaches.

    ==========================  =====================  ==================================
    unit                        owner                  replicate
    ==========================  =====================  ==================================
    FULL_SHARD, ZeRO, HFSDP     all data ranks         none
    HYBRID_SHARD (and ZeRO-2)   ``shard_size`` ranks   the other data ranks
    NO_SHARD                    none                   all data ranks
    beside tensor parallelism   as above, of those with this rank's part of the parameters
    experts, ``mesh=`` of own   the ranks with these experts, along that mesh
    ==========================  =====================  ==================================

    Gathers and reductions reach the owners in all of these but HFSDP: there both are among ``shard_size`` ranks, and
    what lies between them and the masters goes along ``route``.
    """

    world: Collectives
    """All ranks of the model, those of other units too."""
    owner: Collectives | None
    """Ranks that hold a part of the master and of the optimizer's state each; None where this rank holds all of it."""
    gather: Collectives | None
    """Ranks among which whole parameters are gathered; None where nothing is."""
    reduction: Collectives | None
    """Ranks among which gradients are reduced and scattered; None where each keeps them whole."""
    replicate: Collectives | None
    """Ranks that hold the same part, and add up its gradients behind that; None where there is no other."""
    replicas: Collectives | None = None
    """Jobs elsewhere that train the same model, over which gradients are averaged last (``Collectives.replicas``); None
    where there are none. Their ranks are not counted."""
    divisor: float | None = None
    """What the sum of gradients over ``reduction`` and ``replicate`` is divided by; None for ``number``."""
    label: str = ""
    """The dimensions of the mesh, in messages: ``"dp"``, ``"edp and dp_replicate"``; empty where there is no mesh."""
    ep_degree: int = 1
    """Groups of ranks in ``world`` that have other plain parameters under the unit's names, as experts do; 1 where all
    of them hold copies."""
    place: int = 0
    """Which is this rank's of the groups in ``world`` that have other parameters, or copies."""
    lists: UnitLists | None = field(default=None, compare=False, repr=False)
    """All ranks of ``world``, as they were planned; None where they were not."""
    packs: bool = False
    """Whether ``reduction`` brings several inputs together itself, for one communication of no more elements."""
    route: Route | None = None
    """Between masters and the fewer ranks that ``gather`` and ``reduction`` reach; None where these are the owners."""
    rows: int = 1
    """How many shards the result of a reduction has: more than one where a later one goes on along ``route``."""

    @classmethod
    def over(cls, world: Collectives, owner: Collectives | None, replicate: Collectives | None, **more: Any) -> Self:
        """The ranks of a unit that is gathered from its masters, and reduced to them."""
        return cls(world, owner, owner, owner, replicate, **more)

    @classmethod
    def routed(
        cls, world: Collectives, near: Collectives, route: Route, replicate: Collectives | None, **more: Any
    ) -> Self:
        """The ranks of a unit that is gathered and reduced among ``near``: each has the shards of several owners."""
        return cls(world, route.owner, near, near, replicate, route=route, **more)

    @property
    def shard_size(self) -> int:
        """Number of shards of a unit."""
        return self.owner.world_size if self.owner else 1

    @property
    def shard_rank(self) -> int:
        return self.owner.rank if self.owner else 0

    @property
    def number(self) -> int:
        """Ranks whose gradients are added up."""
        reduced = self.reduction.world_size * (self.route.rows if self.route else 1) if self.reduction else 1
        return reduced * (self.replicate.world_size if self.replicate else 1)

    @property
    def scale(self) -> float | None:
        """The factor of a mean over ``number`` ranks that makes it the sum by ``divisor``; None for 1."""
        return None if self.divisor is None or self.divisor == self.number else self.number / self.divisor

    @property
    def everyone(self) -> tuple[Collectives, ...]:
        """Groups through which a value reaches all ranks of the model, one after the other; empty for a single rank."""
        if self.world.world_size >= self.number:
            return (self.world,) if self.world.world_size > 1 else ()
        # The unit has groups of its own, beyond the world.
        return tuple(each for each in (self.owner, self.replicate) if each is not None)

    @property
    def alike(self) -> bool:
        """Whether all ranks of the model have pieces of the same parameters, and there are no other groups of them."""
        return self.world.world_size <= self.number

    def copies(self, part: TensorPart | None = None) -> int:
        """How many ranks hold this rank's elements, of ``part`` if given; 0 where the model lacks other parts."""
        others = self.ep_degree
        if part is not None:
            # Along the dimensions of its mesh, it is the part that knows.
            others = part.number if self.ep_degree == 1 else max(1, self.ep_degree // part.copies)
        number = max(self.world.world_size, self.number)
        return 0 if number % (self.number * others) else number // (self.shard_size * others)

    @property
    def blends(self) -> bool:
        """Whether means of elements depend on the elements beside them."""
        return any(each.capabilities.blends for each in (self.reduction, self.behind) if each is not None)

    @property
    def behind(self) -> Collectives | None:
        """Ranks that average gradients behind ``reduction``; None where there are none."""
        return self.replicas if self.replicate is None else self.replicate

    @property
    def alone(self) -> bool:
        return self.owner is None and self.behind is None

    def reduce(self, result: torch.Tensor, gradients: torch.Tensor) -> Work:
        """Start taking the mean of ``gradients`` (``[shard_size * n]``) over all ranks.

        ``result`` (``[n]``) gets the shard. ``gradients`` is overwritten. Without shards the mean replaces it.
        """
        behind = self.behind
        if self.reduction is None:
            if behind is None:
                return COMPLETED
            return issued(behind.all_reduce(gradients, op=ReduceOp.MEAN), "all_reduce", behind)
        into = result if self.route is None else result.new_empty(self.route.rows * result.numel())
        scratch = self._scratch(self.reduction, into, gradients)
        work = self.reduction.reduce_scatter(into, gradients, op=ReduceOp.MEAN, scratch=scratch)
        work = issued(work, "reduce_scatter", self.reduction)
        if self.route is not None:
            work = ThenToOwners(work, self.route, [(result, into)])
        return work if behind is None else ThenAllReduce(work, behind, result)

    def reduce_many(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], results: torch.Tensor | None = None
    ) -> Work:
        """``reduce(result, gradients)`` of units that have shards, in one launch where the backend can.

        ``results``: the memory of which each ``result`` is a range; needed for replicas, which reduce it as a whole.
        """
        among, rows = self.reduction, 1 if self.route is None else self.route.rows
        assert among is not None
        intos = [result if rows == 1 else result.new_empty(rows * result.numel()) for result, _ in pairs]
        triples = [
            (into, gradients, self._scratch(among, into, gradients))
            for into, (_, gradients) in zip(intos, pairs, strict=True)
        ]
        work = issued(among.reduce_scatter_many(triples, op=ReduceOp.MEAN), "reduce_scatter_many", among)
        if self.route is not None:
            work = ThenToOwners(
                work, self.route, [(result, into) for (result, _), into in zip(pairs, intos, strict=True)]
            )
        if self.behind is None:
            return work
        assert results is not None
        return ThenAllReduce(work, self.behind, results)

    @property
    def defers(self) -> bool:
        """Whether reductions have a second part, which may be left to a later backward: ``among_near``."""
        return self.behind is not None or self.route is not None

    @property
    def among_near(self) -> Self:
        """Those of the first part: without replicas, and without the way to the owners in other groups."""
        if self.route is None:
            return replace(self, replicate=None, replicas=None)
        return replace(self, replicate=None, replicas=None, route=None, rows=self.route.rows)

    @staticmethod
    def _scratch(among: Collectives, result: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor | None:
        nbytes = among.scratch_nbytes(BufferRole.REDUCE, gradients.numel(), gradients.dtype, result.dtype)
        return torch.empty(nbytes, dtype=torch.uint8, device=gradients.device) if nbytes else None


@dataclass(frozen=True, slots=True)
class Route:
    """Who sends what between the shards of masters and those of parameters, where fewer ranks share the latter.

    The ``k``-th of ``n`` near ranks has the ``k``-th of ``n`` equal parts of a unit: the shards of ``rows`` owners, one
    behind the other. So it receives theirs, and sends its own to one rank of each group, which has that part.
    """

    owner: Collectives
    """All ranks with a shard of the master."""
    rows: int
    """How many of these shards one rank has."""
    to: tuple[bool, ...]
    """Of each owner, whether this rank's shard goes there."""
    come: tuple[bool, ...]
    """Of each owner, whether its shard comes here."""
    _splits: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def over(cls, owner: Collectives, owners: Sequence[int], near: Groups) -> Self:
        """``owners``: their ranks in the world; ``near``: the groups that divide them."""
        among = set(owners)
        groups = [each for each in near if each[0] in among]
        rows, mine = len(groups), owners[owner.rank]
        first = next(each for each in groups if mine in each).index(mine) * rows
        receivers = {each[owner.rank // rows] for each in groups}
        come = (first <= place < first + rows for place in range(len(owners)))
        return cls(owner, rows, tuple(each in receivers for each in owners), tuple(come))

    def distribute(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start filling ``out`` (``[rows * n]``) with the shards (``[n]``, same dtype) of the owners that come here."""
        to, come = self._splits_of(shard.numel())
        # A block for each rank that this shard goes to: the contract has no way to send one twice.
        return issued(self.owner.all_to_all(out, come, shard.repeat(self.rows), to), "all_to_all", self.owner)

    def collect(self, out: torch.Tensor, rows: torch.Tensor) -> Work:
        """Start the way back of ``rows`` (``[rows * n]``), one for each owner; ``out``: as many, for this shard."""
        to, come = self._splits_of(rows.numel() // self.rows)
        return issued(self.owner.all_to_all(out, to, rows, come), "all_to_all", self.owner)

    def _splits_of(self, numel: int) -> tuple[list[int], list[int]]:
        found = self._splits.get(numel)
        if found is None:
            found = self._splits[numel] = [numel * each for each in self.to], [numel * each for each in self.come]
        return found


@dataclass(slots=True)
class ThenToOwners:
    """Reductions among near ranks, then each part's on the way to its owner, who takes the mean over all groups."""

    first: Work
    route: Route
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Results (``[n]``), and what the first reduction fills for each (``[rows * n]``)."""
    second: Work | None = None
    """To the owners; None before it was issued."""
    waiting: Sequence[tuple[int, torch.Tensor]] = ()
    """Sums of earlier reductions that were among near ranks alone (``[rows, n]``), each with the column of all pairs'
    parts at which it is added to these."""
    _arriving: torch.Tensor | None = None

    def proceed(self) -> Work:
        """Issue the second, behind the first."""
        if self.second is None:
            self.first.wait()
            parts = [part.view(self.route.rows, -1) for _, part in self.pairs]
            rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            for column, earlier in self.waiting:
                rows.narrow(1, column, earlier.shape[1]).add_(earlier)
            self._arriving = torch.empty_like(rows)
            self.second = self.route.collect(self._arriving.view(-1), rows.view(-1))
        return self.second

    def wait(self) -> None:
        self.proceed().wait()
        arrived, self._arriving = self._arriving, None
        if arrived is not None:
            results = [result for result, _ in self.pairs]
            means = torch.split(arrived.mean(0), [result.numel() for result in results])
            _torch_private.foreach_copy_(results, list(means))


@dataclass(slots=True)
class ThenAllReduce:
    """Reductions over shards, then over the replicas of each shard."""

    first: Work
    replicate: Collectives
    result: torch.Tensor
    second: Work | None = None
    """Over the replicas; None before it was issued."""
    waiting: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """Sums of earlier reductions that were not over the replicas, each with the range of ``result`` that it is added
    to before they add it up."""

    def proceed(self) -> Work:
        """Issue the second, behind the first."""
        if self.second is None:
            self.first.wait()
            for place, earlier in self.waiting:
                place.add_(earlier)
            work = self.replicate.all_reduce(self.result, op=ReduceOp.MEAN)
            self.second = issued(work, "all_reduce", self.replicate)
        return self.second

    def wait(self) -> None:
        self.proceed().wait()


def group_of(config: ShardConfig) -> tuple[PluginChoice, Any | None, Any | None]:
    """The collectives' choice, the process group and the mesh that the configuration names."""
    choice, mesh = config.collectives, config.mesh
    if isinstance(choice, (str, Mapping, Collectives)):
        if mesh is None or mesh.ndim != 1 or isinstance(mesh, WorldMesh):
            return choice, None, mesh
        group = mesh.get_group()
        # Of collectives that were shown as a mesh, these.
        return (group.collectives, None, mesh) if hasattr(group, "collectives") else (choice, group, mesh)
    if isinstance(choice, torch.distributed.ProcessGroup):
        return "auto", choice, mesh
    if type(choice).__name__ == "DeviceMesh":
        return "auto", cast("Any", choice).get_group(), choice
    if isinstance(choice, RankAndSize):
        return "auto", choice, mesh
    return choice, None, mesh


@dataclass(frozen=True, slots=True)
class PlannedRanks:
    """The ranks of a unit by number, before any group of them is made."""

    lists: UnitLists
    divisor: float | None = None
    """What the sum of its gradients is divided by; None for a mean."""
    scope: tuple[int, ...] | None = None
    """The ranks of the model that have the same plain parameters, those of its own groups; None for all."""
    post_forward_size: int | None = None
    """How many ranks gather it for backward, each from the part that it kept; None for all that share it."""

    @property
    def shards(self) -> int:
        return len(self.lists.shard[0])


@dataclass(frozen=True, slots=True)
class ModelRanks:
    """The ranks of a model by number, before any group of them is made. Those of each unit follow from them."""

    strategy: Strategy
    """The configured one; for a single data rank the one that shards nothing."""
    lists: UnitLists
    """Of units without a mesh of their own."""
    cut: UnitLists
    """As ``lists``, but where the strategy shards nothing: the ranks that would share shards."""
    config: ShardConfig
    mesh: WorldMesh | None
    """All ranks, by the dimensions of the mesh; None where the configuration has none with parts of models."""

    @classmethod
    def of(cls, config: ShardConfig, world_size: int, mesh: WorldMesh | None) -> ModelRanks:
        """The ranks that ``config`` shards over, of ``world_size``.

        Raises:
            ConfigError: a strategy with groups does not say how many ranks share a shard, or the mesh does not fit it.
            WorldSizeError: that many do not divide the world.
        """
        if mesh is None:
            strategy = Strategy.NO_SHARD if world_size == 1 else config.strategy
            lists = UnitLists(*_rank_lists(config, strategy, world_size), [list(range(world_size))])
            if strategy.joins:
                lists = lists.joined
                _refuse_single(lists, config)
            return cls(strategy, lists, lists, config, None)
        cut = lists_of(config, config.strategy, mesh)
        _refuse_single(cut, config)
        strategy = Strategy.NO_SHARD if cut.data_ranks == 1 else config.strategy
        return cls(strategy, lists_of(config, strategy, mesh), cut, config, mesh)

    def of_unit(self, owner: ModuleParameters, mesh: DeviceMesh | None, rank: int, *, reads: bool) -> PlannedRanks:
        """The ranks of a unit of ``owner``. ``mesh``: of its parameters alone, who have a mean over that then.

        ``reads``: whether it is gathered for backward.

        Raises ConfigError: ``mesh``, or what a policy gave the module, is none of this model's; or the number of ranks
        that gather it for backward does not divide that of its shards.
        """
        overrides, module = owner.overrides, owner.name or "(root)"
        choice = overrides.get("gradient_divisor")
        value = overrides.get("mesh") if mesh is None else mesh
        lists, divisor, scope = self.lists, None, None
        if value is not None:
            where = f"The mesh of '{module}'"
            world = self.mesh
            if world is None:
                if self.config.mesh is None:
                    raise ConfigError(f"{where} needs the model's own. Give it: ShardConfig(mesh=..., shard=...).")
                world = world_mesh(self.config.mesh)
            replicate = () if mesh is not None else self.config.replicate or ()
            lists = override_lists(world, self.cut, value, replicate, where)
            scope = lists.of(rank)
        if mesh is None and (choice is not None or value is not None):
            divisor = divisor_of("data" if choice is None else choice, lists, self.cut)
        if value is not None and self.strategy.joins:
            lists = lists.joined
        if mesh is None and value is not None and self.strategy is Strategy.NO_SHARD:
            lists = lists.whole
        releases = overrides.get("reshard_after_forward", self.config.reshard_after_forward)
        size, shards = None, len(lists.shard[0])
        if self.strategy is Strategy.HPZ and lists.near is not None and releases is None:
            size = len(lists.near[0]) if reads else None
        if isinstance(releases, int) and not isinstance(releases, bool) and shards > 1:
            if shards % releases:
                raise ConfigError(
                    f"reshard_after_forward={releases} for '{module}' (rank {rank}) is the number of ranks that keep "
                    f"it whole together, and does not divide the {shards} that share its shards. Give a divisor of "
                    f"{shards}, True, False or None."
                )
            size = releases if reads and 1 < releases < shards else None
        return PlannedRanks(lists, divisor, scope, size)

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters stay whole from one optimizer's step to the next."""
        return self.strategy is not Strategy.NO_SHARD and self.config.keeps_parameters

    @property
    def routes(self) -> bool:
        """Whether fewer ranks share the parameters that compute than masters: those of ``near``."""
        return self.lists.near is not None and self.strategy is not Strategy.HPZ

    @property
    def batch_lists(self) -> list[list[int]]:
        """Ranks that get the same samples: those with one place among data ranks, and different parts of the model."""
        places: dict[int, list[int]] = {}
        for each in (*self.cut.shard, *self.cut.replicate):
            for place, rank in enumerate(each):
                places.setdefault(rank, []).append(place)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(places):
            found.setdefault(tuple(places[rank]), []).append(rank)
        return list(found.values())


def _refuse_single(lists: UnitLists, config: ShardConfig) -> None:
    """Raise ConfigError where groups of a strategy that is about what they have in common are single ranks."""
    if lists.near is not None and len(lists.near[0]) == 1:
        instead = Strategy.SHARD_GRAD_OP if config.strategy is Strategy.HPZ else Strategy.ZERO1
        raise ConfigError(
            f"The groups that share parameters under strategy {config.strategy.value!r} are of one rank each. Give "
            f"larger ones by shard_size= or mesh=, or write {instead.value!r}, which is what that comes to."
        )


def _rank_lists(config: ShardConfig, strategy: Strategy, world_size: int) -> tuple[Groups, Groups]:
    """The ranks of each shard group, and those of each replicate group, where no dimensions are named."""
    everyone = list(range(world_size))
    if strategy is Strategy.NO_SHARD:
        return [[rank] for rank in everyone], [everyone]
    if not strategy.grouped:
        return [everyone], [[rank] for rank in everyone]
    if config.mesh is not None:
        rows = config.mesh.mesh.tolist()
        if sorted(rank for row in rows for rank in row) != everyone:
            raise ConfigError(
                f"A mesh for {strategy.value} must hold every one of the {world_size} ranks once, but it holds {rows}. "
                "Make it with init_device_mesh over the whole world."
            )
    else:
        size = config.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not size:
            raise ConfigError(
                f"{strategy.value} needs to know how many ranks share a shard: LOCAL_WORLD_SIZE is not set. "
                "Set shard_size= or mesh=."
            )
        if world_size % size:
            raise WorldSizeError(
                f"{world_size} ranks cannot be divided into shard groups of {size}. Choose a shard_size that divides "
                f"{world_size}."
            )
        rows = [everyone[start : start + size] for start in range(0, world_size, size)]
    return rows, [list(column) for column in zip(*rows, strict=True)]


class FormedGroups:
    """The communicators of a model's units, one for each set of ranks. All ranks make them, in one order."""

    def __init__(self, ranks: ModelRanks, units: Iterable[PlannedRanks], world: Collectives) -> None:
        self.world = world
        self._lists = ranks.lists
        self._routes = ranks.routes
        #: Those that were made here, in order; not ``world``.
        self.made: list[Collectives] = []
        self._groups: dict[tuple[tuple[int, ...], ...], Collectives | None] = {}
        self._ranks: dict[tuple[int, float | None], UnitRanks] = {}
        #: The ranks of units without a mesh of their own.
        self.model = self.of(PlannedRanks(ranks.lists))
        for each in units:
            self.of(each)
            self.post_forward_ranks(each)
        #: Ranks that get the same samples as this one, and have other parts of the model; None where there are none.
        self.batch = self._group(ranks.batch_lists)

    def of(self, planned: PlannedRanks) -> UnitRanks:
        lists, divisor = planned.lists, planned.divisor
        found = self._ranks.get((id(lists), divisor))
        if found is None:
            owner, replicate = self._group(lists.shard), self._group(lists.replicate)
            near = self._group(lists.near) if self._routes and lists.near is not None else None
            # Groups along a mesh of their own have other parameters each.
            own = lists is not self._lists and lists is not self._lists.whole
            ep_degree = self.world.world_size // lists.data_ranks if own else 1
            joined = lists.data if lists.data_ranks < self.world.world_size else []
            place = next((index for index, each in enumerate(joined) if self.world.rank in each), 0)
            more: dict[str, Any] = {
                "divisor": divisor,
                "label": lists.label,
                "ep_degree": ep_degree,
                "place": place,
                "lists": lists,
            }
            more["replicas"] = self._replicas_beside(replicate)
            if near is None or owner is None:
                found = UnitRanks.over(self.world, owner, replicate, **more)
            else:
                owners = next(each for each in lists.shard if self.world.rank in each)
                route = Route.over(owner, owners, lists.near or [])
                found = UnitRanks.routed(self.world, near, route, replicate, **more)
            # Units with equal ranks have one record, by which their launches are brought together.
            found = next((each for each in self._ranks.values() if each == found), found)
            self._ranks[id(lists), divisor] = found
        return found

    def of_joining(self, ranks: UnitRanks) -> UnitRanks:
        """Those of this model that are as ``ranks``, of a unit that joins it: equal ones have one record."""
        assert ranks.lists is not None
        lists, divisor = ranks.lists, ranks.divisor
        for each in self._ranks.values():
            same = each.lists is not None and each.lists.alike(lists)
            if same and each.divisor == divisor:
                return each
        replicas = self._replicas_beside(ranks.replicate)
        found = self._ranks[id(lists), divisor] = replace(ranks, world=self.world, replicas=replicas)
        return found

    def post_forward_ranks(self, planned: PlannedRanks) -> Collectives | None:
        """The ranks that gather a unit for backward, and this one is among; None for all that share it."""
        size = planned.post_forward_size
        return None if size is None else self._group(planned.lists.post_forward_ranks(size))

    def _replicas_beside(self, replicate: Collectives | None) -> Collectives | None:
        replicas = self.world.replicas
        if replicas is not None and replicate is not None:
            raise ConfigError(
                f"{type(self.world).__name__} averages gradients over other jobs, and {replicate.world_size} ranks of "
                f"this one hold the same shards (rank {self.world.rank}): there are two kinds of replicas. Choose "
                "strategy 'full_shard' or 'shard_grad_op', and start one job for each replica."
            )
        return replicas

    def _group(self, rank_lists: Groups) -> Collectives | None:
        """This rank's group of ``rank_lists``; None for a group of one."""
        size = len(rank_lists[0])
        if size == 1:
            return None
        if size == self.world.world_size:
            return self.world
        key = tuple(map(tuple, rank_lists))
        if key not in self._groups:
            made = self._groups[key] = self.world.partition(rank_lists)
            self.made.append(made)
        return self._groups[key]
