"""From what ranks agreed on to a sharded model: first all that can be taken back, then the model itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .config import ShardConfig, Strategy
from .engine.cutting.broken import mark_broken
from .engine.cutting.build import build_units, cut, park
from .engine.cutting.materialize import Initializer, materialize, remember
from .engine.cutting.trials import try_codecs
from .engine.planning.answers import refuse_shared_memory
from .engine.planning.draft import Draft
from .engine.planning.plan import STAGE_ATTRIBUTE, PlannedStage, names_in
from .engine.planning.ranks import RankGrid
from .engine.step.budget import Budget, CudaMemory, PlannedMemory
from .engine.step.forward import Forward
from .engine.step.part import lend
from .engine.step.registrations import Registrations
from .engine.step.resting import Resting
from .engine.step.root import Root
from .engine.step.schedule import Schedule
from .engine.step.stage import Stage
from .engine.step.uncopied import refuse_copies
from .engine.step.unit import Reshard
from .engine.surface.report import memory_report
from .engine.transport.lanes import lanes_for
from .engine.transport.peers import peers_of
from .engine.transport.watch import Watch
from .events import Events
from .interfaces import Collectives, OffloadManager, UnitSpec


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything about a sharded model that is known before it changes."""

    module: nn.Module
    config: ShardConfig
    strategy: Strategy
    device: torch.device
    initializer: Initializer | None
    ignored_modules: Collection[nn.Module]
    drafts: tuple[Draft, ...]
    events: Events
    signature: object
    """Equal for models that can share collectives."""
    constructs: bool
    """Whether the collectives were constructed for this model, and are closed with it."""


#: Masters that are made before the model changes, by stage name: materialised, or parked.
Masters = dict[str, list[torch.Tensor]]


def prepare(blueprint: Blueprint, grid: RankGrid) -> tuple[Masters, Callable[[], None]]:
    """Initialise what is on the meta device and park what a manager parks. The model is as it was when this raises.

    Returns the masters, and what undoes this: to be called if the model is not built after all. Only the shards take
    memory: what they were cut from stays whole until ``build``. What ``sync_module_states`` sent is not taken back.
    """
    drafts, device = blueprint.drafts, blueprint.device
    undo = remember(drafts, device)
    try:
        masters = materialize(
            drafts,
            grid,
            device,
            blueprint.initializer,
            _whole_shapes(blueprint),
            from_first=blueprint.config.sync_module_states,
        )
        for draft in drafts:
            if draft.parks:
                masters[draft.stage.name] = park(draft, masters.pop(draft.stage.name, None), grid, device)
        try_codecs(drafts, grid.world, grid.shard_size)
        refuse_shared_memory(_parked(blueprint, masters), grid.world.rank)
    except BaseException:
        undo()
        raise
    return masters, undo


def _parked(
    blueprint: Blueprint, masters: Mapping[str, list[torch.Tensor]]
) -> Iterator[tuple[OffloadManager, UnitSpec, torch.Tensor]]:
    """All masters of the model that managers park, those of modules that are sharded already too."""
    for draft in blueprint.drafts:
        if draft.parks:
            for unit, master in zip(draft.units, masters[draft.stage.name], strict=True):
                if unit.parked:
                    yield draft.offload, unit.spec, master
    for inner in blueprint.module.modules():
        if STAGE_ATTRIBUTE in inner.__dict__:
            for unit in inner.__dict__[STAGE_ATTRIBUTE].units:
                if unit.parks:
                    yield unit.offload, unit.spec, unit.master


def build(blueprint: Blueprint, grid: RankGrid, masters: Masters) -> Root:
    """Make the model's parameters shards, and put the hooks on it.

    Where this raises with parameters in pieces, the others' memory is let go of, and every later use of the model is
    refused by name.
    """
    cuts = False
    device = blueprint.device
    try:
        made: dict[nn.Module, Stage] = {}
        for draft in blueprint.drafts:
            plan = draft.stage
            own = masters.pop(plan.name, None)
            if own is None:
                own = cut(draft, grid, device)
            cuts = True
            units = build_units(draft, own, grid, device, _reshards(blueprint, plan))
            made[plan.module] = Stage(
                plan.name,
                plan.module,
                units,
                input_cast=draft.input_cast,
                output_cast=draft.output_cast,
                full_precision_in_eval=draft.full_precision_in_eval,
                signature=blueprint.signature,
                host=None if plan.host is None else made[plan.host],
                reads_in_backward=draft.reads_in_backward,
            )
            if plan.host is not None:
                lend(made[plan.module], made[plan.host])
        root = _join(blueprint, grid, made)
        if blueprint.events.active:
            blueprint.events.after_shard(blueprint.module)
    except BaseException as error:
        if cuts:
            give_up(blueprint, grid, f"{type(error).__name__}: {error}")
        raise
    return root


def give_up(blueprint: Blueprint, grid: RankGrid, reason: str) -> None:
    """Refuse every later use of the model, which is in pieces and stays so."""
    mark_broken(blueprint.module, f"{reason} (rank {grid.world.rank})")


def close_groups(blueprint: Blueprint, grid: RankGrid) -> None:
    """Close what was made for a model that was not built. Every rank calls it."""
    for collectives in _groups(blueprint, grid):
        collectives.close()


def _join(blueprint: Blueprint, grid: RankGrid, made: Mapping[nn.Module, Stage]) -> Root:
    """The root of the stages that were ``made``, and of those inside the model that were there before."""
    config = blueprint.config
    lanes = lanes_for(grid.world)
    stages = []
    names_of = names_in(blueprint.module)
    for name, inner in blueprint.module.named_modules():
        if inner in made:
            stages.append(made[inner])
        elif STAGE_ATTRIBUTE in inner.__dict__:
            there: Stage = inner.__dict__[STAGE_ATTRIBUTE]
            there.join(name, grid if there.signature == blueprint.signature else None, names_of)
            stages.append(there)
    # A root takes the stages from the inner ones.
    inner = dict.fromkeys(each for stage in stages if isinstance(stage.step, Root) for each in stage.step.owned)
    owned = (*inner, *_groups(blueprint, grid))
    inner_roots = dict.fromkeys(stage.step for stage in stages if isinstance(stage.step, Root))
    for inner_root in inner_roots:
        if inner_root.rest is not None:
            inner_root.rest.leave()
    root = Root(
        grid.world,
        stages,
        lanes,
        Schedule(config.forward_prefetch, config.backward_prefetch, config.batch_nbytes),
        blueprint.events,
        check_ranks=config.check_ranks,
    )
    root.timeout_s = config.timeout_s
    if config.check_ranks:
        peers = root.recorder.peers = peers_of(grid.world)
        if peers is not None:
            root.recorder.watch = Watch(root.recorder, peers, config.timeout_s)
    if config.reshard_after_forward == "auto" and blueprint.strategy is not Strategy.NO_SHARD:
        planned = PlannedMemory(lambda: memory_report(root).total_nbytes())
        meter = CudaMemory(blueprint.device) if blueprint.device.type == "cuda" else planned
        root.budget = Budget(config.memory_budget, meter)
    root.owned = owned
    for module, stage in made.items():
        Forward(stage).attach()
        module.__dict__[STAGE_ATTRIBUTE] = stage
    refuse_copies(unit for stage in made.values() for unit in stage.units)
    root.rest = Resting(root, stages)
    known = [each.registrations for each in inner_roots if each.registrations is not None]
    root.registrations = Registrations(root, stages, blueprint.ignored_modules, known)
    return root


def _groups(blueprint: Blueprint, grid: RankGrid) -> tuple[Collectives, ...]:
    """What is to be closed with the model: parts before wholes, and not what the user made."""
    parts = [each for each in (grid.shard, grid.replicate) if each is not None and each is not grid.world]
    return (*parts, *((grid.world,) if blueprint.constructs else ()))


def _whole_shapes(blueprint: Blueprint) -> dict[nn.Parameter, tuple[int, ...]]:
    shapes = {
        parameter.original: tuple(parameter.original.shape)
        for draft in blueprint.drafts
        for group in draft.stage.groups
        for parameter in group
    }
    for inner in blueprint.module.modules():
        if STAGE_ATTRIBUTE in inner.__dict__:
            for unit in inner.__dict__[STAGE_ATTRIBUTE].units:
                shapes.update({p.original: s.shape for p, s in zip(unit.parameters, unit.layout.slots, strict=True)})
    return shapes


def _reshards(blueprint: Blueprint, plan: PlannedStage) -> Reshard:
    override = plan.overrides.get("reshard_after_forward", blueprint.config.reshard_after_forward)
    if isinstance(override, bool):
        return Reshard.ALWAYS if override else Reshard.NEVER
    # "auto", too, begins as the strategy says.
    return Reshard.UNLESS_TURNING if blueprint.strategy.reshards_after_forward else Reshard.NEVER
