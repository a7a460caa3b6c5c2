"""Picks a backend by the model's device, and by what links its ranks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from polyshard.errors import DeviceError
from polyshard.interfaces import Collectives, Group, PluginContext, RankAndSize
from typing_extensions import override

from .places import Place, obstacle, unasked_obstacle
from .process_group import group_backend, resolve_group
from .symmetric import SymmetricCollectives

#: With the distribution, although built-in names are polyshard's anyway: what is asked for shows who serves it.
_GLOO, _PRETENDED = "polyshard:gloo", "polyshard:fake"
#: MiB of a whole unit from which on it is copied. Two of that size fill a launch of neighbours (``batch_nbytes``), so
#: that no copy divides one, and its reduction travels alone in any case. Smaller units are those of steps that wait for
#: the host, which issues a copy for each other rank: with a smallest of 32, 300m took 57 ms where NCCL took 53, for two
#: units of 62.5 MiB. Those of 120 MiB and more gain (docs/performance.md).
SMALLEST_COPIED_MIB = 64


class ChosenCollectives(SymmetricCollectives):
    """``symmetric`` for units of 64 MiB and more where nothing speaks against it, and ``nccl`` elsewhere.

    Ranks copy where all of the group are on one host, NVLink connects every two of them, torch has symmetric memory and
    would not set up multicast, and no rank shares such memory in another group. Ranks ask each other at the first such
    unit, which is a meeting of the whole group, and all decide alike. Nobody asked for copies: ``reason`` tells why
    there are none, and nothing warns.

    Raises:
        StateError: ``torch.distributed`` is not initialised.
        WorldSizeError: this process is not in the group.
    """

    api_version = 1

    _sharing = "NVLink between all"

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context, smallest_mib=SMALLEST_COPIED_MIB)

    @override
    def _obstacle(self, places: list[Place]) -> str:
        return obstacle(places) or unasked_obstacle(places, tuple(dist.get_process_group_ranks(self.process_group)))

    @override
    def _give_up(self, problem: str) -> None:
        self._problem = problem


class _Auto:
    """gloo for the CPU; for CUDA copy engines or NCCL, as ``ChosenCollectives`` finds out.

    A process group of torch's ``fake`` backend, or an object that has ``rank()`` and ``size()`` without being a process
    group, is served by the fake backend, which is constructed by its name, as gloo is, and so compared between ranks.

    Raises:
        StateError: no group was given and ``torch.distributed`` is not initialised.
        DeviceError: the model is neither on the CPU nor on CUDA.
    """

    api_version: ClassVar[int] = 1
    reason: ClassVar[str] = (
        f"symmetric for units from {SMALLEST_COPIED_MIB} MiB where all ranks of a group are on one host with NVLink "
        "between all; nccl for the rest. Ranks ask at the first such unit"
    )

    def __call__(self, context: PluginContext) -> Collectives:
        choice = _choice(context)
        return ChosenCollectives(context) if choice is None else context.construct(Group.COLLECTIVES, choice)


def _choice(context: PluginContext) -> str | dict[str, Any] | None:
    """What serves ``context``; None for ``ChosenCollectives``."""
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
    if device_type not in ("cpu", "cuda"):
        raise DeviceError(
            f"collectives 'auto' knows backends for the CPU and CUDA, and the model computes on {context.device}; name "
            f"a backend that serves it"
        )
    return _GLOO if device_type == "cpu" else None


auto = _Auto()
