"""Settings and engine parts of one FSDP instance: a wrapper, or what was left in a module sharded in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from polyshard.errors import ConfigError, DeviceError, StateError, StepAssertionError, UnsupportedError
from polyshard.events import Events
from polyshard.planning.groups import RankGrid
from polyshard.runtime.module_state import ModuleState
from polyshard.runtime.streams import streams_for
from torch import nn

from . import _runtime_utils
from ._collectives import collectives_of
from ._common_utils import TrainingState, clean_tensor_name
from ._exec_order import CheckedSchedule, ForwardOrder, UnitSchedule, checks_order
from ._flat_param import _FSDP_USE_FULL_PREC_IN_EVAL, FlatParameter, FlatParamHandle
from ._forward import FSDPForward
from ._groups import HYBRID_SHARDING_STRATEGIES, Groups
from ._idle import IdleUnit
from ._init_utils import Ignored, managed_modules
from ._root import OPTIMIZERS, FSDPRoot
from ._stage import FSDPStage
from ._traversal_utils import _get_fsdp_states
from ._unit import FlatUnit, misplaced_offload
from .api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose for one instance, with what is chosen where the user left it open."""

    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool


class StateDictWalk(Protocol):
    """One instance's part in a walk over modules that makes or loads a state dict."""

    def abandon(self) -> None:
        """Leave a walk that will not go on; nothing without one."""


class FSDPInstance:
    """What a wrapper and a module sharded in place have in common."""

    process_group: Any
    rank: int
    world_size: int
    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    mixed_precision: MixedPrecision
    compute_device: torch.device
    _use_orig_params: bool
    _use_full_prec_in_eval: bool
    _device_mesh: Any
    _groups: Groups
    _ignored: Ignored
    _ignored_modules: set[nn.Module]
    _ignored_params: set[nn.Parameter]
    _is_root: bool | None
    _root: FSDPRoot | None
    _instances: tuple[FSDPInstance, ...]
    """All under the same root; this one alone while that is not known."""
    _handle: FlatParamHandle | None
    _flat_unit: FlatUnit | None
    """The engine's unit over the flat parameter."""
    _stage: FSDPStage
    _forward: FSDPForward
    _state_dict_walk: StateDictWalk | None
    _summoned: bool
    _comm_hook: Callable[..., Any] | None
    _comm_hook_state: object
    _buffers_in_full_precision: bool | None
    _buffer_dtypes: list[tuple[nn.Module, str, torch.dtype]]
    _state_dict_type: StateDictType
    _state_dict_config: StateDictConfig
    _optim_state_dict_config: OptimStateDictConfig

    def _configure(
        self, settings: Settings, groups: Groups, ignored: Ignored, device: torch.device, module: nn.Module
    ) -> None:
        """Take over what was chosen, for an instance that computes on ``device`` with the parameters of ``module``."""
        self.process_group = groups.process_group
        self.rank, self.world_size = groups.rank, groups.world_size
        self.sharding_strategy = settings.sharding_strategy
        self.cpu_offload = settings.cpu_offload
        self.backward_prefetch = settings.backward_prefetch
        self.forward_prefetch = settings.forward_prefetch
        self.limit_all_gathers = settings.limit_all_gathers
        self.mixed_precision = settings.mixed_precision
        self.compute_device = device
        self._use_orig_params = settings.use_orig_params
        self._use_full_prec_in_eval = os.environ.get(_FSDP_USE_FULL_PREC_IN_EVAL, "") == "1"
        self._device_mesh = groups.device_mesh
        self._groups = groups
        self._ignored = ignored
        self._ignored_modules, self._ignored_params = set(ignored.modules), set(ignored.parameters)
        self._forget()
        self._summoned = False
        self._comm_hook = None
        self._comm_hook_state = None
        self._buffers_in_full_precision = None
        self._state_dict_walk = None
        self._state_dict_type = StateDictType.FULL_STATE_DICT
        self._state_dict_config = FullStateDictConfig()
        self._optim_state_dict_config = FullOptimStateDictConfig()
        self._handle = self._flat_unit = None
        self._buffer_dtypes = [
            (holder, key, buffer.dtype)
            for holder in managed_modules(module, ignored)
            for key, buffer in holder._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._handle.flat_param if self._handle is not None else None

    @property
    def _has_params(self) -> bool:
        """Whether it has a flat parameter. Trainers ask."""
        return self._handle is not None

    @property
    def params(self) -> list[FlatParameter]:
        """The flat parameter, or nothing."""
        return [self._handle.flat_param] if self._handle is not None else []

    @property
    def _inter_node_pg(self) -> Any:
        """The group of the replicas of this rank's shards; None where nothing is replicated."""
        return self._groups.replicate_group

    def _training_state(self) -> TrainingState:
        if self._summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD if self._stage.busy else TrainingState.IDLE

    def _become_root(self) -> None:
        """Let this instance be the root of those inside it, unless it is or has one."""
        if self._is_root is not None:
            return
        instances: tuple[FSDPInstance, ...] = tuple(_get_fsdp_states(self._stage.module))
        root = _make_root(self, instances)
        for each in instances:
            each._is_root, each._root, each._instances = each is self, root, instances

    def _forget_root(self) -> None:
        """Let the root be found anew: nothing has run yet."""
        for instance in self._instances:
            instance._forget()

    def _forget(self) -> None:
        self._is_root = self._root = None
        self._instances = (self,)

    def _abandon_state_dicts(self) -> None:
        """Leave every walk over modules under this instance's root that something inside it ended with an exception."""
        for instance in self._instances:
            if instance._state_dict_walk is not None:
                instance._state_dict_walk.abandon()

    def _enter_forward(self) -> None:
        self._become_root()
        if self._summoned:
            # A state dict that failed on its way leaves parameters whole.
            self._abandon_state_dicts()
        if self._summoned:
            raise StateError(
                f"A forward of '{self._stage.name or '(root)'}' inside summon_full_params (rank {self.rank}). Leave "
                "the context first: the forward gathers what it needs."
            )

    @property
    def _ends_by_hook(self) -> bool:
        return self._stage.ends_by_hook

    def _upcoming(self) -> FlatParamHandle | None:
        following = self._stage.upcoming()
        return following.instance._handle if following is not None else None

    def _watch_pending_inputs(self) -> None:
        self._forward.watch_pending_inputs()

    def _leave_idle(self, idle: IdleUnit) -> None:
        assert self._root is not None
        self._root.leave_idle(idle)

    @contextmanager
    def _as_flat_parameters(self) -> Iterator[None]:
        """A context in which the module holds the flat parameter in the place of the parameters that view it."""
        unit = self._flat_unit
        if unit is None:
            yield
            return
        if not self._use_orig_params:
            yield
            unit.take_up_home(refuse_offload=False)
            return
        if not unit.misplaced:
            unit.take_up_changes()
        with unit.without_originals():
            unit.handle.register_flat_param()
            try:
                yield
            finally:
                unit.handle.deregister_flat_param()
        unit.take_up_home(refuse_offload=False)

    def _place_buffers(self) -> None:
        """Move and cast the buffers of every instance under this root, where the mode asks for another dtype."""
        full = self._use_full_prec_in_eval and not self._stage.module.training
        if self._buffers_in_full_precision is full:
            return
        for instance in self._instances:
            instance._cast_buffers(full)
        self._buffers_in_full_precision = full

    def _cast_buffers(self, full_precision: bool) -> None:
        wanted = None if full_precision else self.mixed_precision.buffer_dtype
        original = {(holder, key): dtype for holder, key, dtype in self._buffer_dtypes}
        for holder in managed_modules(self._stage.inner, self._ignored):
            for key, buffer in holder._buffers.items():
                if buffer is None:
                    continue
                dtype = buffer.dtype
                if buffer.is_floating_point():
                    dtype = wanted or original.get((holder, key), dtype)
                if buffer.dtype != dtype or buffer.device != self.compute_device:
                    holder._buffers[key] = buffer.to(device=self.compute_device, dtype=dtype)


def _make_root(instance: FSDPInstance, instances: Sequence[FSDPInstance]) -> FSDPRoot:
    """The root of ``instances``, of which ``instance`` is the outermost.

    Raises:
        StepAssertionError: one inside was used as a root before.
        ConfigError: they differ in a setting that must be the same, or hybrid ones in their process groups.
        StateError: a flat parameter has an optimizer that steps in backward.
        DeviceError: parameters are not where they must be for training.
    """
    _refuse_roots_inside(instance, instances)
    _refuse_heterogeneous(instances)
    _refuse_other_hybrid_groups(instances)
    _refuse_hybrid_beside_others(instance, instances)
    _refuse_stepping_flat(instances)
    _refuse_misplaced(instances)
    _share_collectives(instances)
    world = collectives_of(instance.process_group, instance.compute_device)
    names = {module: name for name, module in instance._stage.module.named_modules()}
    module_states: list[ModuleState] = []
    for each in instances:
        name = clean_tensor_name(f"{names[each._stage.module]}.").rstrip(".")
        each._stage.join(name, None)
        module_states.append(each._stage)
    ahead = 1 if instance.forward_prefetch else 0
    execution_order = UnitSchedule(ahead, 1)
    order = ForwardOrder(_names_of_parameters(instances), world) if checks_order() and world.world_size > 1 else None
    if order is not None:
        handles: dict[ModuleState, FlatParamHandle] = {
            each._stage: each._handle for each in instances if each._handle is not None
        }
        execution_order = CheckedSchedule(ahead, 1, order, handles)
    root = FSDPRoot(
        world,
        module_states,
        streams_for(world),
        execution_order,
        Events([]),
        check_ranks=False,
    )
    root.order = order
    root.stepping = tuple(
        parameter
        for each in instances
        if each._handle is not None
        for parameter in (managed.original for managed in each._handle.parameters)
        if hasattr(parameter, OPTIMIZERS)
    )
    return root


def _refuse_roots_inside(instance: FSDPInstance, instances: Sequence[FSDPInstance]) -> None:
    for each in instances:
        if each is not instance and each._is_root:
            raise StepAssertionError(
                "Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False`: "
                f"an instance inside {type(instance._stage.inner).__name__} ran by itself on rank {instance.rank}. Run "
                "the outermost instance first."
            )


def _refuse_heterogeneous(instances: Sequence[FSDPInstance]) -> None:
    for attribute in _runtime_utils.HOMOGENEOUS_ATTR_NAMES:
        values = {getattr(each, attribute) for each in instances}
        if len(values) > 1:
            raise ConfigError(
                f"Expects one homogeneous value for {attribute} but got {values} (rank {instances[0].rank}). Give "
                "every instance of the model the same."
            )


def _refuse_other_hybrid_groups(instances: Sequence[FSDPInstance]) -> None:
    hybrid = [each for each in instances if each.sharding_strategy in HYBRID_SHARDING_STRATEGIES]
    for each in hybrid:
        for kind, group, wanted in (
            ("intra", each.process_group, hybrid[0].process_group),
            ("inter", each._inter_node_pg, hybrid[0]._inter_node_pg),
        ):
            if group is not wanted:
                raise ConfigError(
                    f"{each.sharding_strategy} {kind}-node process groups do not match: '{each._stage.name}' has "
                    f"another than '{hybrid[0]._stage.name}' (rank {each.rank}). Give every instance of the model the "
                    "same pair of groups, or the same device mesh."
                )


def _refuse_hybrid_beside_others(instance: FSDPInstance, instances: Sequence[FSDPInstance]) -> None:
    """What ends a step is exchanged among the ranks of one instance, which hybrid ones have less of than others."""
    sharding = [each for each in instances if each._flat_unit is not None]
    hybrid = next((each for each in sharding if each.sharding_strategy in HYBRID_SHARDING_STRATEGIES), None)
    other = next((each for each in sharding if each.sharding_strategy not in HYBRID_SHARDING_STRATEGIES), None)
    if hybrid is not None and other is not None:
        names = {module: clean_tensor_name(name) for name, module in instance._stage.module.named_modules()}
        one, another = (names[each._stage.module] or "(root)" for each in (hybrid, other))
        raise UnsupportedError(
            f"'{one}' has {hybrid.sharding_strategy} and '{another}' has {other.sharding_strategy} (rank {other.rank}):"
            " a model that mixes hybrid strategies with others is not served. Give every instance of it the same "
            "strategy."
        )


def _refuse_stepping_flat(instances: Sequence[FSDPInstance]) -> None:
    for each in instances:
        if each._handle is not None and not each._use_orig_params and hasattr(each._handle.flat_param, OPTIMIZERS):
            raise StateError(
                "FSDP optimizer in backward only supported with use_orig_params=True! "
                f"'{each._handle.flat_param._fqns[0]}' on rank {each.rank} is part of a flat parameter that has one."
            )


def _names_of_parameters(instances: Sequence[FSDPInstance]) -> dict[FlatParamHandle, list[str]]:
    names: dict[FlatParamHandle, list[str]] = {}
    for each in instances:
        if each._handle is not None:
            prefix = f"{each._stage.name}." if each._stage.name else ""
            names[each._handle] = [prefix + name for name in each._handle.flat_param._fqns]
    return names


def _refuse_misplaced(instances: Sequence[FSDPInstance]) -> None:
    for each in instances:
        if each._handle is None:
            continue
        device, name = each._handle.flat_param.device, each._handle.flat_param._fqns[0]
        if each.cpu_offload.offload_params:
            if device.type != "cpu":
                raise misplaced_offload(device, name, each.rank)
        elif device != each.compute_device:
            raise DeviceError(
                f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move the module to "
                f"{each.compute_device} before training. The first of them is '{name}' (rank {each.rank})."
            )


def _share_collectives(instances: Sequence[FSDPInstance]) -> None:
    # One object for each group of ranks: norms then take one reduction for all units of a group.
    grids: dict[tuple[Any, Any, bool], RankGrid] = {}
    for each in instances:
        unit = each._flat_unit
        if unit is None:
            continue
        key = (each.process_group, each._groups.replicate_group, unit.grid.shard is None)
        unit.use_grid(grids.setdefault(key, unit.grid))
