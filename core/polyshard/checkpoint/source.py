"""What a checkpoint on disk says that it holds, and whether a target can be read from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import ConfigError
from .boxes import Box
from .sharded import CheckpointTensor
from .transfer import read_state

_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's directory and what it says it holds."""

    directory: Path
    metadata: Metadata
    complete: bool
    """Whether every rank's part is there; not so where one rank of a pretended world saved."""
    may_stand_still: bool = False
    """Whether optimizer state may be damaged: see the note in ``repair.py``."""

    def read(self, targets: dict[str, Any]) -> None:
        """Fill tensors in place and replace other values."""
        read_state(self.directory, targets, self.metadata)

    def entry(self, key: str) -> Any | None:
        """What is said about ``key``, or None where the checkpoint has none."""
        return self.metadata.state_dict_metadata.get(key)

    def paths(self, *prefix: str) -> dict[str, tuple[Any, ...]]:
        """Each key under ``prefix`` and the path of the value within the saved state."""
        return {
            key: tuple(path)
            for key, path in self.metadata.planner_data.items()
            # Paths name a parameter of which nobody wrote anything, too: one rank of a pretended world may hold none.
            if tuple(path)[: len(prefix)] == prefix and key in self.metadata.state_dict_metadata
        }


def check(source: Source, key: str, what: str, target: Any, where: str) -> None:
    """Raise ConfigError unless all of ``target`` can be read from the checkpoint under ``key``.

    ``what`` names the target in errors, ``where`` the rank.
    """
    entry = source.entry(key)
    if not isinstance(entry, TensorStorageMetadata):
        raise ConfigError(
            f"{what} is no tensor in the checkpoint {source.directory} {where}. Load it into the model that it was "
            "saved from."
        )
    if tuple(entry.size) != tuple(target.shape):
        raise ConfigError(
            f"{what} has shape {tuple(entry.size)} in the checkpoint {source.directory} but {tuple(target.shape)} in "
            f"the model {where}. Load it into the model that it was saved from."
        )
    if entry.properties.dtype != target.dtype:
        raise ConfigError(
            f"{what} is {entry.properties.dtype} in the checkpoint {source.directory} but {target.dtype} in the model "
            f"{where}. Convert the model before sharding, by to({entry.properties.dtype}); after loading, it cannot be."
        )
    if sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size):
        return
    wanted = (
        [chunk.box for chunk in target.chunks]
        if isinstance(target, CheckpointTensor)
        else [Box((0,) * target.ndim, tuple(target.shape))]
    )
    for box in wanted:
        held = sum(_overlap(box, chunk.offsets, chunk.sizes) for chunk in entry.chunks)
        if held != box.numel:
            raise ConfigError(
                f"The checkpoint {source.directory} holds {held} of the {box.numel} elements of {what} from "
                f"{list(box.offsets)} on {where}: one rank of a pretended world saved it. Load it on the same rank of "
                "the same world size."
            )


def _overlap(box: Box, offsets: Iterable[int], sizes: Iterable[int]) -> int:
    return math.prod(
        max(0, min(low + size, start + extent) - max(low, start))
        for low, size, start, extent in zip(box.offsets, box.sizes, offsets, sizes, strict=True)
    )


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, quoted."""
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown
