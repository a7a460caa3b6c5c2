"""From a constructor's arguments to an FSDP instance: the steps that the wrapper and the form without one share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from polyshard.interfaces import Collectives, PluginContext, UnitSpec
from polyshard.planning.groups import RankGrid
from polyshard.planning.plan import MODULE_STATE_ATTRIBUTE
from polyshard.runtime.unit import Reshard
from polyshard_plugins.offload import CpuOffload, NoOffload
from torch import nn

from . import _init_values, _state_dict_utils
from ._collectives import collectives_of
from ._flat_param import _FSDP_SKIP_WRITEBACK_CHECK, _FSDP_USE_UNSAFE_SETATTR, FlatParamHandle
from ._forward import FSDPForward
from ._groups import resolve_groups
from ._init_utils import (
    SHARDING_STRATEGY_MAP,
    check_devices,
    check_parameters,
    compute_device,
    current_device,
    device_type_of,
    effective_strategy,
    explicit_device,
    find_ignored,
    managed_parameters,
    move_to,
    warn_about_container,
)
from ._originals import replaced_parameters
from ._precision import FSDPPrecision
from ._stage import FSDPStage
from ._state import FSDPInstance, Settings
from ._torch_checkpoint import CheckpointGuard
from ._unit import FlatUnit
from ._wrap_utils import _auto_wrap
from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .wrap import WrapFunction

_RESHARDS_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What ``FullyShardedDataParallel`` takes beside the module, under its names, settings in this package's types."""

    process_group: Any
    sharding_strategy: ShardingStrategy | None
    cpu_offload: CPUOffload | None
    auto_wrap_policy: Any
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision | None
    ignored_modules: Iterable[nn.Module] | None
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: int | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None
    device_mesh: Any

    def inside(self) -> dict[str, Any]:
        """Those that instances inside take over as they are. Groups and what is ignored, they get as resolved."""
        resolved = ("process_group", "auto_wrap_policy", "ignored_modules", "ignored_states")
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in resolved
        }


def construct(
    instance: FSDPInstance,
    module: nn.Module,
    staged: nn.Module,
    arguments: Arguments,
    wrap: WrapFunction,
    inside: Mapping[str, Any],
) -> None:
    """Shard ``module`` in place, as ``instance``; what the policy chooses inside it first.

    Args:
        instance: Without any attributes of its own yet.
        module: Whose parameters become shards, but for ignored ones and those of inner instances.
        staged: The module whose forward is the instance's: the wrapper, or ``module`` itself.
        arguments: The constructor's.
        wrap: Makes an instance of a module inside; what it returns takes the module's place.
        inside: Its arguments, by its own names, but ``process_group`` and ``ignored_states``.

    Raises:
        ConfigError, ParameterError, DeviceError, AlreadyShardedError: before anything is changed or sent.
    """
    given = arguments
    if staged is not module:
        warn_about_container(module)
    ignored = find_ignored(module, given.ignored_modules, given.ignored_states)
    device_type = device_type_of(module, ignored, given.device_id)
    groups = resolve_groups(
        given.sharding_strategy, given.process_group, given.device_mesh, given.auto_wrap_policy, device_type
    )
    device = explicit_device(given.device_id, groups.rank)
    check_parameters(module, ignored, device, groups.rank, given.param_init_fn)
    if given.auto_wrap_policy is not None:
        inner = {**inside, "process_group": groups.for_children(), "ignored_states": ignored.parameters}
        _auto_wrap(module, given.auto_wrap_policy, set(ignored.modules), set(ignored.parameters), inner, wrap)
    strategy = effective_strategy(given.sharding_strategy, groups.world_size)
    check_devices(module, ignored, device, groups.rank)
    _init_values.materialize(module, ignored, given.param_init_fn, device or current_device(device_type))
    move_to(module, ignored, device, device_type)
    computes_on = compute_device(module, ignored, device, device_type, groups.rank)
    if given.sync_module_states:
        _init_values.sync_module_states(module, managed_parameters(module, ignored), groups, computes_on)
    settings = Settings(
        sharding_strategy=strategy,
        cpu_offload=given.cpu_offload or CPUOffload(),
        backward_prefetch=given.backward_prefetch,
        mixed_precision=given.mixed_precision or MixedPrecision(),
        forward_prefetch=given.forward_prefetch,
        limit_all_gathers=given.limit_all_gathers,
        use_orig_params=given.use_orig_params,
    )
    instance._configure(settings, groups, ignored, computes_on, module)
    _give_stage(instance, module, staged)
    CheckpointGuard.put(instance, staged)
    _state_dict_utils._register_all_state_dict_hooks(instance)


def _give_stage(instance: FSDPInstance, module: nn.Module, staged: nn.Module) -> None:
    """Flatten the parameters of ``module`` that no inner instance has, and keep this rank's part of them."""
    params = managed_parameters(module, instance._ignored)
    units = [_make_unit(instance, module, params)] if params else []
    observed: list[tuple[nn.Module, str]] = []
    if instance._handle is not None and os.environ.get(_FSDP_USE_UNSAFE_SETATTR, "") != "1":
        observed = [
            (holder, attribute)
            for parameter in instance._handle.parameters
            for holder, attribute in parameter.sites
            if type(holder).__setattr__ is not nn.Module.__setattr__
        ]
    instance._stage = FSDPStage(instance, staged, module, units, full_precision_in_eval=instance._use_full_prec_in_eval)
    instance._forward = FSDPForward(instance._stage, observed)
    staged.__dict__[MODULE_STATE_ATTRIBUTE] = instance._stage


def _make_unit(instance: FSDPInstance, module: nn.Module, params: list[nn.Parameter]) -> FlatUnit:
    policy, device = instance.mixed_precision, instance.compute_device
    handle = FlatParamHandle(
        params,
        module,
        device,
        SHARDING_STRATEGY_MAP[instance.sharding_strategy],
        instance.cpu_offload.offload_params,
        policy.param_dtype,
        policy.reduce_dtype,
        policy.keep_low_precision_grads,
        instance.process_group,
        instance._use_orig_params,
    )
    caster = FSDPPrecision(policy, instance._use_full_prec_in_eval)
    # Where everything computes in host memory there is nothing to offload to it.
    offloads = instance.cpu_offload.offload_params and device.type != "cpu"
    context = PluginContext("fsdp", device, instance.process_group)
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
        instance,
        handle,
        spec,
        _grid(instance),
        caster.dtypes(spec),
        caster,
        CpuOffload(context) if offloads else NoOffload(context),
        reshard=Reshard.UNLESS_TURNING if instance.sharding_strategy in _RESHARDS_AFTER_FORWARD else Reshard.NEVER,
        checks_writeback=os.environ.get(_FSDP_SKIP_WRITEBACK_CHECK, "") != "1",
    )
    if not instance._use_orig_params:
        handle.register_flat_param()
        replaced_parameters.add(params, handle.flat_param._fqns, handle.rank)
    instance._handle, instance._flat_unit = handle, unit
    return unit


def _grid(instance: FSDPInstance) -> RankGrid:
    world = collectives_of(instance.process_group, instance.compute_device)
    replicas: Collectives | None = None
    if instance._groups.replicate_group is not None:
        replicas = collectives_of(instance._groups.replicate_group, instance.compute_device)
    if instance.sharding_strategy is ShardingStrategy.NO_SHARD:
        among = replicas or world
        return RankGrid(world, None, among if among.world_size > 1 else None)
    return RankGrid(world, world, replicas)
