"""First values: of meta tensors, and of every rank from rank 0."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from polyshard.errors import ConfigError, DeviceError
from torch import nn

from . import _init_utils, _torch_private
from ._collectives import collectives_of
from ._groups import Groups
from ._init_utils import Ignored, managed_modules, named_managed, needs_materialization

__all__ = ["materialize", "sync_module_states"]


def materialize(
    module: nn.Module, ignored: Ignored, param_init_fn: Callable[[nn.Module], None] | None, device: torch.device
) -> None:
    """Give values to meta parameters and buffers that ``module``'s instance manages; nothing happens without any.

    With ``param_init_fn``, it is called on ``module`` and every managed module in it, outermost first. Otherwise each
    managed module that itself holds meta tensors gets new ones on ``device``, uninitialised, and its
    ``reset_parameters()`` is called. Shared parameters stay shared, and ignored parameters keep their values.

    Raises:
        DeviceError: ``param_init_fn`` left meta tensors.
        Exception: what ``reset_parameters()`` raised, after a warning; the meta tensors are then back in place.
    """
    if not needs_materialization(module, ignored):
        return
    if param_init_fn is None:
        _reset(managed_modules(module, ignored), ignored, device)
        return
    for child in managed_modules(module, ignored):
        param_init_fn(child)
    if needs_materialization(module, ignored):
        left = [name for name, parameter in named_managed(module, ignored) if parameter.is_meta]
        raise DeviceError(
            f"`param_init_fn` left tensors on the meta device: {left or 'buffers'}; it is called on every module, and "
            f"must give values to the parameters and buffers that the module itself holds"
        )


def _reset(modules: Sequence[nn.Module], ignored: Ignored, device: torch.device) -> None:
    fresh = [module for module in modules if any(_own_meta(module, ignored))]
    replaced: list[tuple[nn.Module, str, torch.Tensor]] = []
    kept = [
        (parameter, parameter.detach().clone())
        for module in fresh
        for parameter in module.parameters(recurse=False)
        if parameter in ignored.parameters and not parameter.is_meta
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
                    _put(module, name, new[tensor])
                cast("Callable[[], None]", module.reset_parameters)()
    except BaseException as error:
        for changed, name, tensor in replaced:
            _put(changed, name, tensor)
        warnings.warn(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure that "
            f"your module oftype {type(module)} implements a `reset_parameters()` method.",
            stacklevel=_init_utils.STACKLEVEL,
        )
        raise
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)


def _own_meta(module: nn.Module, ignored: Ignored) -> list[tuple[str, torch.Tensor]]:
    own = itertools.chain(
        module.named_parameters(recurse=False, remove_duplicate=False),
        module.named_buffers(recurse=False, remove_duplicate=False),
    )
    return [(name, tensor) for name, tensor in own if tensor.is_meta and tensor not in ignored.parameters]


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor.detach(), device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    # Through the module's own ``__setattr__``: an RNN keeps a second list of its weights, which follows assignments.
    setattr(module, name, tensor)


def sync_module_states(
    module: nn.Module, parameters: Iterable[nn.Parameter], groups: Groups, device: torch.device
) -> None:
    """Overwrite parameters and all of ``module``'s buffers with rank 0's. All ranks of the groups call it together.

    With two groups, rank 0 of every shard group first gets its values from the first replica, then passes them on.

    Args:
        module: what is being wrapped.
        parameters: those that its instance manages.
        groups: over which.
        device: where the instance computes; its group moves tensors that are there.

    Raises:
        ConfigError: tensors are on the CPU, and the instance computes elsewhere.
        StateError: the group is a dummy.
    """
    states = [
        tensor
        for state in itertools.chain(module.buffers(), parameters)
        for tensor in _torch_private.plain_tensors(state.detach())
    ]
    if device.type != "cpu" and any(tensor.device.type == "cpu" for tensor in states):
        raise ConfigError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which requires them to be on "
            "GPU. Please specify the `device_id` argument or move the module to GPU before passing it to FSDP."
        )
    for group in (groups.replicate_group, groups.process_group):
        if group is not None:
            _broadcast(states, group, device)


def _broadcast(tensors: Sequence[torch.Tensor], group: Any, device: torch.device) -> None:
    collectives = collectives_of(group, device)
    if collectives.world_size == 1:
        return
    with torch.no_grad():
        for bucket in _buckets(tensors, _init_utils.PARAM_BROADCAST_BUCKET_SIZE):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                collectives.broadcast(bucket[0], 0).wait()
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            collectives.broadcast(flat, 0).wait()
            for tensor, values in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(values.view(tensor.shape))


def _buckets(tensors: Iterable[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """``tensors`` by dtype, in order, in lists of at most ``limit`` bytes, or of one larger tensor."""
    buckets: list[list[torch.Tensor]] = []
    filling: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        bucket, used = filling.get(tensor.dtype, ([], limit))
        if used + nbytes > limit:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        filling[tensor.dtype] = (bucket, used + nbytes)
    return buckets
