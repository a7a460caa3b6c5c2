"""Settings and engine parts of one FSDP instance: a wrapper, or what was left in a module sharded in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from polyshard.engine.planning.plan import STAGE_ATTRIBUTE
from polyshard.engine.planning.ranks import RankGrid
from polyshard.engine.step.unit import Reshard
from polyshard.errors import StateError
from polyshard.interfaces import Collectives, PluginContext, UnitSpec
from polyshard_plugins.offload import CpuOffload, NoOffload
from torch import nn

from . import _state_dict_utils
from ._collectives import collectives_of
from ._common_utils import TrainingState
from ._flat_param import (
    _FSDP_SKIP_WRITEBACK_CHECK,
    _FSDP_USE_FULL_PREC_IN_EVAL,
    _FSDP_USE_UNSAFE_SETATTR,
    FlatParameter,
    FlatParamHandle,
)
from ._forward import FSDPForward
from ._idle import IdleUnit
from ._init_utils import SHARDING_STRATEGY_MAP, Groups, Ignored, managed_modules, managed_parameters
from ._precision import FSDPPrecision
from ._root import FSDPRoot, establish_root
from ._stage import FSDPStage
from ._torch_checkpoint import CheckpointGuard
from ._unit import FlatUnit
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

_RESHARDS_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


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
    _handle: FlatParamHandle | None
    _stage: FSDPStage
    _forward: FSDPForward
    _summoned: bool
    _comm_hook: Callable[..., Any] | None
    _comm_hook_state: object
    _buffers_in_full_precision: bool | None
    _state_dict_type: StateDictType
    _state_dict_config: StateDictConfig
    _optim_state_dict_config: OptimStateDictConfig

    def _set_up(
        self,
        module: nn.Module,
        staged: nn.Module,
        groups: Groups,
        ignored: Ignored,
        device: torch.device,
        *,
        sharding_strategy: ShardingStrategy,
        cpu_offload: CPUOffload | None,
        backward_prefetch: BackwardPrefetch | None,
        mixed_precision: MixedPrecision | None,
        forward_prefetch: bool,
        limit_all_gathers: bool,
        use_orig_params: bool,
    ) -> None:
        """Flatten the parameters of ``module`` that no inner instance has, and keep this rank's part of them.

        ``staged``: the module whose forward is the instance's: the wrapper, or ``module`` itself.
        """
        self.process_group = groups.process_group
        self.rank, self.world_size = groups.rank, groups.world_size
        self.sharding_strategy = sharding_strategy
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.compute_device = device
        self._use_orig_params = use_orig_params
        self._use_full_prec_in_eval = os.environ.get(_FSDP_USE_FULL_PREC_IN_EVAL, "") == "1"
        self._device_mesh = groups.device_mesh
        self._groups = groups
        self._ignored = ignored
        self._ignored_modules, self._ignored_params = set(ignored.modules), set(ignored.parameters)
        self._is_root = None
        self._root = None
        self._summoned = False
        self._comm_hook = None
        self._comm_hook_state = None
        self._buffers_in_full_precision = None
        self._state_dict_type = StateDictType.FULL_STATE_DICT
        self._state_dict_config = FullStateDictConfig()
        self._optim_state_dict_config = FullOptimStateDictConfig()
        self._handle = None
        self._buffer_dtypes = [
            (holder, key, buffer.dtype)
            for holder in managed_modules(module, ignored)
            for key, buffer in holder._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]
        params = managed_parameters(module, ignored)
        units = [self._make_unit(module, params)] if params else []
        observed: list[tuple[nn.Module, str]] = []
        if self._handle is not None and os.environ.get(_FSDP_USE_UNSAFE_SETATTR, "") != "1":
            observed = [
                (holder, attribute)
                for parameter in self._handle.parameters
                for holder, attribute in parameter.sites
                if type(holder).__setattr__ is not nn.Module.__setattr__
            ]
        self._stage = FSDPStage(self, staged, module, units, full_precision_in_eval=self._use_full_prec_in_eval)
        self._forward = FSDPForward(self._stage, observed)
        staged.__dict__[STAGE_ATTRIBUTE] = self._stage
        CheckpointGuard.put(self, staged)

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

    def _make_unit(self, module: nn.Module, params: list[nn.Parameter]) -> FlatUnit:
        policy = self.mixed_precision
        strategy = SHARDING_STRATEGY_MAP[self.sharding_strategy]
        handle = FlatParamHandle(
            params,
            module,
            self.compute_device,
            strategy,
            self.cpu_offload.offload_params,
            policy.param_dtype,
            policy.reduce_dtype,
            policy.keep_low_precision_grads,
            self.process_group,
            self._use_orig_params,
        )
        caster = FSDPPrecision(policy, self._use_full_prec_in_eval)
        # Where everything computes in host memory there is nothing to offload to it.
        offloads = self.cpu_offload.offload_params and self.compute_device.type != "cpu"
        context = PluginContext("fsdp", self.compute_device, self.process_group)
        spec = UnitSpec(
            name="",
            module_class=type(module),
            parameter_names=handle.flat_param._fqns,
            numel=handle.layout.padded_numel,
            shard_numel=handle.layout.shard_numel,
            master_dtype=handle.orig_dtype,
            device=self.compute_device,
            is_root=False,
        )
        unit = FlatUnit(
            self,
            handle,
            spec,
            self._grid(),
            caster.dtypes(spec),
            caster,
            CpuOffload(context) if offloads else NoOffload(context),
            reshard=Reshard.UNLESS_TURNING if self.sharding_strategy in _RESHARDS_AFTER_FORWARD else Reshard.NEVER,
            checks_writeback=os.environ.get(_FSDP_SKIP_WRITEBACK_CHECK, "") != "1",
        )
        if not self._use_orig_params:
            handle.register_flat_param()
        self._handle = handle
        return unit

    def _grid(self) -> RankGrid:
        world = collectives_of(self.process_group, self.compute_device)
        replicas: Collectives | None = None
        if self._groups.replicate_group is not None:
            replicas = collectives_of(self._groups.replicate_group, self.compute_device)
        if self.sharding_strategy is ShardingStrategy.NO_SHARD:
            among = replicas or world
            return RankGrid(world, None, among if among.world_size > 1 else None)
        return RankGrid(world, world, replicas)

    def _become_root(self) -> None:
        """Let this instance be the root of those inside it, unless it is or has one."""
        if self._is_root is None:
            establish_root(self)

    def _forget_root(self) -> None:
        """Let the root be found anew: nothing has run yet."""
        for instance in self._root.instances if self._root is not None else ():
            instance._is_root = instance._root = None

    def _enter_forward(self) -> None:
        self._become_root()
        if self._summoned:
            # A state dict that failed on its way leaves parameters whole.
            _state_dict_utils.abandon(self)
        if self._summoned:
            raise StateError(
                f"A forward of '{self._stage.name or '(root)'}' inside summon_full_params (rank {self.rank}). Leave "
                "the context first: the forward gathers what it needs."
            )

    def _leave_idle(self, idle: IdleUnit) -> None:
        assert self._root is not None
        self._root.leave_idle(idle)

    @contextmanager
    def _as_flat_parameters(self) -> Iterator[None]:
        """A context in which the module holds the flat parameter in the place of the parameters that view it."""
        handle = self._handle
        if handle is None or handle.unit is None:
            yield
            return
        unit = handle.unit
        if not self._use_orig_params:
            yield
            unit.take_up_home(refuse_offload=False)
            return
        if not unit.misplaced:
            unit.take_up_changes()
        with unit.without_originals():
            handle.register_flat_param()
            try:
                yield
            finally:
                handle.deregister_flat_param()
        unit.take_up_home(refuse_offload=False)

    def _place_buffers(self) -> None:
        """Move and cast the buffers of every instance under this root, where the mode asks for another dtype."""
        full = self._use_full_prec_in_eval and not self._stage.module.training
        if self._buffers_in_full_precision is full:
            return
        assert self._root is not None
        for instance in self._root.instances:
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
