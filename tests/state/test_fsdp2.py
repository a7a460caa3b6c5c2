"""Directories of ``torch.distributed.checkpoint`` between FSDP2, polyshard and one process, bit for bit in float32."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity import units_of
from plain_states import Odd, Part, State, adamw, differing, odd, plain_state, state_of, train
from polyshard import checkpoint
from polyshard import state as states
from polyshard.errors import RankMismatchError
from processes import KeptRanks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytestmark = pytest.mark.slow
RANKS = KeptRanks()
FULL = states.StateOptions(form="full")


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


def native_carries(rank: int, folder: str) -> State:
    """Reads what FSDP2 wrote, and writes it twice: as polyshard's checkpoint, and by torch."""
    model, optimizer = native(1)
    checkpoint.load_dcp(Path(folder, "fsdp2"), model, optimizer)
    own = Path(folder, f"own-{rank}")
    assert not own.exists()
    checkpoint.save(Path(folder, "run"), 1, model, optimizer)
    one, other = states.get_state_dict(model, optimizer)
    dcp.save({"model": one, "optimizer": other}, checkpoint_id=Path(folder, "stock"))
    found = state_of(model, optimizer)
    polyshard.close(model)
    return found


def read_plainly(directory: Path) -> State:
    model = odd(2)
    optimizer = adamw(model)
    state = told(model, optimizer)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # That one process loads is what no_dist asks for.
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return told(model, optimizer)


def test_from_fsdp2_at_two_ranks_by_three_of_ours_to_one_process(tmp_path: Path) -> None:
    reference = RANKS.run(2, fsdp2_writes, str(tmp_path / "fsdp2"), True)[0]
    for found in RANKS.run(3, native_carries, str(tmp_path)):
        assert not differing(reference, found)
    for directory in (tmp_path / "run" / "step-00000001", tmp_path / "stock"):
        assert not differing(reference, read_plainly(directory))


def from_rank_0(rank: int, settings: dict[str, Any]) -> State:
    model, optimizer = native(1, **settings)
    plain = plain_state() if rank == 0 else {"model": {}, "optimizer": {}}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, plain["model"], options=options)
    set_optimizer_state_dict(model, optimizer, plain["optimizer"], options=options)
    found = state_of(model, optimizer)
    polyshard.close(model)
    return found


@pytest.mark.parametrize("settings", [{}, {"strategy": "hybrid_shard", "shard_size": 2}, {"offload": "cpu"}], ids=str)
def test_what_rank_0_alone_has_is_sent_by_torchs_function(settings: dict[str, Any]) -> None:
    for found in RANKS.run(4, from_rank_0, settings):
        assert not differing(plain_state(), found)


def dtensors_of_fsdp2(rank: int) -> list[State]:
    theirs, their_optimizer = fsdp2(0)
    train(theirs, their_optimizer, 2)
    model, optimizer = native(1)
    given = told(theirs, their_optimizer)
    assert isinstance(given["model"]["parts.0.gate"], DTensor)
    states.set_state_dict(model, optimizer, model_state_dict=given["model"], optim_state_dict=given["optimizer"])
    found = state_of(model, optimizer)
    polyshard.close(model)
    return [told(theirs, their_optimizer, full_state_dict=True), found]


def test_dtensors_of_fsdp2_are_taken_without_a_file() -> None:
    for theirs, ours in RANKS.run(3, dtensors_of_fsdp2):
        assert not differing(theirs, ours)


def dtensors_on_one_rank(rank: int) -> None:
    model, _ = native(1)
    before = states.get_model_state_dict(model, FULL)
    given: dict[str, Any] = dict(odd(0).state_dict())
    if rank == 0:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        given["parts.0.gate"] = distribute_tensor(given["parts.0.gate"], mesh, [Shard(2)], src_data_rank=None)
    else:
        init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(RankMismatchError, match=r"'model\.parts\.0\.gate' is .*\(Shard\(dim=2\),\) on rank|left out"):
        states.set_model_state_dict(model, given)
    assert not differing(before, states.get_model_state_dict(model, FULL))
    polyshard.close(model)


def test_ranks_that_give_different_kinds_of_tensors_are_told() -> None:
    RANKS.run(3, dtensors_on_one_rank)


def as_dtensors(rank: int) -> list[State]:
    model, optimizer = native(0)
    train(model, optimizer, 2)
    one, other = states.get_state_dict(model, optimizer)
    # As torch gives them, of this rank's memory.
    theirs = told(model, optimizer)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert one[name].to_local().data_ptr() == parameter.to_local().data_ptr()
        assert one[name].placements == parameter.placements
        for key, value in theirs["optimizer"]["state"].get(name, {}).items():
            assert other["state"][name][key] is value
    inside = states.get_model_state_dict(model.parts[1])
    assert inside["gate"].to_local().data_ptr() == model.parts[1].gate.to_local().data_ptr()
    whole = state_of(model, optimizer)
    kept = {name: value.clone() for name, value in one.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    states.set_model_state_dict(model, kept)
    assert not differing(whole["model"], states.get_model_state_dict(model, FULL))
    polyshard.close(model)
    return [whole, told(model, optimizer, full_state_dict=True)]


def test_dtensors_are_the_parameters_own_and_those_of_torchs_functions() -> None:
    reference = plain_state()
    for ours, theirs in RANKS.run(3, as_dtensors):
        assert not differing(ours, theirs)
        for name, value in ours["model"].items():
            torch.testing.assert_close(value, reference["model"][name])
