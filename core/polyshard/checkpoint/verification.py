"""Whether a checkpoint holds what was written."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointDamagedError
from .arguments import path_of
from .marker import Marker
from .reading import examine

#: Problems that one error tells of.
_MOST_TOLD = 8


def verify(directory: Path) -> None:
    """Read all of a checkpoint and compare it with the digests that were taken when it was written.

    Any process may call it, without ranks and without a model; nothing in the checkpoint is executed.

    Args:
        directory: What ``save`` or ``latest`` returned.

    Raises:
        CheckpointDamagedError: a file is gone, or holds something else than was written: names files, and what lies in
            them.
        ConfigError: ``directory`` is no path.
        StateError: it is no checkpoint, or is not committed.
        OSError: reading failed.
    """
    directory = path_of(directory, "directory")
    found: list[str] = []
    examine(Marker.read(directory).read_manifest(directory), lambda error: found.append(str(error)))
    if found:
        more = len(found) - _MOST_TOLD
        raise CheckpointDamagedError("\n".join([*found[:_MOST_TOLD], *([f"and {more} more"] if more > 0 else [])]))
