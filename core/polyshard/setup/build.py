"""Models that a failed call left in pieces: every use of one is refused, and says what happened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from ..config import ShardConfig, Strategy
from ..errors import StateError
from ..events import Events
from ..functions.memory import memory_report
from ..interfaces import Collectives, OffloadManager, UnitSpec
from ..planning.answers import refuse_shared_memory
from ..planning.draft import Draft
from ..planning.groups import RankGrid
from ..planning.layout import FlatLayout
from ..planning.plan import MODULE_STATE_ATTRIBUTE, ManagedParameter, PlannedModule, modules_in, names_in
from ..runtime.bindings import LazyParameters
from ..runtime.budget import Budget, CudaMemory, PlannedMemory
from ..runtime.guards import IdleCallGuard, RegistrationGuard, refuse_copies
from ..runtime.hooks import Forward
from ..runtime.module_state import ModuleState, lend
from ..runtime.order import ExecutionOrder
from ..runtime.peers import peers_of
from ..runtime.recorder import Watch
from ..runtime.root import Root
from ..runtime.streams import streams_for
from ..runtime.unit import Reshard, Unit
from .materialize import Initializer, materialize, place_buffers, remember, try_codecs
from .materialize import park as park_one

#: Attribute under which such a module holds what happened.
_BROKEN_ATTRIBUTE = "_polyshard_broken"


def mark_broken(model: nn.Module, reason: str) -> None:
    """Refuse every later use of ``model`` and of the modules inside it. ``reason``: what happened, and where."""
    for module in model.modules():
        if _BROKEN_ATTRIBUTE not in module.__dict__:
            module.register_forward_pre_hook(_refuse_forward, prepend=True)
            module.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
        module.__dict__[_BROKEN_ATTRIBUTE] = reason


def refuse_broken(model: nn.Module, call: str) -> None:
    """Raise if ``model`` or a module inside it is in pieces.

    Raises:
        StateError: naming it, ``call``, and what happened.
    """
    if not any(_BROKEN_ATTRIBUTE in module.__dict__ for module in modules_in(model)):
        return
    for name, module in model.named_modules():
        reason = module.__dict__.get(_BROKEN_ATTRIBUTE)
        if reason is not None:
            where = f"{type(module).__name__}" + (f" ('{name}')" if name else "")
            raise StateError(
                f"{call}: this {where} cannot be used. Sharding it failed when part of its parameters had been let go "
                f"of: {reason}. Remove the cause and build it anew."
            )


def _refuse_forward(module: nn.Module, args: Any) -> None:
    refuse_broken(module, "forward")


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    refuse_broken(module, "state_dict()")


# From drafts to units: parameters are cut, and what they held is let go of.


def park(draft: Draft, masters: list[torch.Tensor] | None, grid: RankGrid, device: torch.device) -> list[torch.Tensor]:
    """The masters of one module state of which units are parked: those where their manager has them; the model stays as it is.

    ``masters``: emptied; None where the parameters hold the values.

    Raises:
        PluginContractError: ``place`` returned what no parameter can view, or a manager lost values.
    """
    if masters is not None:
        # Let go of one by one: the manager makes its own copy of each.
        masters.reverse()
    placed = []
    for unit, group in zip(draft.units, draft.module_state.groups, strict=True):
        shard = masters.pop() if masters is not None else _cut(group, unit.layout, grid, device)
        placed.append(park_one(draft.offload, unit, shard, grid.world.rank) if unit.parked else shard)
    return placed


def cut(draft: Draft, grid: RankGrid, device: torch.device) -> list[torch.Tensor]:
    """This rank's elements of the parameters of one module state, copied to ``device``; the parameters stay as they are."""
    pairs = zip(draft.module_state.groups, draft.units, strict=True)
    return [_cut(group, unit.layout, grid, device) for group, unit in pairs]


def build_units(
    draft: Draft, masters: list[torch.Tensor], grid: RankGrid, device: torch.device, reshard: Reshard
) -> list[Unit]:
    """The units of one module state: its parameters become views of ``masters`` (emptied), and what they held is let go of."""
    if draft.module_state.parent is not None:
        for module in draft.modules:
            module.__dict__["_parameters"] = LazyParameters(module._parameters)
    recurrent = [module for module in draft.modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        _torch_private.drop_rnn_references(module)
    masters.reverse()
    units = []
    for drafted, group in zip(draft.units, draft.module_state.groups, strict=True):
        unit = Unit(
            drafted.spec,
            drafted.layout,
            group,
            grid,
            masters.pop(),
            drafted.dtypes,
            draft.caster,
            draft.offload,
            reshard=reshard if grid.shard is not None else Reshard.NEVER,
            wire=drafted.wire,
            parks=drafted.parked,
        )
        unit.watch(drafted.observers)
        units.append(unit)
    for module in recurrent:
        module.__dict__.update(_torch_private.rnn_weights(module, module._parameters))
    for module in draft.modules:
        place_buffers(module, device, draft.buffer_dtype)
    return units


def _cut(group: Sequence[ManagedParameter], layout: FlatLayout, grid: RankGrid, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        master = torch.zeros(layout.shard_numel, dtype=group[0].original.dtype, device=device)
        for piece in layout.pieces(grid.shard_rank):
            slot = layout.slots[piece.slot]
            source = group[piece.slot].original.detach()
            if source.stride() != slot.stride:
                source = source.contiguous()
            elements = source.as_strided((slot.numel,), (1,), source.storage_offset())[piece.start : piece.stop]
            master.narrow(0, piece.shard_offset, piece.numel).copy_(elements)
    return master


# From what ranks agreed on to a sharded model: first all that can be taken back, then the model itself.


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


#: Masters that are made before the model changes, by module state name: materialised, or parked.
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
                masters[draft.module_state.name] = park(draft, masters.pop(draft.module_state.name, None), grid, device)
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
            for unit, master in zip(draft.units, masters[draft.module_state.name], strict=True):
                if unit.parked:
                    yield draft.offload, unit.spec, master
    for inner in blueprint.module.modules():
        if MODULE_STATE_ATTRIBUTE in inner.__dict__:
            for unit in inner.__dict__[MODULE_STATE_ATTRIBUTE].units:
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
        made: dict[nn.Module, ModuleState] = {}
        for draft in blueprint.drafts:
            plan = draft.module_state
            own = masters.pop(plan.name, None)
            if own is None:
                own = cut(draft, grid, device)
            cuts = True
            units = build_units(draft, own, grid, device, _reshards(blueprint, plan))
            made[plan.module] = ModuleState(
                plan.name,
                plan.module,
                units,
                input_cast=draft.input_cast,
                output_cast=draft.output_cast,
                full_precision_in_eval=draft.full_precision_in_eval,
                signature=blueprint.signature,
                parent=None if plan.parent is None else made[plan.parent],
                reads_in_backward=draft.reads_in_backward,
            )
            if plan.parent is not None:
                lend(made[plan.module], made[plan.parent])
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


def _join(blueprint: Blueprint, grid: RankGrid, made: Mapping[nn.Module, ModuleState]) -> Root:
    """The root of the module states that were ``made``, and of those inside the model that were there before."""
    config = blueprint.config
    streams = streams_for(grid.world)
    module_states = []
    names_of = names_in(blueprint.module)
    for name, inner in blueprint.module.named_modules():
        if inner in made:
            module_states.append(made[inner])
        elif MODULE_STATE_ATTRIBUTE in inner.__dict__:
            there: ModuleState = inner.__dict__[MODULE_STATE_ATTRIBUTE]
            there.join(name, grid if there.signature == blueprint.signature else None, names_of)
            module_states.append(there)
    # A root takes the module states from the inner ones.
    inner = dict.fromkeys(
        each
        for module_state in module_states
        if isinstance(module_state.step, Root)
        for each in module_state.step.owned
    )
    owned = (*inner, *_groups(blueprint, grid))
    inner_roots = dict.fromkeys(
        module_state.step for module_state in module_states if isinstance(module_state.step, Root)
    )
    for inner_root in inner_roots:
        if inner_root.idle_guard is not None:
            inner_root.idle_guard.leave()
    root = Root(
        grid.world,
        module_states,
        streams,
        ExecutionOrder(config.forward_prefetch, config.backward_prefetch, config.batch_nbytes),
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
    for module, module_state in made.items():
        Forward(module_state).attach()
        module.__dict__[MODULE_STATE_ATTRIBUTE] = module_state
    refuse_copies(unit for module_state in made.values() for unit in module_state.units)
    root.idle_guard = IdleCallGuard(root, module_states)
    known = [each.registrations for each in inner_roots if each.registrations is not None]
    root.registrations = RegistrationGuard(root, module_states, blueprint.ignored_modules, known)
    return root


def _groups(blueprint: Blueprint, grid: RankGrid) -> tuple[Collectives, ...]:
    """What is to be closed with the model: parts before wholes, and not what the user made."""
    parts = [each for each in (grid.shard, grid.replicate) if each is not None and each is not grid.world]
    return (*parts, *((grid.world,) if blueprint.constructs else ()))


def _whole_shapes(blueprint: Blueprint) -> dict[nn.Parameter, tuple[int, ...]]:
    shapes = {
        parameter.original: tuple(parameter.original.shape)
        for draft in blueprint.drafts
        for group in draft.module_state.groups
        for parameter in group
    }
    for inner in blueprint.module.modules():
        if MODULE_STATE_ATTRIBUTE in inner.__dict__:
            for unit in inner.__dict__[MODULE_STATE_ATTRIBUTE].units:
                shapes.update({p.original: s.shape for p, s in zip(unit.parameters, unit.layout.slots, strict=True)})
    return shapes


def _reshards(blueprint: Blueprint, plan: PlannedModule) -> Reshard:
    override = plan.overrides.get("reshard_after_forward", blueprint.config.reshard_after_forward)
    if isinstance(override, bool):
        return Reshard.ALWAYS if override else Reshard.NEVER
    # "auto", too, begins as the strategy says.
    return Reshard.UNLESS_TURNING if blueprint.strategy.reshards_after_forward else Reshard.NEVER
