"""Checkpoints of models on a mesh, loaded on another: bit for bit, and trained on as the whole model is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import polyshard
import polyshard_huggingface
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import tensors_in
from meshed_models import Shape
from meshes import Plan, Polyshard, coordinate_of, make, mesh_of, meshed, optimizers, run
from plain_states import differing
from polyshard import checkpoint
from polyshard import state as states
from polyshard.errors import PolyshardError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.slow

Values = dict[str, torch.Tensor]
MOE = Shape(experts=3, kept="dtensor")
DENSE = Shape(tied=True, blocks=1, hidden=17)
FSDP_TP = Plan((2, 2), ("dp", "tp"), MOE, ("dp",))
#: The last rank has none of three experts.
EP = Plan((1, 4), ("edp", "ep"), MOE, ("edp", "ep"), experts=("edp",))
EP_FSDP = Plan((2, 2), ("edp", "ep"), MOE, ("edp", "ep"), experts=("edp",))
PLAIN = Plan((3,), ("dp",), MOE, ("dp",))
#: Parts of 5, 5, 5 and 2 rows.
TP = Plan((1, 4), ("dp", "tp"), DENSE, ("dp",))
#: Parts of 9 and 8 rows: units of other sizes, so that plain norms in their middle are cut elsewhere.
UNEVEN = Plan((2, 2), ("dp", "tp"), DENSE, ("dp",))
HSDP = Plan((2, 2), ("rep", "dp"), DENSE, ("dp",), replicate=("rep",))
#: Of replicas one keeps the momentum of a piece.
SHARED = [
    Plan((2, 1, 2), ("rep", "dp", "tp"), DENSE, ("dp",), replicate=("rep",), optimizer="muon"),
    dataclasses.replace(HSDP, optimizer="muon"),
]


def trained(rank: int, plan: Plan, folder: str, load: str | None, turns: range) -> tuple[Values, Values]:
    """Whole parameters at the beginning, or as they were loaded, and behind ``turns``; both states are saved."""
    with meshed(plan, rank) as (model, mesh):
        trainer = Polyshard(plan, model, mesh)
        held = trainer.optimizers(plan.optimizer)
        if load is not None:
            checkpoint.load(Path(load), model, held)
            checkpoint.save(Path(folder), 0, model, held)
        before = trainer.whole()
        data_rank = plan.data_rank(coordinate_of(mesh))
        for turn in turns:
            model(plan.batch(turn, data_rank, 0)).backward()
            for each in held:
                each.step()
                each.zero_grad()
        checkpoint.save(Path(folder), 1, model, held)
        after = trainer.whole()
        trainer.close()
    return before, after


def train_whole(model: torch.nn.Module, held: list[torch.optim.Optimizer], plan: Plan, turns: range) -> Values:
    """The same without a mesh: the mean of the losses of all data ranks."""
    for turn in turns:
        for rank in range(plan.data_size):
            (model(plan.batch(turn, rank, 0)) / plan.data_size).backward()
        for each in held:
            each.step()
            each.zero_grad()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def assert_same(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, wanted[name])]


@pytest.mark.parametrize(
    ("one", "other", "optimizer"),
    [
        pytest.param(FSDP_TP, EP, "adamw", marks=pytest.mark.nightly),
        (EP_FSDP, PLAIN, "muon"),
        pytest.param(TP, HSDP, "flat", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_there_and_back(one: Plan, other: Plan, optimizer: Any, tmp_path: Path) -> None:
    plans = [dataclasses.replace(each, optimizer=optimizer) for each in (one, other, one)]
    model = make(plans[0])
    held = optimizers(model, optimizer, sharded=False)
    load: Path | None = None
    last: Values = {}
    for number, plan in enumerate(plans):
        turns, folder = range(2 * number, 2 * number + 2), tmp_path / str(number)
        ranks = run(plan.world_size, trained, plan, str(folder), load and str(load), turns)
        if load is not None:
            assert_same(tensors_in(folder / "step-00000000"), tensors_in(load))
        load = folder / "step-00000001"
        wanted, saved = train_whole(model, held, plan, turns), tensors_in(load)
        for before, after in ranks:
            # Of the loads, too: whole parameters by DTensor's own gathers.
            assert_same({name: value for name, value in before.items() if last}, last)
            assert_same(after, {name: saved[f"model.{name}"] for name in after})
        last = ranks[0][1]
        for name, value in wanted.items():
            torch.testing.assert_close(saved[f"model.{name}"], value, rtol=0, atol=1e-12, msg=name)
        names = {each: name for name, each in model.named_parameters()}
        for parameter, its in next(each for each in held if type(each) is torch.optim.AdamW).state.items():
            for key, value in its.items():
                found = saved[f"optimizer.state.{names[parameter]}.{key}"]
                torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12, msg=key)


FULL = states.StateOptions(form="full")
State = dict[str, Any]


def told(plan: Plan, trainer: Polyshard, held: list[torch.optim.Optimizer]) -> State:
    one, other = states.get_state_dict(trainer.model, held, FULL)
    return {"model": one, "state": other["state"], "whole": trainer.whole()}


def in_all_forms(rank: int, plan: Plan, folder: str) -> State:
    """Trained, and written by torch and as safetensors; the whole state."""
    with meshed(plan, rank) as (model, mesh):
        trainer = Polyshard(plan, model, mesh)
        held = trainer.optimizers(plan.optimizer)
        for turn in range(2):
            model(plan.batch(turn, plan.data_rank(coordinate_of(mesh)), 0)).backward()
            for each in held:
                each.step()
                each.zero_grad()
        shown = states.get_state_dict(model, held)
        dcp.save({"model": shown[0], "optimizer": shown[1]}, checkpoint_id=f"{folder}/stock")
        checkpoint.save(Path(folder, "own"), 1, model, held)
        for ranks in ("all", "first"):
            polyshard_huggingface.save(model, f"{folder}/{ranks}", ranks=ranks)
        first = states.get_state_dict(model, held, states.StateOptions(form="full_on_rank_0"))
        assert bool(first[0]) == (rank == 0)
        found = {**told(plan, trainer, held), "optimizer": states.get_optimizer_state_dict(model, held, FULL)}
        trainer.close()
    return found


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """For ``dcp.load`` to read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def from_all_forms(rank: int, plan: Plan, folder: str, given: State) -> list[State]:
    """What a model has that was given it from memory, and from the files of others."""
    found = []
    for way in ("memory", "stock", "own/step-00000001", "load_dcp", "all", "first"):
        with meshed(plan, rank) as (model, mesh):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            trainer = Polyshard(plan, model, mesh)
            held = trainer.optimizers(plan.optimizer)
            if way in ("all", "first"):
                polyshard_huggingface.load(model, f"{folder}/{way}", ranks=way)
                found.append({"whole": trainer.whole()})
                trainer.close()
                continue
            if way.startswith(("stock", "own")):
                for each in held:
                    make_state(each)
                one, other = states.get_state_dict(model, held)
                dcp.load({"model": one, "optimizer": other}, checkpoint_id=f"{folder}/{way}")
                states.set_state_dict(model, held, model_state_dict=one, optim_state_dict=other)
            elif way == "load_dcp":
                checkpoint.load_dcp(Path(folder, "stock"), model, held)
            else:
                one, other = given["model"], given["optimizer"]
                states.set_state_dict(model, held, model_state_dict=one, optim_state_dict=other)
            found.append(told(plan, trainer, held))
            trainer.close()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(("one", "other"), [(UNEVEN, HSDP), (EP, FSDP_TP), (FSDP_TP, EP_FSDP), SHARED], ids=str)
def test_states_in_all_forms(one: Plan, other: Plan, tmp_path: Path) -> None:
    ranks = run(one.world_size, in_all_forms, one, str(tmp_path))
    wanted = ranks[0]
    for each in ranks:
        assert_same(each["whole"], {name: each["model"][name] for name in each["whole"]})
        assert not differing(each, wanted)
    for folder in ("all", "first"):
        weights = load_file(tmp_path / folder / "model.safetensors")
        assert_same(weights, {name: wanted["model"][name] for name in weights})
        assert len(weights) == len(wanted["whole"])
    for ways in run(other.world_size, from_all_forms, other, str(tmp_path), wanted):
        for found in ways:
            assert not differing(found, {key: wanted[key] for key in found})


def parts_stepped_apart(rank: int, folder: str, missing: range) -> str:
    """What a save raises where half of the experts got no gradient in the turns ``missing``."""
    with meshed(EP_FSDP, rank) as (model, mesh):
        trainer = Polyshard(EP_FSDP, model, mesh)
        held = trainer.optimizers("adamw")
        for turn in range(2):
            model(EP_FSDP.batch(turn, EP_FSDP.data_rank(coordinate_of(mesh)), 0)).backward()
            if turn in missing and coordinate_of(mesh)["ep"]:
                model.get_parameter("blocks.0.feed.experts.up").grad = None
            held[0].step()
            held[0].zero_grad()
        with pytest.raises(PolyshardError) as caught:
            checkpoint.save(Path(folder), 1, model, held)
        with pytest.raises(PolyshardError, match=r"'blocks.0.feed.experts.up' is .* on rank 0 and .* on rank 1"):
            states.get_optimizer_state_dict(model, held, FULL)
        trainer.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        # Two of three experts, of 10 rows of 8.
        (range(2), "Ranks hold 160 of the 240 elements of 'optimizer.state.blocks.0.feed.experts.up.exp_avg'"),
        (range(1, 2), "'optimizer.state.blocks.0.feed.experts.up.step' is 2.0 on rank 0 and 1.0 on rank 1"),
    ],
)
def test_experts_whose_state_is_no_whole_are_refused(missing: range, words: str, tmp_path: Path) -> None:
    for text in run(4, parts_stepped_apart, str(tmp_path), missing):
        assert words in text
        assert "step its part" in text
    assert checkpoint.latest(tmp_path) is None


def saved_over_more(rank: int, folder: str) -> None:
    """A unit over ``dp`` and ``tp``, beside one over ``dp`` of which ranks along ``tp`` have copies."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7))
    mesh = mesh_of((2, 2), ("dp", "tp"), "cpu")
    policy = {"name": "custom", "fn": lambda module: {"mesh": ("dp", "tp")} if module is model[1] else False}
    polyshard.shard(model, polyshard.ShardConfig(mesh=mesh, shard="dp", policy=policy))
    checkpoint.save(Path(folder), 0, model)
    polyshard.close(model)


def test_units_over_more_ranks_than_others(tmp_path: Path) -> None:
    run(4, saved_over_more, str(tmp_path))
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7))
    directory = checkpoint.latest(tmp_path)
    assert directory is not None
    assert not differing(checkpoint.read(directory)["model"], dict(whole.named_parameters()))


def stepped_outside_of_units(rank: int, folder: str) -> list[torch.Tensor]:
    """An ignored ``DTensor``'s averages of its gradient, which is its own number in each element: there, and loaded."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found, values = [], torch.arange(16.0).view(4, 4)
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(0)]))
        polyshard.shard(model, ignored_parameters={model.weight: "local"})
        optimizer = torch.optim.AdamW(model.parameters())
        if seed:
            checkpoint.load(checkpoint.latest(folder), model, optimizer)
        else:
            model.weight.grad = distribute_tensor(values, mesh, [Shard(0)])
            optimizer.step()
            checkpoint.save(folder, 1, model, optimizer)
        found.append(optimizer.state[model.weight]["exp_avg"].full_tensor())
        polyshard.close(model)
    return found


def test_state_of_an_ignored_dtensor_is_of_the_whole(tmp_path: Path) -> None:
    wanted = torch.tensor(0.1) * torch.arange(16.0).view(4, 4)
    for found in run(2, stepped_outside_of_units, str(tmp_path)):
        for each in found:
            torch.testing.assert_close(each, wanted)
    saved = tensors_in(checkpoint.latest(tmp_path))
    torch.testing.assert_close(saved["optimizer.state.weight.exp_avg"], wanted)
