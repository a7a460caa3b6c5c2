"""Optimizer state dicts: torch's functions over flat parameters, and what these leave undone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.extension import is_dtensor, map_tensors
from torch import nn

from . import _torch_private
from ._common_utils import _get_fsdp_states
from ._flat_param import FlatParamHandle


def refuse_groups(model: nn.Module) -> None:
    """Raise UnsupportedError where an instance has a group that torch's functions cannot send through."""
    for instance in _get_fsdp_states(model):
        if not isinstance(instance.process_group, dist.ProcessGroup):
            raise UnsupportedError(
                f"Optimizer state dicts need a torch.distributed.ProcessGroup, and {instance._where} is sharded over "
                f"{instance.process_group!r}. Wrap the model with a process group to save it."
            )


@torch.no_grad()
def apart(result: dict[str, Any], given: Any, *, whole: bool = False, on_host: bool = False) -> dict[str, Any]:
    """``result`` of torch's function with tensors that are none of those in ``given``, nor views of them.

    ``whole``: parts by tensor parallelism become whole values, too, which all ranks do together. ``on_host``: copies
    are in host memory; torch leaves state of what is not sharded on the device.
    """
    live: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.Tensor:
            live.add(tensor.untyped_storage().data_ptr())
        return tensor

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if whole and is_dtensor(tensor):
            made: torch.Tensor = _on_mesh(tensor).full_tensor()
            return made.to(tensor.device)
        # A scalar may be that of all parameters in a flat one, and an optimizer counts in it.
        shared = type(tensor) is torch.Tensor and (not tensor.dim() or tensor.untyped_storage().data_ptr() in live)
        return tensor.detach().to("cpu" if on_host else tensor.device, copy=True) if shared else tensor

    map_tensors(note, given)
    state = {key: map_tensors(own, entries) for key, entries in result.get("state", {}).items()}
    return {**result, "state": state} if "state" in result else result


@contextmanager
def laid_out(
    model: nn.Module, optim_state_dict: Mapping[str, Any] | None, *, rank0_only: bool
) -> Iterator[dict[str, Any]]:
    """``optim_state_dict`` as torch's function reads it: rows of each parameter in the order of the flat parameter.

    Raises:
        ConfigError: (a ``ValueError``) state is not of its parameter's shape.
        UnsupportedError: a parameter is a part by tensor parallelism, and ``rank0_only``.
    """
    # With ``rank0_only`` other ranks may have none.
    given = optim_state_dict or {}
    state = dict(given.get("state", {}))
    handles: list[FlatParamHandle] = []
    for name, info in _torch_private.param_infos(model).items():
        handle, index = info.handle, info.param_indices[name]
        part = handle.parameters[index].part
        shape = torch.Size(handle.layout.slots[index].shape if part is None else part.shape)
        for value in state.get(name, {}).values():
            if isinstance(value, torch.Tensor) and value.dim() and value.size() != shape:
                raise ConfigError(
                    f"Tensor optimizer state does not have same shape as its parameter: {value.size()} {shape} for "
                    f"'{name}' on rank {handle.rank}. Load the state of the same model."
                )
        if not handle.is_odd(index):
            continue
        if rank0_only and part is not None:
            raise UnsupportedError(
                f"rank0_only=True, and '{name}' is a part by tensor parallelism (rank {handle.rank}): the first rank's "
                "values are cut for it alone. Load with rank0_only=False."
            )
        handles.append(handle)
        if name in state:
            values = {key: state[name][key] for key in sorted(state[name])}
            state[name] = map_tensors(partial(_rows, handle, index), values)
    for handle in handles:
        handle.takes_odd = True
    try:
        yield {**given, "state": state} if "state" in given else dict(given)
    finally:
        for handle in handles:
            handle.takes_odd = False


@torch.no_grad()
def _rows(handle: FlatParamHandle, index: int, value: torch.Tensor) -> torch.Tensor:
    if not value.dim():
        return value
    part, slot = handle.parameters[index].part, handle.layout.slots[index]
    if part is not None:
        value = part.cut(_on_mesh(value).full_tensor() if is_dtensor(value) else value)
    if not handle._use_orig_params or tuple(value.shape) != slot.shape:
        return value
    dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device).copy_(value)
    return dense.as_strided((slot.numel,), (1,)).view(slot.shape)


def _on_mesh(value: Any) -> Any:
    # Offloaded values keep the mesh of the device where they were gathered.
    return value.to(value.device_mesh.device_type)
