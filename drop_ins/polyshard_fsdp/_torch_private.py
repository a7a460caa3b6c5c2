"""Every private torch name that the drop-in uses, with the reason. The test suite ran on torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    _common_utils,
    _exec_order_utils,
    _init_utils,
    _optim_utils,
    _traversal_utils,
    sharded_grad_scaler,
)
from torch.distributed.fsdp._flat_param import _FSDP_SKIP_WRITEBACK_CHECK as _FSDP_SKIP_WRITEBACK_CHECK
from torch.distributed.fsdp._flat_param import _FSDP_USE_FULL_PREC_IN_EVAL as _FSDP_USE_FULL_PREC_IN_EVAL
from torch.distributed.fsdp._flat_param import _FSDP_USE_UNSAFE_SETATTR as _FSDP_USE_UNSAFE_SETATTR
from torch.distributed.fsdp._flat_param import FlatParamShardMetadata as FlatParamShardMetadata
from torch.distributed.fsdp._flat_param import _ShardParamInfo
from torch.distributed.fsdp._wrap_utils import _auto_wrap as _auto_wrap
from torch.distributed.fsdp._wrap_utils import _validate_frozen_params as _validate_frozen_params

# What FSDP's own programs combine policies with.
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import _wrap_module_cls_individually as _wrap_module_cls_individually
from typing_extensions import override

#: What torch's functions know an instance by, and what they tell of one.
FSDPState: Any = _common_utils._FSDPState
FSDP_PREFIX: str = _common_utils.FSDP_PREFIX
FSDP_FLATTENED: str = _common_utils.FSDP_FLATTENED
HandleTrainingState = _common_utils.HandleTrainingState
TrainingState = _common_utils.TrainingState
clean_tensor_name: Callable[[str], str] = _common_utils.clean_tensor_name
_get_module_fsdp_state: Callable[[nn.Module], Any] = _common_utils._get_module_fsdp_state
_is_fsdp_flattened: Callable[[torch.Tensor], bool] = _common_utils._is_fsdp_flattened
_get_fsdp_states: Callable[[nn.Module], list[Any]] = _traversal_utils._get_fsdp_states
_get_fsdp_handles: Callable[[nn.Module], list[Any]] = _traversal_utils._get_fsdp_handles

#: Whole tensors for the distributed ones in a dict.
gather: Callable[..., dict[str, torch.Tensor]] = _gather_state_dict
#: Its ``_check_inf_per_device`` is what optimizers come through that look at the scale themselves.
TorchScaler: Any = sharded_grad_scaler.ShardedGradScaler
#: The order in which forwards gather flat parameters, compared between ranks, and with the first iteration's.
ExecutionOrder: Any = _exec_order_utils._ExecOrderData

#: The steps of torch's constructor that hold for any device and group.
init_ignored: Callable[..., Any] = _init_utils._init_ignored_module_states
modules_to_materialize: Callable[..., list[nn.Module]] = _init_utils._get_modules_to_materialize
check_single_device: Callable[..., None] = _init_utils._check_single_device_module
move_to_device: Callable[..., None] = _init_utils._move_module_to_device
device_from_id: Callable[..., torch.device | None] = _init_utils._get_device_from_device_id
compute_device: Callable[..., torch.device] = _init_utils._get_compute_device
_init_intra_and_inter_node_groups: Callable[..., Any] = _init_utils._init_intra_and_inter_node_groups

#: The name under which the wrapped module registers its unit's one parameter, with ``use_orig_params=False``.
FLAT_PARAM = "_flat_param"

#: By name, the handle and index of each parameter in a flat one.
param_infos: Callable[[nn.Module], dict[str, Any]] = _optim_utils._get_fqn_to_fsdp_param_info


class _CheckedInfo(_ShardParamInfo):
    """One that torch's function for loading an optimizer's state dict may not use before ``check`` has passed."""

    check: Callable[[], None]

    @property
    @override
    def in_shard(self) -> bool:
        self.check()
        return bool(self[0])


def shard_param_info(offset: int, start: int, numel: int, check: Callable[[], None] | None) -> Any:
    """What torch knows of the elements of a parameter that a shard has: ``numel`` from its element ``start`` on, at
    ``offset`` in the shard; or none.
    """
    known = (True, offset, numel, start, start + numel - 1) if numel > 0 else (False, None, None, None, None)
    if check is None:
        return _ShardParamInfo(*known)
    info = _CheckedInfo(*known)
    info.check = check
    return info


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was cut out of, or itself: FSDP's state dicts place values on it. No public name tells."""
    return mesh._get_root_mesh()


def make_sharded_tensor(
    own: torch.Tensor, shape: tuple[int, ...], pieces: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], group: Any
) -> torch.Tensor:
    """A ``ShardedTensor`` of ``shape`` whose piece ``rank`` is ``own``; a rank beyond the last piece has none.

    ``pieces``: ``(offsets, sizes)`` of each, the same on every rank. Nothing is sent: the constructor that torch
    exports asks all ranks for what each of them can compute here.

    The whole package is private in torch 2.11 and 2.13, and the values of FSDP's state dicts are of its classes.
    Imported when first used: it takes 0.2 s.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard

    rank = dist.get_rank(group)
    metadata = [
        ShardMetadata(
            list(offsets), list(sizes), _remote_device(own.device, dist.get_global_rank(group, each), each == rank)
        )
        for each, (offsets, sizes) in enumerate(pieces)
    ]
    properties = TensorProperties(dtype=own.dtype, pin_memory=own.is_pinned())
    made: torch.Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(own, metadata[rank])] if rank < len(pieces) else [],
        ShardedTensorMetadata(metadata, torch.Size(shape), properties),
        process_group=group,
    )
    return made


def _remote_device(own: torch.device, global_rank: int, is_own: bool) -> str:
    if own.type == "cpu":
        return f"rank:{global_rank}/cpu"
    # Where another rank computes is not known here; each host's ranks commonly take its devices in order.
    index = own.index if is_own else global_rank % torch.accelerator.device_count()
    return f"rank:{global_rank}/{own.type}:{index}"


def is_sharded_tensor(value: object) -> TypeGuard[Any]:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return isinstance(value, ShardedTensor)


def shards_of(value: Any) -> list[torch.Tensor]:
    return [shard.tensor for shard in value.local_shards()]


def shape_of(value: Any) -> torch.Size:
    """The shape of a ``ShardedTensor``, from its metadata: its own ``shape`` warns that the class is going away."""
    return torch.Size(value.metadata().size)


def piece_sizes(value: Any) -> list[list[int]]:
    """The sizes of all ranks' pieces of a ``ShardedTensor``, in the order of their first rows."""
    metadata = sorted(value.metadata().shards_metadata, key=lambda each: each.shard_offsets)
    return [list(each.shard_sizes) for each in metadata]
