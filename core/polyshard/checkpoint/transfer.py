"""Moves state dicts to and from a directory, through the planners of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..interfaces import Collectives
from ..state.agreement import together
from ..state.exchange import coordinates, gather_to_first, scatter_from_first
from ..state.sharded import in_host_memory

Aliases = Mapping[str, Sequence[tuple[str, ...]]]


@dataclass(frozen=True)
class Writing:
    """What this rank is to write of a state dict; the ranks have shared it out."""

    directory: Path
    writer: FileSystemWriter
    planner: DefaultSavePlanner
    plan: SavePlan
    metadata: Metadata | None
    """Of all that is written; on the rank that coordinates."""

    def detached(self) -> Writing:
        """The same of copies in host memory: what is trained on meanwhile is not in it.

        Takes the memory of what this rank writes, which of replicated state is a part.
        """
        offsets: dict[str, set[tuple[int, ...] | None]] = {}
        for item in self.plan.items:
            offset = item.index.offset
            offsets.setdefault(item.index.fqn, set()).add(None if offset is None else tuple(offset))
        values: Mapping[str, Any] = self.planner.state_dict
        copies = {key: in_host_memory(values[key], boxes) for key, boxes in offsets.items()}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(copies, self.writer.storage_meta(), self.metadata is not None)
        planner.finish_plan(self.plan)
        return dataclasses.replace(self, planner=planner)

    def write(self) -> list[WriteResult]:
        """Write it; returns what ``finish`` is to be told. Exchanges nothing."""
        return list(self.writer.write_data(self.plan, self.planner).wait())

    def finish(self, everything: Sequence[Sequence[WriteResult]], aliases: Aliases) -> dict[str, int]:
        """Write what all ranks' parts are, on the rank that coordinates; returns each file's least size in bytes.

        Args:
            everything: What each rank's ``write`` returned.
            aliases: Other paths of values, by key.
        """
        assert self.metadata is not None
        told = [[*results, *_renamed(results, aliases)] for results in everything]
        entries, paths = dict(self.metadata.state_dict_metadata), dict(self.metadata.planner_data)
        for key, others in aliases.items():
            for path in others if key in entries else ():
                entries[".".join(path)] = entries[key]
                paths[".".join(path)] = path
        metadata = dataclasses.replace(self.metadata, state_dict_metadata=entries, planner_data=paths)
        self.writer.finish(metadata, told)
        sizes: dict[str, int] = {}
        for stored in (result.storage_data for results in everything for result in results):
            sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
        return sizes


def plan_writing(directory: Path, state: dict[str, Any], collectives: Collectives) -> Writing:
    """Share out ``state`` to be written into the empty ``directory``: what ranks hold alike is written by one of them.

    Where the collectives cannot communicate, this rank's part alone is.
    """
    writer = FileSystemWriter(directory, overwrite=False)
    first = coordinates(collectives)
    what = f"Writing the checkpoint {directory}"
    planner = DefaultSavePlanner()
    # A rank that fails while others wait for what it has to say would be answered with something else.
    with together(collectives, what):
        planner.set_up_planner(state, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        plan = writer.prepare_local_plan(planner.create_local_plan())
    plans = gather_to_first(collectives, plan)
    metadata = None
    with together(collectives, what):
        if plans is not None:
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
    plan = scatter_from_first(collectives, plans)
    with together(collectives, what):
        plan = planner.finish_plan(plan)
    return Writing(directory, writer, planner, plan, metadata)


def write_state(
    directory: Path, state: dict[str, Any], collectives: Collectives, aliases: Aliases | None = None
) -> dict[str, int]:
    """Write every rank's part of ``state`` into the empty ``directory``.

    Returns how many bytes each file has at least, on the rank that coordinates.
    """
    what = f"Writing the checkpoint {directory}"
    writing = plan_writing(directory, state, collectives)
    with together(collectives, what):
        written = writing.write()
    everything = gather_to_first(collectives, written)
    sizes: dict[str, int] = {}
    with together(collectives, what):
        if everything is not None:
            sizes = writing.finish(everything, aliases or {})
    return sizes


def _renamed(results: Iterable[WriteResult], aliases: Aliases) -> list[WriteResult]:
    """Of what was written under one name, that it is to be found under others, too."""
    found = []
    for result in results:
        for path in aliases.get(result.index.fqn, ()):
            index = dataclasses.replace(result.index, fqn=".".join(path))
            found.append(dataclasses.replace(result, index=index))
    return found


def read_metadata(directory: Path) -> Metadata:
    """What the checkpoint in ``directory`` holds."""
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
