"""Directories of ``torch.distributed.checkpoint`` between FSDP2, polyshard and one process, bit for bit in float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity import units_of
from plain_states import Odd, Part, State, adamw, differing, odd, sorted_groups, train
from polyshard import checkpoint
from polyshard import state as states
from processes import KeptRanks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RANKS = KeptRanks()
LAYOUTS = ["flat", "rows", {"name": "blocks", "size": 4, "smallest": 1}]
FULL = states.StateOptions(form="full")


@pytest.fixture(scope="module", autouse=True)
def close_ranks() -> Iterator[None]:
    yield
    RANKS.close()


def fsdp2(seed: int) -> tuple[Odd, torch.optim.Optimizer]:
    model = odd(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model.parts:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def native(seed: int, **settings: Any) -> tuple[Odd, torch.optim.Optimizer]:
    model = odd(seed)
    polyshard.shard(model, polyshard.ShardConfig(collectives="gloo", policy=units_of(Part), **settings))
    return model, adamw(model)


def told(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> State:
    """As torch's own functions tell it."""
    one, other = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": one, "optimizer": other}


def fsdp2_writes(rank: int, folder: str, flatten: bool) -> State:
    model, optimizer = fsdp2(0)
    train(model, optimizer, 2)
    dcp.save(told(model, optimizer, flatten_optimizer_state_dict=flatten), checkpoint_id=folder)
    return told(model, optimizer, full_state_dict=True, cpu_offload=True)


def native_carries(rank: int, folder: str, layout: Any) -> State:
    """Reads what FSDP2 wrote, and writes it twice: as polyshard's checkpoint, and by torch."""
    model, optimizer = native(1, layout=layout)
    checkpoint.load_dcp(Path(folder, "fsdp2"), model, optimizer)
    own = Path(folder, f"own-{rank}")
    assert not own.exists()
    checkpoint.save(Path(folder, "run"), 1, model, optimizer)
    one, other = states.get_state_dict(model, optimizer)
    dcp.save({"model": one, "optimizer": other}, checkpoint_id=Path(folder, "stock"))
    one, other = states.get_state_dict(model, optimizer, FULL)
    polyshard.close(model)
    return {"model": one, "optimizer": other}


def read_plainly(directory: Path) -> State:
    model = odd(2)
    optimizer = adamw(model)
    state = told(model, optimizer)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # That one process loads is what no_dist asks for.
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return told(model, optimizer)


@pytest.mark.parametrize(("layout", "flatten"), [*zip(LAYOUTS, [False, True, False], strict=True)], ids=str)
def test_from_fsdp2_at_four_ranks_by_three_of_ours_to_one_process(layout: Any, flatten: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    reference = RANKS.run(4, fsdp2_writes, str(tmp_path / "fsdp2"), flatten)[0]
    for found in RANKS.run(3, native_carries, folder, layout):
        assert not differing(sorted_groups(reference), sorted_groups(found))
    for directory in (tmp_path / "run" / "step-00000001", tmp_path / "stock"):
        assert not differing(sorted_groups(reference), sorted_groups(read_plainly(directory)))


def native_writes(rank: int, folder: str, layout: Any) -> State:
    model, optimizer = native(0, layout=layout)
    train(model, optimizer, 2)
    checkpoint.save(Path(folder), 1, model, optimizer)
    one, other = states.get_state_dict(model, optimizer, FULL)
    polyshard.close(model)
    return {"model": one, "optimizer": other}


def fsdp2_reads(rank: int, folder: str) -> State:
    model, optimizer = fsdp2(1)
    state = told(model, optimizer)
    dcp.load(state, checkpoint_id=Path(folder, "step-00000001"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return told(model, optimizer, full_state_dict=True, cpu_offload=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_from_three_of_ours_to_fsdp2_at_four_ranks(layout: Any, tmp_path: Path) -> None:
    reference = RANKS.run(3, native_writes, str(tmp_path), layout)[0]
    assert not differing(sorted_groups(reference), sorted_groups(RANKS.run(4, fsdp2_reads, str(tmp_path))[0]))
