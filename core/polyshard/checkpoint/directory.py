"""A checkpoint's directory as a source of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ..engine.step.unit import Unit
from ..state.places import Holding
from ..state.source import SavedState, Source
from .repair import repaired
from .transfer import read_state


@dataclass(frozen=True)
class DirectorySource(Source):
    """What ``save`` wrote: ``model.<name>``, ``optimizer.state.<name>.<key>``."""

    directory: Path
    metadata: Metadata
    complete: bool = True
    may_stand_still: bool = False
    """Whether optimizer state may be damaged: see the note in ``repair.py``."""

    @property
    def described(self) -> str:
        return f"the checkpoint {self.directory}"

    def read(self, targets: dict[str, Any]) -> None:
        read_state(self.directory, targets, self.metadata)

    def entry(self, key: str) -> Any | None:
        return self.metadata.state_dict_metadata.get(key)

    def paths(self, *prefix: str) -> dict[str, tuple[Any, ...]]:
        return {
            key: tuple(path)
            for key, path in self.metadata.planner_data.items()
            # Paths name a parameter of which nobody wrote anything, too: one rank of a pretended world may hold none.
            if tuple(path)[: len(prefix)] == prefix and key in self.metadata.state_dict_metadata
        }

    def mended(
        self, saved: SavedState, groups: Sequence[Sequence[Holding]], units: Sequence[Unit], rank: int
    ) -> SavedState:
        if not self.may_stand_still:
            return saved
        files: dict[str, set[str]] = {}
        for index, stored in self.metadata.storage_data.items():
            files.setdefault(index.fqn, set()).add(stored.relative_path)
        return repaired(self, files, saved, groups, units, rank)
