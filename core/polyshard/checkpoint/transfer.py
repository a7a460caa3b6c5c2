"""Moves state dicts to and from a directory, through the planners of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from ..interfaces import Collectives
from .agreement import together


def write_state(directory: Path, state: dict[str, Any], collectives: Collectives) -> None:
    """Write every rank's part of ``state`` into the empty ``directory``; what ranks hold alike is written once.

    Without a process group the ranks exchange their plans through ``collectives``; where those cannot communicate, this
    rank's part alone is written.
    """
    writer = FileSystemWriter(directory, overwrite=False)
    speaks = collectives.capabilities.can_communicate and collectives.world_size > 1
    if speaks and collectives.process_group is not None:
        save(state, storage_writer=writer, process_group=collectives.process_group)
        return
    coordinates = collectives.rank == 0 or not speaks
    what = f"Writing the checkpoint {directory}"
    planner = DefaultSavePlanner()
    # A rank that fails while others wait for what it has to say would be answered with something else.
    with together(collectives, what):
        planner.set_up_planner(state, writer.storage_meta(), coordinates)
        writer.set_up_storage_writer(coordinates)
        plan = writer.prepare_local_plan(planner.create_local_plan())
    plans = collectives.all_gather_object(plan) if speaks else [plan]
    metadata = None
    with together(collectives, what):
        if coordinates:
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
    if speaks:
        plans = collectives.all_gather_object(plans if coordinates else None)[0]
    with together(collectives, what):
        plan = planner.finish_plan(plans[collectives.rank if speaks else 0])
        written = writer.write_data(plan, planner).wait()
    everything = collectives.all_gather_object(written) if speaks else [written]
    if metadata is not None:
        writer.finish(metadata, everything)


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
