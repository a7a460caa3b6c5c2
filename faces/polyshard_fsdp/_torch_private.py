"""Every private torch name that the drop-in uses, with the reason. The test suite ran on torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _runtime_utils

# Policy objects derive from the first, and tell themselves apart from functions by it alone; the other two are what
# FSDP's own programs combine function policies with.
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import _wrap_module_cls_individually as _wrap_module_cls_individually

#: Programs import ``_lazy_init`` from this module, and call it where they need a model's root before its first forward.
runtime_utils, lazy_init = _runtime_utils, _runtime_utils._lazy_init

# The functions of this module call ``_fqn_modifiers`` of every module: the first thing of a foreign module that they
# run, in torch 2.11 and 2.13. No public name makes a module known to them.
_CHECKPOINT = "torch.distributed.checkpoint.state_dict"


def checkpoint_call() -> tuple[str, Mapping[str, Any]] | None:
    """Name and arguments of the public function of ``torch.distributed.checkpoint.state_dict`` that is running.

    None outside of one. From the stack: what it calls of a module is told neither which function it is, nor whether it
    was given optimizers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT and frame.f_code.co_name.startswith(("get_", "set_")):
            return frame.f_code.co_name, frame.f_locals
        frame = frame.f_back
    return None


def is_replicated_in_place(module: nn.Module) -> bool:
    """Whether ``torch.distributed._composable.replicate`` was applied to ``module``; it leaves no public mark."""
    return "replicate" in (_get_registry(module) or ())


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
