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
from plain_states import Odd, Part, State, adamw, differing, odd, sorted_groups, train
from polyshard import checkpoint
from polyshard import state as states
from polyshard.errors import RankMismatchError
from processes import KeptRanks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.slow
RANKS = KeptRanks()
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [
        "rows",
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("flat", {"name": "blocks", "size": 4, "smallest": 1})
        ),
    ],
    ids=str,
)
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
    if (directory / "manifest.json").exists():
        state = checkpoint.read(directory)
    else:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # That one process loads is what no_dist asks for.
            dcp.load(state, checkpoint_id=directory, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return told(model, optimizer)


@LAYOUTS
def test_from_fsdp2_at_two_ranks_by_three_of_ours_to_one_process(layout: Any, tmp_path: Path) -> None:
    folder, flatten = str(tmp_path), layout == "rows"
    reference = RANKS.run(2, fsdp2_writes, str(tmp_path / "fsdp2"), flatten)[0]
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
    state = checkpoint.read(Path(folder, "step-00000001"))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    return told(model, optimizer, full_state_dict=True, cpu_offload=True)


@LAYOUTS
def test_from_three_of_ours_to_fsdp2_at_two_ranks(layout: Any, tmp_path: Path) -> None:
    reference = RANKS.run(3, native_writes, str(tmp_path), layout)[0]
    assert not differing(sorted_groups(reference), sorted_groups(RANKS.run(2, fsdp2_reads, str(tmp_path))[0]))


def dtensors_of_fsdp2(rank: int, layout: Any) -> list[State]:
    theirs, their_optimizer = fsdp2(0)
    train(theirs, their_optimizer, 2)
    model, optimizer = native(1, layout=layout)
    given = told(theirs, their_optimizer)
    assert isinstance(given["model"]["parts.0.gate"], DTensor)
    states.set_state_dict(model, optimizer, model_state_dict=given["model"], optim_state_dict=given["optimizer"])
    one, other = states.get_state_dict(model, optimizer, FULL)
    polyshard.close(model)
    return [told(theirs, their_optimizer, full_state_dict=True), {"model": one, "optimizer": other}]


@LAYOUTS
def test_dtensors_of_fsdp2_are_taken_without_a_file(layout: Any) -> None:
    for theirs, ours in RANKS.run(3, dtensors_of_fsdp2, layout):
        assert not differing(sorted_groups(theirs), sorted_groups(ours))


def dtensors_on_one_rank(rank: int) -> None:
    theirs, _ = fsdp2(0)
    model, _ = native(1)
    before = states.get_model_state_dict(model, FULL)
    whole = get_model_state_dict(theirs, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(RankMismatchError, match=r"DTensors on some ranks and not on others"):
        states.set_model_state_dict(model, get_model_state_dict(theirs) if rank == 0 else whole)
    assert not differing(before, states.get_model_state_dict(model, FULL))
    polyshard.close(model)


def test_ranks_that_give_different_kinds_of_tensors_are_told() -> None:
    RANKS.run(3, dtensors_on_one_rank)


class Even(nn.Sequential):
    """Of matrices that three ranks hold as ``Shard(0)`` would give them, one of four rows, and one beside a bias."""

    def __init__(self) -> None:
        lines = [nn.Linear(4, 6, bias=False), nn.Linear(6, 9, bias=False), nn.Linear(9, 4, bias=False)]
        super().__init__(*lines, nn.Linear(4, 5))


def as_dtensors(rank: int) -> list[State]:
    torch.manual_seed(0)
    model = Even()
    config = polyshard.ShardConfig(collectives="gloo", policy=units_of(nn.Linear), layout="rows")
    polyshard.shard(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    one, other = states.get_state_dict(model, optimizer, states.StateOptions(form="dtensor"))
    kinds = [isinstance(one[f"{index}.weight"], DTensor) for index in range(4)]
    assert kinds == [True, True, True, False]
    # The last rank has no row of the third, and no state of it.
    assert ("2.weight" in other["state"]) == (rank < 2)
    moments = [other["state"].get(f"{index}.weight", {}).get("exp_avg") for index in range(4)]
    assert [isinstance(moment, DTensor) for moment in moments] == [True, True, False, False]
    assert one["0.weight"].to_local().data_ptr() == model[0].weight.data_ptr()
    whole, whole_optimizer = states.get_state_dict(model, optimizer, FULL)
    for index in range(2):
        assert torch.equal(one[f"{index}.weight"].full_tensor(), whole[f"{index}.weight"])
        inside = states.get_model_state_dict(model[index], states.StateOptions(form="dtensor"))
        assert torch.equal(inside["weight"].full_tensor(), whole[f"{index}.weight"])
        moment = other["state"][f"{index}.weight"]["exp_avg"]
        assert torch.equal(moment.full_tensor(), whole_optimizer["state"][f"{index}.weight"]["exp_avg"])
    with torch.no_grad():
        kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
        shown = {name: value.clone() if isinstance(value, DTensor) else value for name, value in one.items()}
        for parameter in (model[0].weight, model[1].weight, model[2].weight):
            parameter.zero_()
    states.set_model_state_dict(model, shown)
    assert all(torch.equal(parameter, kept[name]) for name, parameter in model.named_parameters())
    polyshard.close(model)
    return [whole]


def test_dtensors_where_the_layout_allows_them() -> None:
    torch.manual_seed(0)
    reference = Even()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    reference(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    for (whole,) in RANKS.run(3, as_dtensors):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(whole[name], parameter.detach())


def saved_by_torch_while_training(rank: int, folder: str) -> State:
    model, optimizer = native(0)
    train(model, optimizer, 2)
    one, other = states.get_state_dict(model, optimizer, FULL)
    shown = states.get_state_dict(model, optimizer)
    future = dcp.async_save(dict(zip(("model", "optimizer"), shown, strict=True)), checkpoint_id=folder)
    train_by_hand(model, optimizer)
    future.result()
    dist.barrier()
    polyshard.close(model)
    return {"model": one, "optimizer": other}


def train_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step without collectives: the default group is the save's meanwhile."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def test_torchs_own_async_save_holds_the_state_at_the_call(tmp_path: Path) -> None:
    reference = RANKS.run(3, saved_by_torch_while_training, str(tmp_path))[0]
    assert not differing(sorted_groups(reference), sorted_groups(read_plainly(tmp_path)))


def loaded_by_torch(rank: int, folder: str) -> list[State]:
    model, optimizer = native(1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    states.init_optimizer_state(model, optimizer)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    one, other = states.get_state_dict(model, optimizer)
    state = {"model": one, "optimizer": other}
    dcp.load(state, checkpoint_id=folder)
    states.set_state_dict(model, optimizer, model_state_dict=one, optim_state_dict=other)
    one, other = states.get_state_dict(model, optimizer, FULL)
    polyshard.close(model)
    return [{"model": one, "optimizer": other}]


def test_torch_loads_into_an_optimizer_that_never_stepped(tmp_path: Path) -> None:
    reference = RANKS.run(2, fsdp2_writes, str(tmp_path), False)[0]
    for (found,) in RANKS.run(3, loaded_by_torch, str(tmp_path)):
        assert not differing(sorted_groups(reference), sorted_groups(found))


def saved_while_training(rank: int, folder: str) -> State:
    model, optimizer = native(0)
    train(model, optimizer, 2)
    one, other = states.get_state_dict(model, optimizer, FULL)
    pending = checkpoint.async_save(Path(folder), 2, model, optimizer)
    # Collectives of the same group as the model's, while the threads write.
    train(model, optimizer, 3, first=2)
    assert pending.result(60) == Path(folder, "step-00000002")
    polyshard.close(model)
    return {"model": one, "optimizer": other}


def test_our_async_save_holds_the_state_at_the_call(tmp_path: Path) -> None:
    reference = RANKS.run(3, saved_while_training, str(tmp_path))[0]
    assert not differing(sorted_groups(reference), sorted_groups(read_plainly(tmp_path / "step-00000002")))
