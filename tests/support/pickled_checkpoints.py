"""Checkpoints of formats 1 and 2, as polyshard wrote them through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from parity import root_of
from polyshard import checkpoint
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter


def write_pickled(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    version: int = 2,
    kind: dict[str, str] | None = None,
    stale: Mapping[str, Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Every rank calls it.

    ``stale``: state of parameters of which this rank has no element, which 0.1 told of. ``kind``: the optimizer's
    module and class, which 0.1 did not tell.
    """
    owner = root_of(model)
    alone = not owner.collectives.capabilities.can_communicate
    directory = root / f"step-{step:08d}"
    if owner.rank == 0:
        directory.mkdir(parents=True)
        beside = {"extra": dict(extra or {}), "precision": {}, **({} if version == 1 else {"optimizer": kind})}
        torch.save(beside, directory / "extra.pt")
    if not alone:
        owner.collectives.barrier()
    state: dict[str, Any] = {"model": checkpoint.model_state(model)}
    if optimizer is not None:
        told = checkpoint.optimizer_state(model, optimizer)
        for name, values in (stale or {}).items():
            assert name not in told["state"]
            told["state"][name] = dict(values)
        state["optimizer"] = told
    writer, planner = FileSystemWriter(directory, overwrite=False), DefaultSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans = [plan] if alone else list(owner.collectives.all_gather_object(plan))
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0 if alone else owner.rank])
    results = list(writer.write_data(plan, planner).wait())
    everything = [results] if alone else list(owner.collectives.all_gather_object(results))
    if owner.rank == 0:
        writer.finish(metadata, everything)
        marker = {
            "format": version,
            "step": step,
            "world_size": owner.collectives.world_size,
            "complete": not alone or owner.collectives.world_size == 1,
        }
        if version == 2:
            sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
            marker |= {"identity": f"{step:032x}", "parent": None, "turn": 1, "files": sizes}
        (directory / "COMMITTED").write_text(json.dumps({**marker, "torch": ""}))
    if not alone:
        owner.collectives.barrier()
    return directory
