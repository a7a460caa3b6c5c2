"""Limits of the system that hurt many ranks on one host."""

from __future__ import annotations

from .finding import Finding, Level, Section
from .machine import Machine

#: A rank of gloo holds a connection to each other rank for each group, beside data loaders' pipes and files.
OPEN_FILES = 4096
#: NCCL maps tens of megabytes for each pair of devices, and data loaders pass batches through it.
SHARED_MEMORY_NBYTES = 2**30


def limits(machine: Machine) -> Section:
    """Open files, shared memory, locked memory."""
    facts = (
        ("open files (ulimit -n)", "no limit" if machine.open_files is None else str(machine.open_files)),
        ("shared memory (/dev/shm)", _size(machine.shared_memory_nbytes)),
        ("locked memory (ulimit -l)", "no limit" if machine.locked_nbytes is None else _size(machine.locked_nbytes)),
    )
    return Section("limits", facts, (*_files(machine), *_shared(machine), *_locked(machine)))


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "not there"
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _files(machine: Machine) -> list[Finding]:
    if machine.open_files is None or machine.open_files >= OPEN_FILES:
        return []
    why = (
        "each rank holds connections to all others for each group: hundreds of ranks run out, as 'Too many open files'"
    )
    return [Finding(Level.HINT, "ulimit -n", str(machine.open_files), why, f"ulimit -n {OPEN_FILES} before starting")]


def _shared(machine: Machine) -> list[Finding]:
    size = machine.shared_memory_nbytes
    if size is not None and size >= SHARED_MEMORY_NBYTES:
        return []
    several = len(machine.devices) > 1
    return [
        Finding(
            Level.PROBLEM if several else Level.HINT,
            "/dev/shm",
            _size(size),
            "NCCL between devices of one host, and workers of data loaders, share memory there; containers get 64 MiB",
            "start the container with --shm-size=8g or --ipc=host",
            "NCCL user guide, troubleshooting: shared memory",
        )
    ]


def _locked(machine: Machine) -> list[Finding]:
    if machine.locked_nbytes is None or not machine.infiniband:
        return []
    return [
        Finding(
            Level.HINT,
            "ulimit -l",
            _size(machine.locked_nbytes),
            "InfiniBand adapters send from locked memory, and NCCL fails to register more than the limit",
            "ulimit -l unlimited; for a container, --ulimit memlock=-1",
            "NCCL user guide, troubleshooting: shared memory",
        )
    ]
