"""Where ranks run, and whether they can copy out of each other's memory, and should where nobody asked for it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _torch_private

#: Differs between hosts that have one name.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a rank runs, which decides whose memory it can map."""

    host: str
    device_index: int
    device_count: int
    problem: str
    """Why its memory cannot be mapped by others; empty where no reason is known."""
    nvlinks: tuple[int, ...] | None = None
    """The devices that it sees NVLink connect with its own; None where that cannot be told."""
    met: frozenset[tuple[int, ...]] = frozenset()
    """The ranks of each group in which its process shares symmetric memory."""

    @classmethod
    def here(cls, device_index: int, met: frozenset[tuple[int, ...]] = frozenset()) -> Place:
        host = socket.gethostname()
        with suppress(OSError):
            host += f" {_BOOT_ID.read_text().strip()}"
        return cls(
            host,
            device_index,
            torch.cuda.device_count(),
            _torch_private.symmetric_problem(device_index),
            _torch_private.nvlinks(device_index),
            met,
        )


def obstacle(places: Sequence[Place]) -> str:
    """The reason why ranks at ``places`` cannot map each other's memory; empty where none is known.

    The same on every rank that is given the same places.
    """
    hosts = {place.host for place in places}
    if len(hosts) > 1:
        return f"{len(places)} ranks on {len(hosts)} hosts"
    problems = [place.problem for place in places if place.problem]
    if problems:
        return problems[0]
    # Processes that see one device each all call it number 0; then only trying tells.
    if _numbered_alike(places):
        for one in places:
            for other in places:
                if one is not other and not torch.cuda.can_device_access_peer(one.device_index, other.device_index):
                    return f"device {one.device_index} cannot access device {other.device_index}"
    return ""


def unasked_obstacle(places: Sequence[Place], ranks: tuple[int, ...]) -> str:
    """The reason why ``ranks`` of the job, at ``places`` of one host, should not copy unless told to.

    Memory is mapped over NVLink alone: over PCIe copies were not measured, and some hosts do not carry them right. And
    in one group of a process alone: torch numbers a process's meetings through all groups, and ranks that have met
    unequally often would wait for each other in vain.

    The same on every rank that is given the same places.
    """
    if any(place.nvlinks is None for place in places):
        return f"torch {torch.__version__} does not tell here which devices NVLink connects"
    if not _numbered_alike(places):
        return "processes do not see each other's devices, so that links between them are unknown"
    for one in places:
        for other in places:
            if one is not other and other.device_index not in (one.nvlinks or ()):
                return f"NVLink does not connect device {one.device_index} with device {other.device_index}"
    others = sorted({group for place in places for group in place.met} - {ranks})
    if others:
        return f"ranks share symmetric memory in another group already, {list(others[0])}"
    return ""


def _numbered_alike(places: Sequence[Place]) -> bool:
    """Whether the devices of ``places``, on one host, have one number in all processes."""
    devices = [place.device_index for place in places]
    return len(set(devices)) == len(devices) and max(devices) < min(place.device_count for place in places)
