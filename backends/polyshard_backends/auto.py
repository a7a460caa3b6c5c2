"""Picks a backend by the model's device."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist
from polyshard.errors import DeviceError, StateError
from polyshard.interfaces import Collectives, PluginContext, RankAndSize

from .fake import FakeCollectives
from .gloo import GlooCollectives
from .nccl import NcclCollectives
from .process_group import group_backend, resolve_group


class _Auto:
    """NCCL for CUDA and gloo for the CPU, over ``torch.distributed``.

    A process group of torch's ``fake`` backend, or an object that has ``rank()`` and ``size()`` without being a process
    group, is served by the fake backend.

    Raises:
        StateError: no group was given and ``torch.distributed`` is not initialised.
        DeviceError: the model is neither on the CPU nor on CUDA.
    """

    api_version: ClassVar[int] = 1

    def __call__(self, context: PluginContext) -> Collectives:
        given = context.process_group
        distributed = dist.is_available() and dist.is_initialized()
        stand_in = given is not None and not (distributed and isinstance(given, dist.ProcessGroup))
        if stand_in and isinstance(given, RankAndSize):
            return FakeCollectives(context)
        if not distributed:
            raise StateError(
                "collectives 'auto' found no process group: launch with torchrun and call "
                'torch.distributed.init_process_group() first, or set collectives="fake" for one pretended rank'
            )
        device_type = context.device.type
        group = resolve_group(context)
        if group_backend(group, device_type) == "fake":
            return FakeCollectives(context, rank=group.rank(), world_size=group.size())
        if device_type == "cuda":
            return NcclCollectives(context)
        if device_type == "cpu":
            return GlooCollectives(context)
        raise DeviceError(
            f"collectives 'auto' knows backends for the CPU and CUDA, and the model computes on {context.device}; name "
            f"a backend that serves it"
        )


auto = _Auto()
