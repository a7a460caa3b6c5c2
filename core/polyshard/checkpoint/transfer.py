"""Moves state dicts to and from a directory, through the planners of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from ..interfaces import Collectives
from ..state.agreement import together
from ..state.exchange import coordinates, gather_to_first, scatter_from_first


def write_state(directory: Path, state: dict[str, Any], collectives: Collectives) -> dict[str, int]:
    """Write every rank's part of ``state`` into the empty ``directory``; what ranks hold alike is written once.

    Where the collectives cannot communicate, this rank's part alone is written. Returns how many bytes each file has
    at least, on the rank that coordinates.
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
        written = writer.write_data(planner.finish_plan(plan), planner).wait()
    everything = gather_to_first(collectives, written)
    with together(collectives, what):
        if metadata is not None and everything is not None:
            writer.finish(metadata, everything)
    sizes: dict[str, int] = {}
    for result in (each for results in everything or () for each in results):
        stored = result.storage_data
        sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
    return sizes


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
