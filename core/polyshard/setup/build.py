"""From a plan to a sharded model: first everything that can be undone, then the model itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from ..config import ShardConfig, Strategy
from ..errors import ConfigError, StateError
from ..events import Events
from ..functions.memory import memory_report
from ..interfaces import Collectives, OffloadManager, UnitSpec
from ..planning.answers import refuse_shared_memory
from ..planning.extensions import insides_of
from ..planning.groups import FormedGroups, ModelRanks, UnitRanks
from ..planning.parts import ParameterPlace
from ..planning.placements import OwnPlacements, Placings
from ..planning.plan import MODULE_STATE_ATTRIBUTE, GroupedModules, ManagedParameter, modules_in, names_in
from ..planning.units import PlannedModule, PlannedUnit
from ..runtime.bindings import LazyParameters
from ..runtime.budget import Budget, CudaMemory, PlannedMemory
from ..runtime.buffers import piece_in, view_of
from ..runtime.extended import ExtendedUnit
from ..runtime.grouped import GroupedState, hooks_of
from ..runtime.guards import RegistrationGuard
from ..runtime.module_state import ModuleState, merge_on_use
from ..runtime.order import ExecutionOrder
from ..runtime.peers import peers_of
from ..runtime.placed import PlacedUnit, Placements
from ..runtime.root import Root
from ..runtime.states import Reshard
from ..runtime.streams import streams_for
from ..runtime.unit import Unit
from .materialize import Initializer, materialize, park, place_buffers, remember, try_codecs


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked to shard."""

    module: nn.Module
    """A module, or ``GroupedModules``."""
    config: ShardConfig
    initializer: Initializer | None
    ignored_modules: Collection[nn.Module]
    ignored_parameters: Collection[nn.Parameter]
    composes: bool
    """Whether modules inside may be sharded already, and become part of the new root."""
    placements: Placements | None = None
    """How its parameters lie, where a face says so."""
    placed: Mapping[nn.Parameter, ParameterPlace] = field(default_factory=dict)
    """What the face says of parameters."""
    optimizers: Collection[torch.optim.Optimizer] = ()
    """Made before, and to hold the parameters that are made."""
    stays_on_meta: bool = False
    """Whether parameters and buffers on the meta device stay there until somebody gives them memory."""

    @property
    def owned_locally(self) -> frozenset[nn.Parameter]:
        """Ignored parameters of which each rank has one of its own.

        Raises:
            ConfigError: ``ignored_parameters`` says something else than ``"replicated"`` or ``"local"`` of one.
        """
        said = self.ignored_parameters if isinstance(self.ignored_parameters, Mapping) else {}
        for parameter, word in said.items():
            if word not in ("replicated", "local"):
                raise ConfigError(
                    f"ignored_parameters says {word!r} of a parameter of shape {tuple(parameter.shape)}. Write "
                    "'replicated' where all ranks train one, or 'local' where each has one of its own (an expert)."
                )
        return frozenset(parameter for parameter, word in said.items() if word == "local")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Everything about a sharded model that is known before it changes."""

    request: Request
    ranks: ModelRanks
    device: torch.device
    modules: tuple[PlannedModule, ...]
    """Those that own units, the root first."""
    events: Events
    signature: object
    """Equal for models that can share collectives."""
    constructs: bool
    """Whether the collectives were constructed for this model, and are closed with it."""


#: Masters that are made before the model changes, materialised or parked: those of each module, by its name.
Masters = dict[str, list[torch.Tensor]]


def prepare(plan: ShardPlan, groups: FormedGroups) -> tuple[Masters, Callable[[], None]]:
    """Initialise meta parameters, and park the masters that offload managers park.

    Takes memory for shards alone: the whole parameters stay until ``build``.

    Returns:
        The masters, and a function that undoes this, but for values that ``sync_module_states`` sent.

    Raises:
        Exception: of an initializer, an offload manager, or for want of memory. The model is as it was.
    """
    modules, device = plan.modules, plan.device
    undo = remember(modules, device)
    try:
        for each in modules:
            for unit, parameter in each.placed_parameters:
                if parameter.extended:
                    _look_inside(parameter, groups.of(unit.ranks))
        masters: Masters = {}
        if not plan.request.stays_on_meta:
            masters = materialize(
                modules,
                groups.of,
                device,
                plan.request.initializer,
                _whole_shapes(plan),
                from_first=plan.request.config.sync_module_states,
            )
        for each in modules:
            if each.parks:
                masters[each.name] = _park(plan, each, masters.pop(each.name, None), groups)
        try_codecs(modules, groups.world)
        refuse_shared_memory(_parked(plan, masters), groups.world.rank)
    except BaseException:
        undo()
        raise
    return masters, undo


def _look_inside(parameter: ManagedParameter, ranks: UnitRanks) -> None:
    """Find out what a parameter that gathers itself is made of.

    Raises:
        ParameterError: it cannot be cut between the ranks, or be trained.
    """
    original = parameter.original
    where = f"'{parameter.names[0]}' on rank {ranks.world.rank}"
    rank, number = ranks.shard_rank, ranks.shard_size
    found = insides_of(original, where, rank, number, trained=original.requires_grad)
    fault = found.fault if parameter.leaf is None else "is a DTensor over ranks with other parts of it, or their copies"
    parameter.insides = replace(found, fault=fault)


def build(plan: ShardPlan, groups: FormedGroups, masters: Masters) -> Root:
    """Make the model's parameters shards, and put the hooks on it. ``masters``: emptied.

    Memory peaks at the shards plus one module: parameters are cut module by module.

    Raises:
        Exception: for want of memory, or of a listener. Where parameters were cut, memory of the others is let go of,
            and every later use of the model is refused.
    """
    cuts = False
    device = plan.device
    placings = Placings(plan.ranks, groups, "cpu" if device.type == "meta" else device.type)
    try:
        made: dict[nn.Module, ModuleState] = {}
        for each in plan.modules:
            own = masters.pop(each.name, None)
            if own is None:
                own = [_cut(unit, groups.of(unit.ranks), device) for unit in each.units]
            cuts = True
            made[each.module] = (GroupedState if isinstance(each.module, GroupedModules) else ModuleState)(
                each.name,
                each.module,
                _build_units(plan, each, own, groups, placings),
                input_cast=each.input_cast,
                output_cast=each.output_cast,
                full_precision_in_eval=each.full_precision_in_eval,
                signature=plan.signature,
                parent=None if each.parent is None else made[each.parent],
                reads_in_backward=each.reads_in_backward,
            )
            if each.parent is not None:
                merge_on_use(made[each.module], made[each.parent])
        root = _join(plan, groups, made)
        if plan.events.active:
            plan.events.after_shard(plan.request.module)
    except BaseException as error:
        if cuts:
            give_up(plan, groups, f"{type(error).__name__}: {error}")
        raise
    return root


def give_up(plan: ShardPlan, groups: FormedGroups, reason: str) -> None:
    """Refuse every later use of the model, which is in pieces and stays so."""
    mark_broken(plan.request.module, f"{reason} (rank {groups.world.rank})")


def close_groups(plan: ShardPlan, groups: FormedGroups) -> None:
    """Close what was made for a model that was not built. Every rank calls it."""
    for collectives in _groups(plan, groups):
        collectives.close()


def _join(plan: ShardPlan, groups: FormedGroups, made: Mapping[nn.Module, ModuleState]) -> Root:
    """The root of the module states that were ``made``, and of those inside the model that were there before."""
    config, model = plan.request.config, plan.request.module
    names: dict[ModuleState, list[str]] = {}
    for name, inner in model.named_modules():
        state: ModuleState | None = made.get(inner) or inner.__dict__.get(MODULE_STATE_ATTRIBUTE)
        if state is not None:
            names.setdefault(state, []).append(name)
    states, new = list(names), set(made.values())
    known_before = [state for state in states if state not in new]
    # A walk over all modules: only where it tells something.
    names_of = names_in(model) if known_before else None
    for there in known_before:
        ranks_of = groups.of_joining if there.signature == plan.signature else None
        there.join(", ".join(names[there]), ranks_of, names_of)
    _share_neighbours(state for state in states if state.signature == plan.signature)
    # The root takes the module states, and what they own, from the inner roots.
    inner_roots = dict.fromkeys(state.root for state in states if state.root is not None)
    inner_owned = dict.fromkeys(each for inner_root in inner_roots for each in inner_root.owned)
    root = Root(
        groups.world,
        states,
        streams_for(groups.world),
        ExecutionOrder(config.forward_prefetch, config.backward_prefetch, config.batch_nbytes),
        plan.events,
        check_ranks=config.check_ranks,
        timeout_s=config.timeout_s,
        peers=peers_of(groups.world) if config.check_ranks else None,
        same_batch=groups.batch,
        data_ranks=plan.ranks.cut.data_ranks,
        owned=(*inner_owned, *_groups(plan, groups)),
        owned_locally=plan.request.owned_locally.union(*(each.owned_locally for each in inner_roots)),
    )
    if config.reshard_after_forward == "auto" and plan.ranks.strategy is not Strategy.NO_SHARD:
        planned = PlannedMemory(lambda: memory_report(root).total_nbytes())
        meter = CudaMemory(plan.device) if plan.device.type == "cuda" else planned
        root.budget = Budget(config.memory_budget, meter)
        root.budget_reason = root.budget.reason
    for module_state in made.values():
        for module in module_state.modules:
            hooks_of(module_state, module).attach()
            module.__dict__[MODULE_STATE_ATTRIBUTE] = module_state
    known = [each.registrations for each in inner_roots if each.registrations is not None]
    root.registrations = RegistrationGuard(root, states, plan.request.ignored_modules, known)
    return root


def _share_neighbours(states: Iterable[ModuleState]) -> None:
    """Let units that equal ranks gather for backward share launches, whichever calls made their groups."""
    shared: dict[tuple[int, int], Collectives] = {}
    for unit in (unit for state in states for unit in state.units):
        if unit.neighbours is not None:
            # Units with a mesh of their own have other neighbours.
            key = id(unit.ranks.owner), unit.neighbours.world_size
            unit.use_neighbours(shared.setdefault(key, unit.neighbours))


def _groups(plan: ShardPlan, groups: FormedGroups) -> tuple[Collectives, ...]:
    """What is closed with the model: parts before wholes, and not what the user made."""
    return (*groups.made, *((groups.world,) if plan.constructs else ()))


def _sharded_units(request: Request) -> Iterator[Unit]:
    """The units of modules inside the model that were sharded before."""
    # A walk over all modules takes as long as a hundredth of sharding.
    modules = request.module.modules() if request.composes else ()
    for state in dict.fromkeys(inner.__dict__.get(MODULE_STATE_ATTRIBUTE) for inner in modules):
        if state is not None:
            yield from state.units


def _parked(
    plan: ShardPlan, masters: Mapping[str, list[torch.Tensor]]
) -> Iterator[tuple[OffloadManager, UnitSpec, torch.Tensor]]:
    """All masters of the model that managers park, those of modules that are sharded already too."""
    for each in plan.modules:
        if each.parks:
            for planned, master in zip(each.units, masters[each.name], strict=True):
                if planned.parked and not (plan.request.stays_on_meta and master.is_meta):
                    yield each.offload, planned.spec, master
    for unit in _sharded_units(plan.request):
        if unit.parks and not (plan.request.stays_on_meta and unit.master.is_meta):
            yield unit.offload, unit.spec, unit.master


def _whole_shapes(plan: ShardPlan) -> dict[nn.Parameter, tuple[int, ...]]:
    parameters = [parameter.original for each in plan.modules for _, parameter in each.placed_parameters]
    shapes = {parameter: tuple(parameter.shape) for parameter in parameters}
    for unit in _sharded_units(plan.request):
        for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
            shapes[parameter.original] = slot.shape if parameter.part is None else parameter.part.shape
    return shapes


def _reshard_policy(plan: ShardPlan, module: PlannedModule, unit: PlannedUnit) -> Reshard:
    if not unit.is_cut:
        return Reshard.NEVER
    if unit.ranks.post_forward_size is not None:
        return Reshard.PARTLY
    override = module.overrides.get("reshard_after_forward", plan.request.config.reshard_after_forward)
    if isinstance(override, bool):
        return Reshard.ALWAYS if override else Reshard.NEVER
    if isinstance(override, int):
        # What a group of one keeps is whole.
        return Reshard.NEVER if override == 1 else Reshard.ALWAYS
    # "auto", too, begins as the strategy says.
    return Reshard.UNLESS_TURNING if plan.ranks.strategy.reshards_after_forward else Reshard.NEVER


def _park(
    plan: ShardPlan, module: PlannedModule, masters: list[torch.Tensor] | None, groups: FormedGroups
) -> list[torch.Tensor]:
    """The masters of one module, each where its offload manager has it; the model stays as it is.

    ``masters``: emptied; None where the parameters hold the values.

    Raises:
        PluginContractError: ``place`` returned what no parameter can view, or a manager lost values.
    """
    if masters is not None:
        # Let go of one by one: the manager makes its own copy of each.
        masters.reverse()
    placed = []
    for unit in module.units:
        shard = masters.pop() if masters is not None else _cut(unit, groups.of(unit.ranks), plan.device)
        if unit.parked and not (plan.request.stays_on_meta and shard.is_meta):
            shard = park(module.offload, unit, shard, groups.world.rank)
        placed.append(shard)
    return placed


def _build_units(
    plan: ShardPlan, module: PlannedModule, masters: list[torch.Tensor], groups: FormedGroups, placings: Placings
) -> list[Unit]:
    """The units of one module: its parameters become views of ``masters`` (emptied), and let go of what they held."""
    if module.parent is not None:
        for inner in module.modules:
            inner.__dict__["_parameters"] = LazyParameters(inner._parameters)
    recurrent = [inner for inner in module.modules if isinstance(inner, nn.RNNBase)]
    for rnn in recurrent:
        _torch_private.drop_rnn_references(rnn)
    masters.reverse()
    units: list[Unit] = []
    for planned in module.units:
        ranks = groups.of(planned.ranks)
        unit = (ExtendedUnit if planned.parameters[0].extended else PlacedUnit)(
            planned.spec,
            planned.layout,
            planned.parameters,
            ranks,
            masters.pop(),
            planned.dtypes,
            module.caster,
            module.offload,
            reshard=_reshard_policy(plan, module, planned),
            wire=planned.wire,
            forms=planned.forms,
            parks=planned.parked,
            placed=plan.request.placements or OwnPlacements(placings, ranks),
            neighbours=groups.neighbours(planned.ranks),
            launch_numel=planned.launch_numel,
            observers=planned.observers,
        )
        units.append(unit)
    for rnn in recurrent:
        rnn.__dict__.update(_torch_private.rnn_weights(rnn, rnn._parameters))
    for inner in module.modules:
        place_buffers(inner, plan.device, module.buffer_dtype, keep_meta=plan.request.stays_on_meta)
    return units


def _cut(unit: PlannedUnit, ranks: UnitRanks, device: torch.device) -> torch.Tensor:
    group, layout = unit.parameters, unit.layout
    if group[0].extended:
        # Their unit cuts them.
        return torch.empty(layout.shard_numel, dtype=group[0].original.dtype, device="meta")
    if any(parameter.original.is_meta for parameter in group):
        # It stays there until all of the group's parameters have memory.
        device = torch.device("meta")
    with torch.inference_mode(False), torch.no_grad():
        master = torch.zeros(layout.shard_numel, dtype=group[0].original.dtype, device=device)
        for piece in layout.pieces(ranks.shard_rank):
            slot = layout.slots[piece.slot]
            source = group[piece.slot].original.detach()
            if slot.dim:
                part = piece_in(source, slot, piece.start, piece.stop)
                view_of(master, tuple(part.shape), part.stride(), piece.shard_offset).copy_(part)
                continue
            if source.stride() != slot.stride:
                source = source.contiguous()
            elements = source.as_strided((slot.numel,), (1,), source.storage_offset())[piece.start : piece.stop]
            master.narrow(0, piece.shard_offset, piece.numel).copy_(elements)
    return master


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
