"""This machine as the doctor sees it, read in one place, so that all checks are functions of values."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import socket
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

#: Where the kernel driver shows one folder for each NVIDIA device, whatever a process may see of them.
_NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")
_INFINIBAND = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")
#: Seconds that a server has to take a connection.
_CONNECT_S = 3.0
#: Asked for where polyshard is not installed, and so states no requirements.
_ALWAYS = ("torch", "stevedore", "pluggy")


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    capability: tuple[int, int]
    total_nbytes: int
    free_nbytes: int
    peers: frozenset[int]
    """Indices of the devices whose memory it can address."""


@dataclass(frozen=True, slots=True)
class Machine:
    """All that was read; numbers are None where the system has none."""

    environ: Mapping[str, str]
    installed: Mapping[str, str]
    """Version by the name of each distribution that a check asks about, in lower case."""
    requirements: tuple[str, ...]
    """polyshard's own, as its metadata state them; empty where it is not installed."""
    devices: tuple[Device, ...] = ()
    uncopied: str = ""
    """Why ranks on these devices would leave large units to NCCL; empty where they copy them, or for one device."""
    nvidia_devices: int = 0
    """How many the kernel driver knows, seen by this process or not."""
    cuda: str | None = None
    """The CUDA version that torch was built for; None for a build without."""
    nccl: str | None = None
    backends: frozenset[str] = frozenset()
    """Of torch.distributed: ``gloo``, ``nccl``, ``mpi``; empty where it was not built."""
    interfaces: tuple[str, ...] = ()
    infiniband: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters."""
    host_addresses: tuple[str, ...] = ()
    """Addresses of the host's own name; empty where it does not resolve."""
    lighthouse: bool | None = None
    """Whether torchft's server answers at ``TORCHFT_LIGHTHOUSE``; None where that is not set."""
    cpus: int = 1
    """Those that this process may run on."""
    open_files: int | None = None
    shared_memory_nbytes: int | None = None
    locked_nbytes: int | None = None
    """Limit of locked memory; None for no limit."""


def read_machine(environ: Mapping[str, str]) -> Machine:
    """This machine as it is now. Makes a CUDA context on each device that it sees."""
    requirements = _requirements()
    return Machine(
        environ=environ,
        installed=_installed(requirements),
        requirements=requirements,
        devices=_devices(),
        uncopied=_uncopied(),
        nvidia_devices=len(_names_in(_NVIDIA_DEVICES)),
        cuda=torch.version.cuda,
        nccl=_nccl(),
        backends=_backends(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        infiniband=_names_in(_INFINIBAND),
        host_addresses=_host_addresses(),
        lighthouse=_lighthouse(environ.get("TORCHFT_LIGHTHOUSE", "")),
        cpus=len(os.sched_getaffinity(0)),
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        shared_memory_nbytes=_size_of(_SHARED_MEMORY),
        locked_nbytes=_soft_limit(resource.RLIMIT_MEMLOCK),
    )


def _installed(requirements: tuple[str, ...]) -> dict[str, str]:
    asked = {"polyshard", *_ALWAYS, *(re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements)}
    found = {}
    for name in asked:
        with suppress(importlib.metadata.PackageNotFoundError):
            # None of what pip left half removed.
            found[name.lower().replace("_", "-")] = importlib.metadata.version(name) or "unknown"
    return found


def _requirements() -> tuple[str, ...]:
    try:
        return tuple(importlib.metadata.requires("polyshard") or ())
    except importlib.metadata.PackageNotFoundError:
        return ()


def _devices() -> tuple[Device, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        peers = (other for other in range(count) if other != index)
        found.append(
            Device(
                name=properties.name,
                capability=torch.cuda.get_device_capability(index),
                total_nbytes=total,
                free_nbytes=free,
                peers=frozenset(other for other in peers if torch.cuda.can_device_access_peer(index, other)),
            )
        )
    return tuple(found)


def _uncopied() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return ""
    # A backend, which nothing else of the command line needs.
    from polyshard_backends.places import Place, obstacle, unasked_obstacle

    places = [Place.here(index) for index in range(count)]
    return obstacle(places) or unasked_obstacle(places, tuple(range(count)))


def _nccl() -> str | None:
    if "nccl" not in _backends():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _backends() -> frozenset[str]:
    if not dist.is_available():
        return frozenset()
    asked = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return frozenset(name for name, available in asked.items() if available())


def _names_in(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(each.name for each in folder.iterdir()))
    except OSError:
        return ()


def _host_addresses() -> tuple[str, ...]:
    try:
        return tuple(sorted({str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}))
    except OSError:
        return ()


def _lighthouse(address: str) -> bool | None:
    if not address:
        return None
    try:
        parts = urllib.parse.urlsplit(address)
        with socket.create_connection((parts.hostname, parts.port or 80), timeout=_CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _size_of(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize
