"""One FSDP instance: its settings, its unit and module state, and the root that it shares with those around it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError, DeviceError, StateError, StepAssertionError, UnsupportedError
from polyshard.extension import MODULE_STATE_ATTRIBUTE, Reshard, Unit, UnitRanks, is_dtensor, replaced_parameters
from polyshard.interfaces import Collectives, PluginContext, UnitSpec
from polyshard_plugins.offload import CpuOffload, NoOffload
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _runtime_utils, _torch_private
from ._collectives import collectives_of
from ._common_utils import TrainingState, _get_fsdp_states, clean_tensor_name
from ._flat_param import (
    _FSDP_SKIP_WRITEBACK_CHECK,
    _FSDP_USE_FULL_PREC_IN_EVAL,
    _FSDP_USE_UNSAFE_SETATTR,
    FlatParameter,
    FlatParamHandle,
)
from ._init_utils import HYBRID_SHARDING_STRATEGIES, Groups, Managed
from ._runtime import OPTIMIZERS, ForwardOrder, FSDPForward, FSDPModuleState, FSDPRoot, checks_order
from ._unit import FlatUnit, FSDPPrecision, misplaced_offload
from .api import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)

_RESHARDS_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class FSDPInstance(_torch_private.FSDPState):  # type: ignore[misc]
    """The state of one wrapper, which ``FullyShardedDataParallel`` adds to ``nn.Module``."""

    _fsdp_extension: Any = None

    def _configure(
        self,
        given: Mapping[str, Any],
        strategy: ShardingStrategy,
        groups: Groups,
        managed: Managed,
        device: torch.device,
    ) -> None:
        """Take over the constructor's arguments, and what was chosen, for an instance that computes on ``device``."""
        self.process_group = groups.process_group
        self.rank, self.world_size = groups.rank, groups.world_size
        self.sharding_strategy = strategy
        self.cpu_offload = given["cpu_offload"] or CPUOffload()
        self.backward_prefetch = given["backward_prefetch"]
        self.forward_prefetch = given["forward_prefetch"]
        self.limit_all_gathers = given["limit_all_gathers"]
        self.mixed_precision = given["mixed_precision"] or MixedPrecision()
        self.compute_device = device
        self._use_orig_params = given["use_orig_params"]
        self._use_full_prec_in_eval = os.environ.get(_FSDP_USE_FULL_PREC_IN_EVAL, "") == "1"
        self._device_mesh: DeviceMesh | None = given["device_mesh"]
        self._groups = groups
        self._managed = managed
        self._forget()
        self._summoned = False
        self._comm_hook: Callable[..., Any] | None = None
        self._comm_hook_state: object = None
        self._buffers_in_full_precision: bool | None = None
        #: This instance's part in a walk over modules that makes or loads a state dict.
        self._state_dict_walk: Any = None
        self._state_dict_type = StateDictType.FULL_STATE_DICT
        self._state_dict_config: StateDictConfig = FullStateDictConfig()
        self._optim_state_dict_config: OptimStateDictConfig = FullOptimStateDictConfig()
        self._handle: FlatParamHandle | None = None
        #: The engine's unit over the flat parameter.
        self._flat_unit: FlatUnit | None = None
        self._buffer_dtypes = {
            (holder, key): buffer.dtype
            for holder in managed.modules()
            for key, buffer in holder._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        }

    def _flatten(self) -> None:
        """Flatten the parameters that no inner instance has, and keep this rank's part of them."""
        module, params = self._managed.module, self._managed.parameters
        units = [self._make_unit(module, params)] if params else []
        observed: list[tuple[nn.Module, str]] = []
        if self._handle is not None and os.environ.get(_FSDP_USE_UNSAFE_SETATTR, "") != "1":
            observed = [
                (holder, attribute)
                for parameter in self._handle.parameters
                for holder, attribute in parameter.sites
                if type(holder).__setattr__ is not nn.Module.__setattr__
            ]
        self._module_state = FSDPModuleState(self, module, units, full_precision_in_eval=self._use_full_prec_in_eval)
        self._forward = FSDPForward(self._module_state, observed)
        self.__dict__[MODULE_STATE_ATTRIBUTE] = self._module_state

    def _make_unit(self, module: nn.Module, params: list[nn.Parameter]) -> FlatUnit:
        for name, parameter in self._managed.named_parameters():
            if is_dtensor(parameter) and hasattr(parameter, OPTIMIZERS):
                raise UnsupportedError(
                    f"'{name}' is a DTensor with an optimizer that steps in backward (rank {self.rank}), and a plain "
                    "parameter takes its place. Step the optimizer behind backward."
                )
        policy, device = self.mixed_precision, self.compute_device
        handle = FlatParamHandle(
            params,
            module,
            device,
            self.sharding_strategy,
            self.cpu_offload.offload_params,
            policy.param_dtype,
            policy.reduce_dtype,
            policy.keep_low_precision_grads,
            self.process_group,
            self._use_orig_params,
        )
        precision = FSDPPrecision(policy, self._use_full_prec_in_eval)
        # Where everything computes in host memory there is nothing to offload to it.
        offloads = self.cpu_offload.offload_params and device.type != "cpu"
        context = PluginContext("fsdp", device, self.process_group)
        spec = UnitSpec(
            name="",
            module_class=type(module),
            parameter_names=handle.flat_param._fqns,
            numel=handle.layout.padded_numel,
            shard_numel=handle.layout.shard_numel,
            master_dtype=handle.orig_dtype,
            device=device,
            is_root=False,
        )
        unit = FlatUnit(
            self,
            handle,
            spec,
            self._make_ranks(),
            precision.dtypes(spec),
            precision,
            CpuOffload(context) if offloads else NoOffload(context),
            reshard=Reshard.UNLESS_TURNING if self.sharding_strategy in _RESHARDS_AFTER_FORWARD else Reshard.NEVER,
            checks_writeback=os.environ.get(_FSDP_SKIP_WRITEBACK_CHECK, "") != "1",
        )
        named = list(zip(params, handle.flat_param._fqns, strict=True))
        if not self._use_orig_params:
            handle.register_flat_param()
            replaced_parameters.add(
                named,
                "a flat parameter",
                f"rank {handle.rank}, use_orig_params=False",
                ", or pass use_orig_params=True",
            )
        elif parts := [(each, name) for each, name in named if is_dtensor(each)]:
            replaced_parameters.add(parts, "a plain parameter over this rank's part", f"rank {handle.rank}")
        self._handle, self._flat_unit = handle, unit
        return unit

    def _make_ranks(self) -> UnitRanks:
        world = collectives_of(self.process_group, self.compute_device)
        replicas: Collectives | None = None
        if self._groups.replicate_group is not None:
            replicas = collectives_of(self._groups.replicate_group, self.compute_device)
        if self.sharding_strategy is ShardingStrategy.NO_SHARD:
            among = replicas or world
            return UnitRanks.over(world, None, among if among.world_size > 1 else None)
        return UnitRanks.over(world, world, replicas)

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._handle.flat_param if self._handle is not None else None

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        """Of a root the handles of all instances under it, which trainers walk over; of others nothing."""
        return [each._handle for each in self._instances if each._handle is not None] if self._is_root else []

    @property
    def _device_handle(self) -> Any:
        """Torch's module for the kind of device that it computes on. Trainers ask."""
        return torch.get_device_module(self.compute_device)

    @property
    def _has_params(self) -> bool:
        """Whether it has a flat parameter. Trainers ask."""
        return self._handle is not None

    @property
    def params(self) -> list[FlatParameter]:
        return [self._handle.flat_param] if self._handle is not None else []

    @property
    def _inter_node_pg(self) -> Any:
        """The group of the replicas of this rank's shards; None where nothing is replicated."""
        return self._groups.replicate_group

    @property
    def _where(self) -> str:
        """Its name and rank, for messages."""
        return f"'{self._module_state.name or type(self._module_state.inner).__name__}' (rank {self.rank})"

    @property
    def training_state(self) -> TrainingState:
        """Where this instance is in its step."""
        if self._summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD if self._module_state.busy else TrainingState.IDLE

    @property
    def _is_root(self) -> bool:
        """Whether it is the outermost instance. Torch's functions ask, and would make one their way where None is."""
        self._become_root()
        return self._instances[0] is self

    def _become_root(self) -> None:
        """Let this instance be the root of those inside it, unless it is or has one."""
        if self._root is not None:
            return
        instances: tuple[FSDPInstance, ...] = tuple(_get_fsdp_states(self._module_state.module))
        root = _make_root(self, instances)
        for each in instances:
            each._root, each._instances = root, instances

    def _forget_root(self) -> None:
        """Let the root be found anew: nothing has run yet."""
        for instance in self._instances:
            instance._forget()

    def _forget(self) -> None:
        self._root: FSDPRoot | None = None
        #: All under the same root; this one alone while that is not known.
        self._instances: tuple[FSDPInstance, ...] = (self,)

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
                f"A forward of {self._where} inside summon_full_params. Leave the context first: the forward gathers "
                "what it needs."
            )

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
        summoned = unit.whole_for_user is not None
        if not summoned and not unit.misplaced:
            unit.held.adopt_changes()
        with unit.without_originals():
            unit.handle.register_flat_param()
            try:
                yield
            finally:
                unit.handle.deregister_flat_param()
        if summoned:
            unit.take_up_whole()
        else:
            unit.take_up_home(refuse_offload=False)

    def _place_buffers(self) -> None:
        """Move and cast the buffers of every instance under this root, where the mode asks for another dtype."""
        full = self._use_full_prec_in_eval and not self._module_state.module.training
        if self._buffers_in_full_precision is full:
            return
        for instance in self._instances:
            instance._cast_buffers(full)
        self._buffers_in_full_precision = full

    def _cast_buffers(self, full_precision: bool) -> None:
        wanted = None if full_precision else self.mixed_precision.buffer_dtype
        for holder in self._managed.modules():
            for key, buffer in holder._buffers.items():
                if buffer is None:
                    continue
                dtype = buffer.dtype
                if buffer.is_floating_point():
                    dtype = wanted or self._buffer_dtypes.get((holder, key), dtype)
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
    _refuse_narrow_beside_hybrid(instance, instances)
    for each in instances:
        if each._handle is not None:
            _refuse_stepping_flat(each, each._handle)
            _refuse_misplaced(each, each._handle)
    world = _share_collectives(instance, instances)
    names = {module: name for name, module in instance._module_state.module.named_modules()}
    for each in instances:
        each._module_state.join(clean_tensor_name(f"{names[each._module_state.module]}.").rstrip("."), None)
    group = instance.process_group
    checks = checks_order() and isinstance(group, dist.ProcessGroup) and group.size() > 1
    order = ForwardOrder(instance, world) if checks else None
    return FSDPRoot(world, [each._module_state for each in instances], 1 if instance.forward_prefetch else 0, order)


def _refuse_roots_inside(instance: FSDPInstance, instances: Sequence[FSDPInstance]) -> None:
    for each in instances:
        if each is not instance and each._root is not None and each._instances[0] is each:
            raise StepAssertionError(
                "Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False`: "
                f"an instance inside {instance._where} ran by itself. Run the outermost instance first."
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
                    f"{each.sharding_strategy} {kind}-node process groups do not match: {each._where} has another than "
                    f"{hybrid[0]._where}. Give every instance of the model the same pair of groups, or the same device "
                    "mesh."
                )


def _is_hybrid(instance: FSDPInstance) -> bool:
    return instance.sharding_strategy in HYBRID_SHARDING_STRATEGIES


def _refuse_narrow_beside_hybrid(instance: FSDPInstance, instances: Sequence[FSDPInstance]) -> None:
    """Norms and the end of a step are a matter of all ranks of a model, in whichever way each instance uses them."""
    holders = [each for each in instances if each._flat_unit is not None]
    hybrid = next((each for each in holders if _is_hybrid(each)), None)
    if hybrid is None or hybrid._flat_unit is None:
        return
    number = hybrid._flat_unit.ranks.number
    for each in holders:
        if not _is_hybrid(each) and each.world_size != number:
            names = {module: clean_tensor_name(name) for name, module in instance._module_state.module.named_modules()}
            one, another = (names[found._module_state.module] or "(root)" for found in (hybrid, each))
            raise UnsupportedError(
                f"'{one}' has {hybrid.sharding_strategy} over {number} ranks and '{another}' has "
                f"{each.sharding_strategy} over {each.world_size} (rank {each.rank}): a model that mixes hybrid "
                f"strategies with others is served over one set of ranks. Give '{another}' a group of all ranks that "
                "the hybrid groups reach."
            )


def _refuse_stepping_flat(instance: FSDPInstance, handle: FlatParamHandle) -> None:
    if not instance._use_orig_params and hasattr(handle.flat_param, OPTIMIZERS):
        raise StateError(
            "FSDP optimizer in backward only supported with use_orig_params=True! "
            f"'{handle.flat_param._fqns[0]}' on rank {instance.rank} is part of a flat parameter that has one."
        )


def _refuse_misplaced(instance: FSDPInstance, handle: FlatParamHandle) -> None:
    device, name = handle.flat_param.device, handle.flat_param._fqns[0]
    if instance.cpu_offload.offload_params:
        if device.type != "cpu":
            raise misplaced_offload(device, name, instance.rank)
    elif device != instance.compute_device:
        raise DeviceError(
            f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move the module to "
            f"{instance.compute_device} before training. The first of them is '{name}' (rank {instance.rank})."
        )


def _share_collectives(instance: FSDPInstance, instances: Sequence[FSDPInstance]) -> Collectives:
    """Let units of one group have one record of it: norms then take one reduction for all of them. Returns the world.

    Its ranks are those of ``instance``'s group, but more where units reach others than those of their group: beside
    tensor parallelism, and where some instances are hybrid and others are not.
    """
    units = [each._flat_unit for each in instances if each._flat_unit is not None]
    plain = next((each for each in instances if each._flat_unit is not None and not _is_hybrid(each)), instance)
    mixed = not _is_hybrid(plain) and any(map(_is_hybrid, instances))
    group = plain.process_group if mixed else instance.process_group
    parts = [(unit, each.part) for unit in units for each in unit.parameters if each.part is not None]
    everyone = dist.group.WORLD if dist.is_initialized() else None
    # More ranks than these would be those of other models.
    wide = bool(parts) and all(
        everyone is not None and everyone.size() == unit.ranks.number * part.mesh.size() for unit, part in parts
    )
    world = collectives_of(everyone if wide else group, instance.compute_device)
    all_ranks: dict[tuple[Any, ...], UnitRanks] = {}
    for each in instances:
        unit = each._flat_unit
        if unit is not None:
            key = (each.process_group, each._groups.replicate_group, unit.ranks.owner is None, type(unit.ranks))
            if key not in all_ranks:
                all_ranks[key] = dataclasses.replace(unit.ranks, world=world) if wide or mixed else unit.ranks
            unit.use_ranks(all_ranks[key])
    return world


def refuse_parts_elsewhere(units: Iterable[Unit]) -> None:
    """Raise where tensor parallelism left parts of a parameter on ranks that the model's root does not reach.

    Raises:
        UnsupportedError: naming one.
    """
    for unit in units:
        for each in unit.parameters:
            ranks = unit.ranks
            if each.part is not None and ranks.world.world_size != ranks.number * each.part.mesh.size():
                raise UnsupportedError(
                    f"The norm needs all parts of '{each.names[0]}', a DTensor on {each.part.mesh}, and the default "
                    f"process group has others than its ranks and those of FSDP (rank {ranks.world.rank}). Sum the "
                    "norms over the groups of both, and scale by torch.nn.utils.clip_grads_with_norm_."
                )
