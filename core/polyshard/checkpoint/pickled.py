"""Directories of formats 1 and 2, and of ``torch.distributed.checkpoint``: to read them is to run what is in them.

Their metadata and all that is no tensor are pickles. Nothing here is called unless the user has said that a directory
is to be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from ..runtime.unit import Unit
from ..state.kind import Kind
from ..state.places import Holding
from ..state.source import SavedState, Source
from .repair import repaired

_BESIDE = "extra.pt"


@dataclass(frozen=True, slots=True)
class Beside:
    """What was saved beside tensors."""

    extra: Mapping[str, Any]
    precision: Mapping[str, Mapping[str, Any]]
    optimizer: Kind | None

    @classmethod
    def read(cls, directory: Path) -> Beside:
        """What is in ``directory``."""
        held = torch.load(directory / _BESIDE, map_location="cpu", weights_only=False)
        return cls(held["extra"], held["precision"], held.get("optimizer"))


@dataclass(frozen=True)
class PickledSource(Source):
    """A checkpoint of format 1 or 2: ``model.<name>``, ``optimizer.state.<name>.<key>``."""

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


def read_metadata(directory: Path) -> Metadata:
    """What the directory holds."""
    return FileSystemReader(directory).read_metadata()


def read_state(directory: Path, targets: dict[str, Any], metadata: Metadata) -> None:
    """Fill the tensors of ``targets`` in place and replace its other values, by key of the checkpoint.

    Each rank reads by itself: what it needs depends on no other rank.
    """
    reader = FileSystemReader(directory)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    plan = reader.prepare_global_plan(plans)[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
