"""The steps of the constructor: strategy, ignored parts, groups of ranks, devices, and the first values.

The functions stand in the order in which the constructor calls them. What can be refused is refused before a module is
changed and before anything is sent.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError, DeviceError, ParameterError, WorldSizeError
from polyshard.extension import inner_tensors, refuse_embedding, send_from_first
from polyshard.interfaces import Collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _torch_private
from ._collectives import GroupLike, collectives_of, rank_and_size
from ._common_utils import _is_fsdp_flattened, clean_tensor_name, warn
from ._torch_private import _init_intra_and_inter_node_groups as _init_intra_and_inter_node_groups
from .api import ShardingStrategy

HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)

#: From a warning to the line that constructs FSDP: a helper, its caller here, the constructor, its caller.
STACKLEVEL = 4


@dataclass(frozen=True)
class Managed:
    """The part of ``module`` that its instance manages: neither ignored nor part of an instance inside."""

    module: nn.Module
    ignored_modules: frozenset[nn.Module]
    """With everything in them and all that instances inside ignore, but without these instances."""
    ignored_parameters: frozenset[nn.Parameter]
    """Those of the ignored modules, and those that are ignored one by one."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the instance will shard."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their clean names."""
        for name, parameter in self.module.named_parameters():
            if parameter not in self.ignored_parameters and not _is_fsdp_flattened(parameter):
                yield clean_tensor_name(name), parameter

    def modules(self) -> list[nn.Module]:
        """``module`` and all inside it but for ignored modules and inner instances, outermost first."""
        return _torch_private.modules_to_materialize(self.module, self.ignored_modules)

    @property
    def has_meta_tensors(self) -> bool:
        """Whether managed parameters, or buffers beside them, are on the meta device."""
        if any(parameter.is_meta for _, parameter in self.named_parameters()):
            return True
        return any(buffer.is_meta for child in self.modules() for buffer in child.buffers(recurse=False))


def find_managed(instance: Any, module: nn.Module, ignored_modules: Any, ignored_states: Any) -> Managed:
    """The part of ``module`` that ``instance`` manages, which is told what it ignores.

    Raises:
        TypeError: an argument is not iterable.
        ValueError: both are given, elements are of a wrong type or of several, or an FSDP instance is among them.
    """
    # Torch's function goes through what it is given twice.
    given = ignored_modules if ignored_modules is None else list(ignored_modules)
    _torch_private.init_ignored(instance, module, given, ignored_states)
    return Managed(module, frozenset(instance._ignored_modules), frozenset(instance._ignored_params))


def device_type_of(managed: Managed, device_id: int | torch.device | None) -> str:
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
    for name, parameter in managed.named_parameters():
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


@dataclass(frozen=True)
class Groups:
    """The ranks that shard one instance's parameters, and those that hold the same shard."""

    process_group: Any
    """Shards lie over it: a ``ProcessGroup``, a ``Collectives``, or an object with ``rank()`` and ``size()``."""
    replicate_group: Any | None
    """Gradients are also averaged over it; None for strategies that are not hybrid."""
    rank: int
    """This process's rank in ``process_group``."""
    world_size: int
    """Number of ranks in ``process_group``."""


def resolve_groups(
    strategy: ShardingStrategy | None,
    process_group: Any,
    device_mesh: DeviceMesh | None,
    policy: object | None,
    device_type: str,
) -> Groups:
    """The groups that the constructor's arguments name; the default group where they name none.

    Communicates only where a hybrid strategy is given neither groups nor a mesh: groups within and across nodes are
    then made, which all ranks do together. Wrapping by hand, without a ``policy``, must say which groups it means.

    Raises:
        ConfigError: groups and mesh are both given, of a wrong kind, or missing.
        WorldSizeError: this process is in none of the given groups, or nodes do not divide the ranks.
    """
    if process_group is not None and device_mesh is not None:
        raise ConfigError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    replicate_group: Any | None = None
    if strategy not in HYBRID_SHARDING_STRATEGIES:
        if device_mesh is not None:
            process_group = device_mesh.get_group(mesh_dim=0)
        elif process_group is None:
            process_group = _default_group()
    elif device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 2:
            raise ConfigError(f"Expected device_mesh to have ndim=2 but got {getattr(device_mesh, 'ndim', None)}")
        replicate_group, process_group = device_mesh.get_group(mesh_dim=0), device_mesh.get_group(mesh_dim=1)
    elif process_group is not None:
        if not (isinstance(process_group, tuple) and len(process_group) == 2 and all(map(_is_group, process_group))):
            raise ConfigError(
                "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] "
                f"but got {type(process_group)}; {strategy} shards over the first and replicates over the second"
            )
        process_group, replicate_group = process_group
    elif policy is None:
        raise ConfigError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        )
    else:
        process_group, replicate_group = _init_intra_and_inter_node_groups(
            _default_group(), _devices_per_node(device_type)
        )
    if not _is_group(process_group):
        raise WorldSizeError(
            f"{process_group!r} is not a process group that this process is in; give one "
            f"torch.distributed.ProcessGroup that contains this rank (a pair of groups is for hybrid strategies)"
        )
    rank, world_size = rank_and_size(process_group)
    return Groups(process_group, replicate_group, rank, world_size)


def _is_group(group: object) -> bool:
    return isinstance(group, dist.ProcessGroup | Collectives | GroupLike)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        raise ConfigError(
            "Default process group has not been initialized, please make sure to call init_process_group, or pass "
            "process_group or device_mesh"
        )
    return group


def _devices_per_node(device_type: str) -> int:
    """Ranks that share a node, as the launcher says, or else one for each device that this process sees."""
    world_size = dist.get_world_size()
    launched = os.environ.get("LOCAL_WORLD_SIZE")
    if launched is not None:
        return int(launched)
    # Hosts without accelerators cannot tell how many ranks they have: all are taken to be on one.
    return min(world_size, torch.accelerator.device_count()) if device_type != "cpu" else world_size


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
    if device.type == "cpu":
        return device
    return _torch_private.device_from_id(device, rank, torch.get_device_module(device.type))


def check_parameters(
    managed: Managed,
    device: torch.device | None,
    rank: int,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Refuse parameters that no instance could shard; before modules inside are wrapped, it looks at theirs too.

    Raises:
        ParameterError: a parameter is a scalar, or that of an embedding which cannot compute with a sharded one.
        ConfigError: ``param_init_fn`` cannot be called, or parameters are on another device than ``device``.
    """
    modules = set(managed.modules())
    for name, child in managed.module.named_modules():
        if child in modules:
            refuse_embedding(clean_tensor_name(name), child, managed.ignored_parameters, rank)
    for name, parameter in managed.named_parameters():
        if parameter.dim() == 0:
            raise ParameterError(
                f"FSDP doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1."
            )
        if device is not None and parameter.device.type not in ("cpu", "meta") and parameter.device != device:
            raise ConfigError(
                f"Inconsistent compute device and `device_id` on rank {rank}: {parameter.device} vs {device}; move the "
                f"module to {device} or leave `device_id` out"
            )
    if param_init_fn is not None and not callable(param_init_fn) and managed.has_meta_tensors:
        raise ConfigError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")


def effective_strategy(strategy: ShardingStrategy | None, world_size: int) -> ShardingStrategy:
    """``strategy`` (None for ``FULL_SHARD``), or ``NO_SHARD`` where one rank has nothing to shard over. Warns."""
    if world_size == 1:
        if strategy is not ShardingStrategy.NO_SHARD:
            warn(
                f"FSDP is switching to use `NO_SHARD` instead of {strategy or ShardingStrategy.FULL_SHARD} since the "
                f"world size is 1."
            )
        return ShardingStrategy.NO_SHARD
    if strategy is ShardingStrategy.NO_SHARD:
        warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` "
            "instead.",
            FutureWarning,
        )
    return strategy or ShardingStrategy.FULL_SHARD


def materialize(managed: Managed, param_init_fn: Callable[[nn.Module], None] | None, device: torch.device) -> None:
    """Give values to meta parameters and buffers that its instance manages; nothing happens without any.

    With ``param_init_fn``, it is called on the module and every managed module in it, outermost first. Otherwise each
    managed module that itself holds meta tensors gets new ones on ``device``, uninitialised, and its
    ``reset_parameters()`` is called. Shared parameters stay shared, and ignored parameters keep their values.

    Raises:
        DeviceError: ``param_init_fn`` left meta tensors.
        Exception: what ``reset_parameters()`` raised, after a warning; the meta tensors are then back in place.
    """
    if not managed.has_meta_tensors:
        return
    if param_init_fn is None:
        _reset(managed.modules(), managed.ignored_parameters, device)
        return
    for child in managed.modules():
        param_init_fn(child)
    if managed.has_meta_tensors:
        left = [name for name, parameter in managed.named_parameters() if parameter.is_meta]
        raise DeviceError(
            f"`param_init_fn` left tensors on the meta device: {left or 'buffers'}; it is called on every module, and "
            f"must give values to the parameters and buffers that the module itself holds"
        )


def _reset(modules: Sequence[nn.Module], ignored: frozenset[nn.Parameter], device: torch.device) -> None:
    fresh = [module for module in modules if any(_own_meta(module, ignored))]
    replaced: list[tuple[nn.Module, str, torch.Tensor]] = []
    kept = [
        (parameter, parameter.detach().clone())
        for module in fresh
        for parameter in module.parameters(recurse=False)
        if parameter in ignored and not parameter.is_meta
    ]
    new: dict[torch.Tensor, torch.Tensor] = {}
    module = modules[0]
    try:
        with torch.no_grad():
            for module in fresh:
                for name, tensor in _own_meta(module, ignored):
                    if tensor not in new:
                        new[tensor] = _empty(tensor, device)
                    replaced.append((module, name, tensor))
                    # An RNN keeps a second list of its weights, which follows assignments.
                    setattr(module, name, new[tensor])
                cast("Callable[[], None]", module.reset_parameters)()
    except BaseException as error:
        for changed, name, tensor in replaced:
            setattr(changed, name, tensor)
        warnings.warn(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure that "
            f"your module oftype {type(module)} implements a `reset_parameters()` method.",
            stacklevel=STACKLEVEL,
        )
        raise
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)


def _own_meta(module: nn.Module, ignored: frozenset[nn.Parameter]) -> list[tuple[str, torch.Tensor]]:
    own = itertools.chain(
        module.named_parameters(recurse=False, remove_duplicate=False),
        module.named_buffers(recurse=False, remove_duplicate=False),
    )
    return [(name, tensor) for name, tensor in own if tensor.is_meta and tensor not in ignored]


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor.detach(), device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def move_to(managed: Managed, device: torch.device | None, device_type: str) -> None:
    """Move parameters, gradients and buffers that are on the CPU to ``device``; the tensor objects stay.

    What is ignored, and what inner instances manage, stays where it is. Without a ``device`` nothing moves, and there
    is a warning where a model on the CPU will compute elsewhere.
    """
    ignored = set(managed.ignored_parameters)
    if device is not None or device_type != "cpu":
        buffers = {buffer for each in managed.ignored_modules for buffer in each.buffers()}
        _torch_private.move_to_device(managed.module, ignored, buffers, device)


def compute_device(managed: Managed, device: torch.device | None, device_type: str, rank: int) -> torch.device:
    """Where the instance computes: where its parameters are, or the current device where they are on the CPU.

    Raises ValueError: that is not ``device``. Of a module without parameters, too, as FSDP does.
    """
    handle, ignored = torch.get_device_module(device_type), set(managed.ignored_parameters)
    return _torch_private.compute_device(managed.module, ignored, device, rank, handle)


def sync_module_states(managed: Managed, groups: Groups, device: torch.device) -> None:
    """Overwrite managed parameters and all buffers with rank 0's. All ranks of the groups call it together.

    With two groups, rank 0 of every shard group first gets its values from the first replica, then passes them on.

    Raises:
        ConfigError: tensors are on the CPU, and the instance computes on another ``device``.
        StateError: the group is a dummy.
    """
    named = itertools.chain(managed.module.buffers(), managed.parameters)
    states = [tensor for state in named for tensor in inner_tensors(state.detach())]
    if device.type != "cpu" and any(tensor.device.type == "cpu" for tensor in states):
        raise ConfigError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which requires them to be on "
            "GPU. Please specify the `device_id` argument or move the module to GPU before passing it to FSDP."
        )
    for group in (groups.replicate_group, groups.process_group):
        if group is not None and rank_and_size(group)[1] > 1:
            send_from_first(states, collectives_of(group, device), device)
