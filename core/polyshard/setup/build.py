"""From a plan to a sharded model: first everything that can be undone, then the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import _torch_private, registry
from ..config import Strategy
from ..errors import StateError
from ..functions.memory import memory_report
from ..interfaces import Collectives, OffloadManager, UnitSpec
from ..planning.answers import refuse_shared_memory
from ..planning.groups import FormedGroups, ModelRanks, UnitRanks
from ..planning.placements import OwnPlacements, Placings
from ..planning.plan import MODULE_STATE_ATTRIBUTE, GroupedModules, modules_in, names_in
from ..planning.units import ChosenPlugins, PlannedModule, PlannedUnit
from ..runtime.budget import Budget, CudaMemory, PlannedMemory
from ..runtime.buffers import piece_in, view_of
from ..runtime.extended import ExtendedUnit
from ..runtime.grouped import GroupedState, hooks_of
from ..runtime.guards import RegistrationGuard
from ..runtime.module_state import ModuleState, merge_on_use
from ..runtime.order import ExecutionOrder
from ..runtime.parameters import LazyParameters
from ..runtime.peers import peers_of
from ..runtime.placed import PlacedUnit
from ..runtime.root import Root
from ..runtime.states import Reshard
from ..runtime.streams import streams_for
from ..runtime.unit import Unit
from .materialize import Materializer, look_inside, place_buffers, place_master, try_codecs
from .request import Request

#: Attribute under which a module that is in pieces holds what happened.
_BROKEN_ATTRIBUTE = "_polyshard_broken"


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Everything about a sharded model that is known before it changes."""

    request: Request
    plugins: ChosenPlugins
    ranks: ModelRanks
    modules: tuple[PlannedModule, ...]
    """Those that own units, the root first."""

    @property
    def signature(self) -> object:
        """Equal for models that can share collectives."""
        plugins, lists = self.plugins, self.ranks.lists
        code = registry.fingerprint(plugins.used[0])
        return code, plugins.collectives_choice, plugins.context.process_group, (lists.shard, lists.replicate)


class Build:
    """One model on its way from a plan: groups of ranks, then masters, then the root.

    Every rank makes it, calls ``prepare``, then ``finish``; or ``close``, where that is not to be.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.plan = plan
        self._request, self._config = plan.request, plan.request.config
        self._device = plan.plugins.context.device
        units = [unit.ranks for each in plan.modules for unit in each.units]
        self._groups = FormedGroups(plan.ranks, units, plan.plugins.collectives)
        # Those that are made before the model changes, materialised or offloaded: of each module, by its name.
        self._masters: dict[str, list[torch.Tensor]] = {}

    def prepare(self) -> None:
        """Initialise meta parameters, and place the masters that are offloaded.

        Takes memory for shards alone: the whole parameters stay until ``finish``.

        Raises:
            Exception: of an initializer, an offload manager, or for want of memory. Who put back what ``remember``
                tells has the model as it was, but for values that ``sync_module_states`` sent.
        """
        modules, world = self.plan.modules, self._groups.world
        for each in modules:
            for unit, parameter in each.placed_parameters:
                if parameter.extended:
                    look_inside(parameter, parameter.original, self._groups.of(unit.ranks))
        if not self._request.stays_on_meta:
            materializer = Materializer(
                self._device,
                self._request.initializer,
                self._groups.of,
                from_first=self._config.sync_module_states,
            )
            self._masters = materializer.masters_of(modules)
        for each in modules:
            if each.offloads:
                self._masters[each.name] = [self._offloaded(each, unit) for unit in each.units]
        try_codecs(modules, world)
        refuse_shared_memory(self._all_offloaded(), world.rank)

    def finish(self) -> Root:
        """Make the model's parameters shards, and put the hooks on it.

        Memory peaks at the shards plus one module: parameters are cut module by module.

        Raises:
            Exception: for want of memory, or of a listener. Where parameters were cut, memory of the others is let go
                of, and every later use of the model is refused.
        """
        cuts = False
        device_type = "cpu" if self._device.type == "meta" else self._device.type
        placings = Placings(self.plan.ranks, self._groups, device_type)
        signature, events = self.plan.signature, self.plan.plugins.events
        try:
            made: dict[nn.Module, ModuleState] = {}
            for each in self.plan.modules:
                masters = [self._master(each, unit) for unit in each.units]
                cuts = True
                made[each.module] = (GroupedState if isinstance(each.module, GroupedModules) else ModuleState)(
                    each.name,
                    each.module,
                    self._units(each, masters, placings),
                    input_cast=each.input_cast,
                    output_cast=each.output_cast,
                    full_precision_in_eval=each.full_precision_in_eval,
                    signature=signature,
                    parent=None if each.parent is None else made[each.parent],
                    reads_in_backward=each.reads_in_backward,
                    releases_after_backward=not self.plan.ranks.keeps_parameters,
                )
                if each.parent is not None:
                    merge_on_use(made[each.module], made[each.parent])
            root = self._join(made, signature)
            if events.active:
                events.after_shard(self._request.module)
        except BaseException as error:
            if cuts:
                self.give_up(f"{type(error).__name__}: {error}")
            raise
        return root

    def give_up(self, reason: str) -> None:
        """Refuse every later use of the model, which is in pieces and stays so."""
        for module in self._request.module.modules():
            if _BROKEN_ATTRIBUTE not in module.__dict__:
                module.register_forward_pre_hook(_refuse_forward, prepend=True)
                module.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
            module.__dict__[_BROKEN_ATTRIBUTE] = f"{reason} (rank {self._groups.world.rank})"

    def close(self) -> None:
        """Close what was made for a model that was not built. Every rank calls it."""
        for collectives in self._owned:
            collectives.close()

    @property
    def _owned(self) -> tuple[Collectives, ...]:
        """What is closed with the model: parts before wholes, and not what the user made."""
        plugins = self.plan.plugins
        constructed = plugins.collectives_choice is not plugins.collectives
        return (*self._groups.made, *((self._groups.world,) if constructed else ()))

    def _join(self, made: Mapping[nn.Module, ModuleState], signature: object) -> Root:
        """The root of the module states that were ``made``, and of those inside the model that were there before."""
        config, model, plan, groups = self._config, self._request.module, self.plan, self._groups
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
            ranks_of = groups.of_joining if there.signature == signature else None
            there.join(", ".join(names[there]), ranks_of, names_of)
        _share_post_forward_ranks(state for state in states if state.signature == signature)
        # The root takes the module states, and what they own, from the inner roots.
        inner_roots = dict.fromkeys(state.root for state in states if state.root is not None)
        inner_owned = dict.fromkeys(each for inner_root in inner_roots for each in inner_root.owned)
        root = Root(
            groups.world,
            states,
            streams_for(groups.world),
            ExecutionOrder(config.forward_prefetch, config.backward_prefetch, config.batch_nbytes),
            plan.plugins.events,
            check_ranks=config.check_ranks,
            timeout_s=config.timeout_s,
            peers=peers_of(groups.world) if config.check_ranks else None,
            same_batch=groups.batch,
            data_ranks=plan.ranks.cut.data_ranks,
            shards_gradients=config.shard_gradients,
            owned=(*inner_owned, *self._owned),
            owned_locally=self._request.owned_locally.union(*(each.owned_locally for each in inner_roots)),
        )
        if config.reshard_after_forward == "auto" and plan.ranks.strategy is not Strategy.NO_SHARD:
            planned = PlannedMemory(lambda: memory_report(root).total_nbytes())
            meter = CudaMemory(self._device) if self._device.type == "cuda" else planned
            root.budget = Budget(config.memory_budget, meter)
            root.budget_reason = root.budget.reason
        for module_state in made.values():
            for module in module_state.modules:
                hooks_of(module_state, module).attach()
                module.__dict__[MODULE_STATE_ATTRIBUTE] = module_state
        known = [each.registrations for each in inner_roots if each.registrations is not None]
        root.registrations = RegistrationGuard(root, states, self._request.ignored_modules, known)
        return root

    def _master(self, module: PlannedModule, unit: PlannedUnit) -> torch.Tensor:
        """The master of ``unit``, the next one of ``module``: made before, and let go of here, or cut now."""
        made = self._masters.get(module.name)
        return made.pop(0) if made else _cut(unit, self._groups.of(unit.ranks), self._device)

    def _offloaded(self, module: PlannedModule, unit: PlannedUnit) -> torch.Tensor:
        """The master of ``unit`` where the offload manager has it; the model stays as it is.

        Raises:
            PluginContractError: ``place`` returned what no parameter can view, or a manager lost values.
        """
        master = self._master(module, unit)
        if unit.offloaded and self._has_values(master):
            master = place_master(module.offload, unit, master, self._groups.world.rank)
        return master

    def _all_offloaded(self) -> Iterator[tuple[OffloadManager, UnitSpec, torch.Tensor]]:
        """All masters of the model that are offloaded, those of modules that are sharded already too."""
        for each in self.plan.modules:
            if each.offloads:
                for planned, master in zip(each.units, self._masters[each.name], strict=True):
                    if planned.offloaded and self._has_values(master):
                        yield each.offload, planned.spec, master
        # A walk over all modules takes as long as a hundredth of sharding.
        modules = self._request.module.modules() if self._request.composes else ()
        for state in dict.fromkeys(inner.__dict__.get(MODULE_STATE_ATTRIBUTE) for inner in modules):
            for unit in () if state is None else state.units:
                if unit.offloaded and self._has_values(unit.master):
                    yield unit.offload, unit.spec, unit.master

    def _has_values(self, master: torch.Tensor) -> bool:
        """Or is to have them now: where all are pretended, managers are asked all the same."""
        return not (self._request.stays_on_meta and master.is_meta)

    def _reshard_policy(self, module: PlannedModule, unit: PlannedUnit) -> Reshard:
        if not unit.is_cut or self.plan.ranks.keeps_parameters:
            return Reshard.NEVER
        if unit.ranks.post_forward_size is not None:
            return Reshard.PARTLY
        override = module.overrides.get("reshard_after_forward", self._config.reshard_after_forward)
        if isinstance(override, bool):
            return Reshard.ALWAYS if override else Reshard.NEVER
        if isinstance(override, int):
            # What a group of one keeps is whole.
            return Reshard.NEVER if override == 1 else Reshard.ALWAYS
        # "auto", too, begins as the strategy says.
        return Reshard.UNLESS_TURNING if self.plan.ranks.strategy.reshards_after_forward else Reshard.NEVER

    def _units(self, module: PlannedModule, masters: list[torch.Tensor], placings: Placings) -> list[Unit]:
        """The units of one module: its parameters become views of ``masters``, and let go of what they held."""
        if module.parent is not None:
            for inner in module.modules:
                inner.__dict__["_parameters"] = LazyParameters(inner._parameters)
        units: list[Unit] = []
        for planned, master in zip(module.units, masters, strict=True):
            ranks = self._groups.of(planned.ranks)
            unit = (ExtendedUnit if planned.parameters[0].extended else PlacedUnit)(
                planned.spec,
                planned.layout,
                planned.parameters,
                ranks,
                master,
                planned.dtypes,
                module.precision,
                module.offload,
                reshard=self._reshard_policy(module, planned),
                encoding=planned.encoding,
                forms=planned.forms,
                offloaded=planned.offloaded,
                placed=self._request.placements or OwnPlacements(placings, ranks),
                post_forward_ranks=self._groups.post_forward_ranks(planned.ranks),
                launch_numel=planned.launch_numel,
                observers=planned.observers,
            )
            units.append(unit)
        for inner in module.modules:
            if isinstance(inner, nn.RNNBase):
                inner.__dict__.update(_torch_private.rnn_weights(inner, inner._parameters))
            place_buffers(inner, self._device, module.buffer_dtype, keep_meta=self._request.stays_on_meta)
        return units


def _share_post_forward_ranks(states: Iterable[ModuleState]) -> None:
    """Let units that equal ranks gather for backward share launches, whichever calls made their groups."""
    shared: dict[tuple[int, int], Collectives] = {}
    for unit in (unit for state in states for unit in state.units):
        if unit.post_forward_ranks is not None:
            # Units with a mesh of their own have other neighbours.
            key = id(unit.ranks.owner), unit.post_forward_ranks.world_size
            unit.use_post_forward_ranks(shared.setdefault(key, unit.post_forward_ranks))


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
            part = group[piece.slot].original.detach()
            if slot.shape:
                part = piece_in(part, slot, piece.start, piece.stop)
            view_of(master, tuple(part.shape), part.stride(), piece.shard_offset).copy_(part)
    return master


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
