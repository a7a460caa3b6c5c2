"""Picks a backend by the model's device."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from polyshard.errors import DeviceError
from polyshard.interfaces import Collectives, Group, PluginContext, RankAndSize

from .process_group import group_backend, resolve_group

#: With the distribution, although built-in names are polyshard's anyway: what is asked for shows who serves it.
_BY_DEVICE = {"cuda": "polyshard:nccl", "cpu": "polyshard:gloo"}
_PRETENDED = "polyshard:fake"


class _Auto:
    """NCCL for CUDA and gloo for the CPU, over ``torch.distributed``.

    A process group of torch's ``fake`` backend, or an object that has ``rank()`` and ``size()`` without being a process
    group, is served by the fake backend. The backend is constructed by its name, and so compared between ranks.

    Raises:
        StateError: no group was given and ``torch.distributed`` is not initialised.
        DeviceError: the model is neither on the CPU nor on CUDA.
    """

    api_version: ClassVar[int] = 1

    def __call__(self, context: PluginContext) -> Collectives:
        return context.construct(Group.COLLECTIVES, _choice(context))


def _choice(context: PluginContext) -> str | dict[str, Any]:
    given = context.process_group
    distributed = dist.is_available() and dist.is_initialized()
    stand_in = given is not None and not (distributed and isinstance(given, dist.ProcessGroup))
    if stand_in and isinstance(given, RankAndSize):
        return _PRETENDED
    device_type = context.device.type
    if distributed:
        group = resolve_group(context)
        if group_backend(group, device_type) == "fake":
            return {"name": _PRETENDED, "rank": group.rank(), "world_size": group.size()}
    if device_type not in _BY_DEVICE:
        raise DeviceError(
            f"collectives 'auto' knows backends for the CPU and CUDA, and the model computes on {context.device}; name "
            f"a backend that serves it"
        )
    return _BY_DEVICE[device_type]


auto = _Auto()
