"""What the constructor checks and chooses: strategy, what is ignored, devices.

Pure functions, in the order in which the constructor calls them. All that can be refused is refused before a module is
changed and before anything is sent.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from polyshard.errors import ConfigError, ConfigTypeError, DeviceError, ParameterError
from torch import nn

from . import _torch_private
from ._common_utils import _get_module_fsdp_state, _is_fsdp_flattened, clean_tensor_name
from ._flat_param import HandleShardingStrategy

# Under the names that FSDP has here.
from ._groups import HYBRID_SHARDING_STRATEGIES as HYBRID_SHARDING_STRATEGIES
from ._groups import _init_intra_and_inter_node_groups as _init_intra_and_inter_node_groups
from .api import ShardingStrategy

#: Bytes that ``sync_module_states`` broadcasts at a time.
PARAM_BROADCAST_BUCKET_SIZE = 250 * 1024 * 1024

SHARDING_STRATEGY_MAP = {
    ShardingStrategy.NO_SHARD: HandleShardingStrategy.NO_SHARD,
    ShardingStrategy.FULL_SHARD: HandleShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP: HandleShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD: HandleShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: HandleShardingStrategy._HYBRID_SHARD_ZERO2,
}
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)

#: From a warning to the line that constructs FSDP: a helper, its caller here, `construct`, the constructor, its caller.
STACKLEVEL = 5


def _warn(text: str, category: type[Warning] = UserWarning) -> None:
    warnings.warn(text, category, stacklevel=STACKLEVEL)


def effective_strategy(strategy: ShardingStrategy | None, world_size: int) -> ShardingStrategy:
    """``strategy`` (None for ``FULL_SHARD``), or ``NO_SHARD`` where one rank has nothing to shard over. Warns."""
    if world_size == 1:
        if strategy is not ShardingStrategy.NO_SHARD:
            _warn(
                f"FSDP is switching to use `NO_SHARD` instead of {strategy or ShardingStrategy.FULL_SHARD} since the "
                f"world size is 1."
            )
        return ShardingStrategy.NO_SHARD
    if strategy is ShardingStrategy.NO_SHARD:
        _warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` "
            "instead.",
            FutureWarning,
        )
    return strategy or ShardingStrategy.FULL_SHARD


def warn_about_container(module: nn.Module) -> None:
    """Warn where ``module`` has no forward in which its parameters could be gathered."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        _warn(f"FSDP will not all-gather parameters for containers that do not implement forward: {module}")


@dataclass(frozen=True)
class Ignored:
    """What an instance leaves alone, with all that instances inside it leave alone."""

    modules: frozenset[nn.Module]
    """The ignored modules and everything in them, without FSDP instances."""
    parameters: frozenset[nn.Parameter]
    """Their parameters, and those that are ignored one by one."""
    buffers: frozenset[torch.Tensor]
    """Their buffers."""
    buffer_names: frozenset[str]
    """Clean names, from the wrapped module on, of these buffers."""


def find_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
) -> Ignored:
    """What ``module``'s instance must leave alone.

    Raises:
        ConfigTypeError: an argument is not iterable.
        ConfigError: both are given, elements are of a wrong type or of several, or an FSDP instance is among them.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ConfigError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    parameters: list[nn.Parameter] = []
    if ignored_states is not None:
        states = _listed(ignored_states, "ignored_states", "`torch.nn.Parameter`s or `torch.nn.Module`s")
        roots = [state for state in states if isinstance(state, nn.Module)]
        parameters = [state for state in states if isinstance(state, nn.Parameter)]
        if len(states) not in (len(roots), len(parameters)):
            raise ConfigError(
                f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {_types(states)}"
            )
    else:
        states = _listed(ignored_modules or (), "ignored_modules", "`torch.nn.Module`s")
        roots = [state for state in states if isinstance(state, nn.Module)]
        if len(states) != len(roots):
            raise ConfigError(f"ignored_modules expects nn.Module list elements but got types {_types(states)}")
    if any(_get_module_fsdp_state(root) is not None for root in roots):
        raise ConfigError(
            "`ignored_modules` should not include FSDP modules; list the modules inside them when they are wrapped"
        )
    return _all_ignored(module, roots, parameters)


def _all_ignored(module: nn.Module, roots: list[nn.Module], parameters: list[nn.Parameter]) -> Ignored:
    # A module that is replicated in place exchanges its gradients itself.
    roots = roots + [child for child in module.modules() if _torch_private.is_replicated_in_place(child)]
    modules = {child for root in roots for child in root.modules() if not _is_wrapper(child)}
    if module in modules:
        _warn_about_top_level(module)
    found = {parameter for ignored in modules for parameter in ignored.parameters()}.union(parameters)
    found = {parameter for parameter in found if not _is_fsdp_flattened(parameter)}
    for child in module.modules():
        state = _get_module_fsdp_state(child)
        if state is not None:
            modules.update(state._ignored_modules)
            found.update(state._ignored_params)
    buffers = {buffer for ignored in modules for buffer in ignored.buffers()}
    names = {clean_tensor_name(name) for name, buffer in module.named_buffers() if buffer in buffers}
    return Ignored(frozenset(modules), frozenset(found), frozenset(buffers), frozenset(names))


def _warn_about_top_level(module: nn.Module) -> None:
    warnings.warn(
        "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all parameters "
        f"being ignored and is not well-supported: {module}",
        stacklevel=STACKLEVEL + 1,
    )


def _listed(given: Any, argument: str, elements: str) -> list[Any]:
    try:
        return list(given)
    except TypeError as error:
        raise ConfigTypeError(f"`{argument}` should be an iterable of {elements} but got {type(given)}") from error


def _types(states: list[Any]) -> list[type]:
    return sorted({type(state) for state in states}, key=repr)


def _is_wrapper(module: nn.Module) -> bool:
    return _get_module_fsdp_state(module) is module


def managed_parameters(module: nn.Module, ignored: Ignored) -> list[nn.Parameter]:
    """The parameters that ``module``'s instance will shard: neither ignored nor part of an inner instance."""
    return [parameter for _, parameter in named_managed(module, ignored)]


def named_managed(module: nn.Module, ignored: Ignored) -> Iterator[tuple[str, nn.Parameter]]:
    """Clean names and parameters of what ``module``'s instance will shard."""
    for name, parameter in module.named_parameters():
        if parameter not in ignored.parameters and not _is_fsdp_flattened(parameter):
            yield clean_tensor_name(name), parameter


def managed_modules(module: nn.Module, ignored: Ignored) -> list[nn.Module]:
    """``module`` and all inside it but for ignored modules and inner instances, outermost first."""
    found = {module: None}
    queue = deque([module])
    while queue:
        for child in queue.popleft().children():
            if child not in found and child not in ignored.modules and _get_module_fsdp_state(child) is None:
                found[child] = None
                queue.append(child)
    return list(found)


def device_type_of(module: nn.Module, ignored: Ignored, device_id: int | torch.device | None) -> str:
    """Where the model computes: ``device_id``'s type, or that of its parameters, or of this host's accelerator.

    A host without an accelerator computes on the CPU; elsewhere, ``device_id=torch.device("cpu")`` asks for it.

    Raises:
        DeviceError: parameters are on accelerators of two types, or ``device_id`` names one that is not here.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device_id is not None:
        asked = _as_device(device_id)
        if asked.type != "cpu" and accelerator is None:
            raise DeviceError(
                f"FSDP needs a non-CPU accelerator device, but no accelerator device is detected. `device_id` is "
                f"{device_id!r}; leave it out, or pass torch.device('cpu'), to compute on the CPU"
            )
        return asked.type
    first: str | None = None
    for name, parameter in named_managed(module, ignored):
        found = parameter.device.type
        if found in ("cpu", "meta"):
            continue
        if first is not None and found != first:
            raise DeviceError(
                f"FSDP does not support modules with different device types but got params on {first} and {found} "
                f"({name}); move the module to one device"
            )
        first = found
    return first or (accelerator.type if accelerator is not None else "cpu")


def _as_device(device_id: int | torch.device) -> torch.device:
    device = device_id if isinstance(device_id, torch.device) else torch.device(device_id)
    # There is one, and its tensors say so without an index.
    return torch.device("cpu") if device.type == "cpu" else device


def current_device(device_type: str) -> torch.device:
    """The device of that type that new tensors of this process would be on."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def explicit_device(device_id: int | torch.device | None, rank: int) -> torch.device | None:
    """``device_id`` as a device with an index; None for None. Warns where the index is the current device's."""
    if device_id is None:
        return None
    device = _as_device(device_id)
    if device.type == "cpu" or device.index is not None:
        return device
    current = current_device(device.type)
    _warn(
        f"FSDP got the argument `device_id` {device_id} on rank {rank}, which does not have an explicit index. FSDP "
        f"will use the current device {current.index}. If this is incorrect, please explicitly call "
        f"`torch.{device.type}.set_device()` before FSDP initialization or pass in the explicit device index as the "
        f"`device_id` argument."
    )
    return current


def check_parameters(
    module: nn.Module,
    ignored: Ignored,
    device: torch.device | None,
    rank: int,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Refuse parameters that no instance could shard; before modules inside are wrapped, it looks at theirs too.

    Args:
        module: the module to wrap; what is managed inside it already is not looked at.
        ignored: what is not looked at either.
        device: from ``explicit_device``.
        rank: for messages.
        param_init_fn: the constructor's argument.

    Raises:
        ParameterError: a parameter is a scalar.
        ConfigError: ``param_init_fn`` cannot be called, or parameters are on another device than ``device``.
    """
    for name, parameter in named_managed(module, ignored):
        if parameter.dim() == 0:
            raise ParameterError(
                f"FSDP doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1."
            )
        if device is not None and parameter.device.type not in ("cpu", "meta") and parameter.device != device:
            _refuse_device(rank, parameter.device, device)
    if param_init_fn is not None and not callable(param_init_fn) and needs_materialization(module, ignored):
        raise ConfigError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")


def check_devices(module: nn.Module, ignored: Ignored, device: torch.device | None, rank: int) -> None:
    """Refuse parameters of one instance that are on several devices.

    Raises:
        DeviceError: they are, and ``device`` does not say where those on the CPU belong.
    """
    devices = {parameter.device for _, parameter in named_managed(module, ignored)}
    if len(devices) == 2 and torch.device("cpu") in devices:
        if device is None:
            raise DeviceError(
                "To support a module with both CPU and GPU params, please pass in device_id argument. They are on "
                f"{sorted(map(str, devices))} (rank {rank})"
            )
    elif len(devices) > 1:
        raise DeviceError(
            f"FSDP only supports single device modules but got params on {devices} (rank {rank}); move them to one"
        )


def needs_materialization(module: nn.Module, ignored: Ignored) -> bool:
    """Whether parameters that ``module``'s instance will shard, or buffers beside them, are on the meta device."""
    if any(parameter.is_meta for _, parameter in named_managed(module, ignored)):
        return True
    return any(buffer.is_meta for child in managed_modules(module, ignored) for buffer in child.buffers(recurse=False))


def _refuse_device(rank: int, compute_device: torch.device, device: torch.device) -> None:
    raise ConfigError(
        f"Inconsistent compute device and `device_id` on rank {rank}: {compute_device} vs {device}; move the module "
        f"to {device} or leave `device_id` out"
    )


def move_to(module: nn.Module, ignored: Ignored, device: torch.device | None, device_type: str) -> None:
    """Move parameters, gradients and buffers that are on the CPU to ``device``; the tensor objects stay.

    What is ignored, and what inner instances manage, stays where it is. Without a ``device`` nothing moves, and there
    is a warning where a model on the CPU will compute elsewhere.
    """
    if device is None:
        on_cpu = any(parameter.device.type == "cpu" for _, parameter in named_managed(module, ignored))
        if on_cpu and device_type != "cpu":
            _warn(
                "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization run on CPU, which "
                "may be slower than on GPU. We recommend passing in the `device_id` argument for FSDP to move `module` "
                "to GPU for the sharding initialization. `module` must also be on GPU device to work with the "
                "`sync_module_states=True` flag since that requires GPU communication."
            )
        return
    for child in managed_modules(module, ignored):
        for parameter in child.parameters(recurse=False):
            if parameter.device.type == "cpu" and parameter not in ignored.parameters:
                parameter.data = parameter.data.to(device)
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data.to(device)
        for buffer in child.buffers(recurse=False):
            if buffer.device.type == "cpu" and buffer not in ignored.buffers:
                buffer.data = buffer.data.to(device)


def compute_device(
    module: nn.Module, ignored: Ignored, device: torch.device | None, device_type: str, rank: int
) -> torch.device:
    """Where the instance computes: where its parameters are, or the current device where they are on the CPU.

    Raises:
        ConfigError: that is not ``device``.
    """
    first = next((parameter for _, parameter in named_managed(module, ignored)), None)
    if first is not None and first.device.type != "cpu":
        chosen = first.device
    else:
        chosen = current_device(device_type)
    if device is not None and chosen != device:
        _refuse_device(rank, chosen, device)
    return chosen
