"""Whether a checkpoint holds what was written."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointDamagedError, StateError
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
        StateError: it is no checkpoint, is not committed, or is of format 1 or 2, which have no digests.
        OSError: reading failed.
    """
    directory = path_of(directory, "directory")
    marker = Marker.read(directory)
    if marker.pickled:
        marker.require_files(directory)
        raise StateError(
            f"{directory} has format {marker.format}, which has no digests to compare its files with. Load it with "
            "pickles=True where you trust it, and save it again."
        )
    found: list[str] = []
    examine(marker.read_manifest(directory), lambda error: found.append(str(error)))
    if found:
        more = len(found) - _MOST_TOLD
        raise CheckpointDamagedError("\n".join([*found[:_MOST_TOLD], *([f"and {more} more"] if more > 0 else [])]))
