"""FSDP in place: ``fully_shard`` as ``torch.distributed._composable`` had it, without a wrapper module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from polyshard.errors import ConfigError
from torch import nn

from . import _init_values, _state_dict_utils
from ._common_utils import TrainingState, _get_module_fsdp_state
from ._init_utils import (
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
    resolve_groups,
)
from ._state import FSDPInstance
from ._torch_settings import own
from ._wrap_utils import _auto_wrap
from .api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .wrap import _Policy, is_policy_object

__all__ = ["fully_shard"]

M = TypeVar("M", bound=nn.Module)


class ComposableState(FSDPInstance):
    """What ``fully_shard`` leaves in a module."""

    @property
    def training_state(self) -> TrainingState:
        """Where this instance is in its step."""
        return self._training_state()


def fully_shard(
    module: M,
    *,
    process_group: Any = None,
    policy: _Policy | None = None,
    strategy: ShardingStrategy | None = None,
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: CPUOffload | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    device_id: int | torch.device | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = False,
    forward_prefetch: bool = False,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
) -> M:
    """Shard ``module`` in place and return it; its own parameters stay, as views of shards.

    Arguments are those of ``FullyShardedDataParallel``; ``policy`` is its ``auto_wrap_policy``, ``strategy`` its
    ``sharding_strategy``.

    Raises:
        ConfigError: (a ``ValueError``) ``policy`` is no policy object, or ``module`` is sharded already.
    """
    strategy = own(strategy, ShardingStrategy, "strategy")
    mixed_precision = own(mixed_precision, MixedPrecision, "mixed_precision")
    cpu_offload = own(cpu_offload, CPUOffload, "cpu_offload")
    if policy is not None and not is_policy_object(policy):
        raise ConfigError(
            f"Expects an `_FSDPPolicy` but got {policy} for {type(module).__name__}. Pass a ModuleWrapPolicy or "
            "another policy object."
        )
    if _get_module_fsdp_state(module) is not None:
        raise ConfigError(f"{type(module).__name__} is sharded already. Call fully_shard once for each module.")
    ignored = find_ignored(module, ignored_modules, ignored_states)
    device_type = device_type_of(module, ignored, device_id)
    groups = resolve_groups(strategy, process_group, None, policy, device_type)
    device = explicit_device(device_id, groups.rank)
    check_parameters(module, ignored, device, groups.rank, param_init_fn)
    if policy is not None:
        arguments: dict[str, Any] = {
            "process_group": groups.for_children(),
            "strategy": strategy,
            "mixed_precision": mixed_precision,
            "cpu_offload": cpu_offload,
            "device_id": device_id,
            "param_init_fn": param_init_fn,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "ignored_states": ignored.parameters,
        }
        _auto_wrap(module, policy, set(ignored.modules), set(ignored.parameters), arguments, fully_shard)
    chosen = effective_strategy(strategy, groups.world_size)
    check_devices(module, ignored, device, groups.rank)
    _init_values.materialize(module, ignored, param_init_fn, device or current_device(device_type))
    move_to(module, ignored, device, device_type)
    computes_on = compute_device(module, ignored, device, device_type, groups.rank)
    if sync_module_states:
        _init_values.sync_module_states(module, managed_parameters(module, ignored), groups, computes_on)
    state = ComposableState()
    state._set_up(
        module,
        module,
        groups,
        ignored,
        computes_on,
        sharding_strategy=chosen,
        cpu_offload=cpu_offload,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=mixed_precision,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    state._forward.attach()
    _state_dict_utils._register_all_state_dict_hooks(state)
    return module
