"""FSDP in place: ``fully_shard`` as ``torch.distributed._composable`` had it, without a wrapper module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from polyshard.errors import ConfigError
from torch import nn

from ._common_utils import TrainingState, _get_module_fsdp_state
from ._construct import Arguments, construct
from ._state import FSDPInstance
from ._torch_settings import own
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
    arguments = Arguments(
        process_group=process_group,
        sharding_strategy=strategy,
        cpu_offload=cpu_offload,
        auto_wrap_policy=policy,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=mixed_precision,
        ignored_modules=ignored_modules,
        param_init_fn=param_init_fn,
        device_id=device_id,
        sync_module_states=sync_module_states,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=True,
        use_orig_params=True,
        ignored_states=ignored_states,
        device_mesh=None,
    )
    inside: dict[str, Any] = {
        "strategy": strategy,
        "mixed_precision": mixed_precision,
        "cpu_offload": cpu_offload,
        "device_id": device_id,
        "param_init_fn": param_init_fn,
        "sync_module_states": sync_module_states,
        "forward_prefetch": forward_prefetch,
    }
    state = ComposableState()
    construct(state, module, module, arguments, fully_shard, inside)
    state._forward.attach()
    return module
