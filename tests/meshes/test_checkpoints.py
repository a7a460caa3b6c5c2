"""Checkpoints of models on a mesh, loaded on another: bit for bit, and trained on as the whole model is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tensors_in
from meshed_models import Shape
from meshes import Plan, Polyshard, coordinate_of, make, meshed, optimizers, run
from polyshard import checkpoint

pytestmark = pytest.mark.slow

Values = dict[str, torch.Tensor]
MOE = Shape(experts=3, kept="dtensor")
DENSE = Shape(tied=True, blocks=1)
FSDP_TP = Plan((2, 2), ("dp", "tp"), MOE, ("dp",))
#: The last rank has none of three experts.
EP = Plan((1, 4), ("edp", "ep"), MOE, ("edp", "ep"), experts=("edp",))
EP_FSDP = Plan((2, 2), ("edp", "ep"), MOE, ("edp", "ep"), experts=("edp",))
PLAIN = Plan((3,), ("dp",), MOE, ("dp",))
#: Parts of 3, 3, 3 and 1 rows: what lies behind them in a unit is cut otherwise on each rank.
TP = Plan((1, 4), ("dp", "tp"), DENSE, ("dp",))
HSDP = Plan((2, 2), ("rep", "dp"), DENSE, ("dp",), replicate=("rep",))


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
    [(FSDP_TP, EP, "adamw"), (EP_FSDP, PLAIN, "muon"), (TP, HSDP, "flat")],
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
        for parameter, states in next(each for each in held if type(each) is torch.optim.AdamW).state.items():
            for key, value in states.items():
                found = saved[f"optimizer.state.{names[parameter]}.{key}"]
                torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12, msg=key)
