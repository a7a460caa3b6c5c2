"""Checkpoints of all stages of a pipeline, loaded by other numbers of stages and by models without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pipelines
import polyshard
import polyshard.checkpoint
import polyshard.state
import pytest
import torch
import torch.distributed.checkpoint as dcp
from parity import Block, units_of
from pipelines import Plan, Trainer, part_of
from polyshard.checkpoint import Stages
from polyshard.errors import ConfigError
from processes import KeptRanks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

RANKS = KeptRanks()
pytestmark = pytest.mark.slow
#: What the checkpoints are saved by: two stages of two ranks.
SAVED = Plan("1F1B")


def trained_and_saved(rank: int, plan: Plan, folder: Path, trains_on: bool = False) -> Path:
    """A checkpoint behind two steps."""
    trainer = Trainer(plan)
    for turn in range(2):
        trainer.step(turn)
    path = trainer.save(folder, 2, trains_on=trains_on)
    trainer.close()
    return path


def resumed(rank: int, plan: Plan, directory: Path) -> dict[str, torch.Tensor]:
    """The parameters behind a third step."""
    trainer = Trainer(plan)
    assert trainer.load(directory) == {"turn": 2}
    trainer.step(2)
    values = trainer.values()
    trainer.close()
    return values


def whole_and_sharded(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = polyshard.shard(pipelines.whole_model(SAVED), polyshard.ShardConfig(policy=units_of(Block, nn.Embedding)))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step_of_whole(model: nn.Module, optimizer: torch.optim.Optimizer, turn: int, rank: int) -> None:
    inputs, targets = pipelines.batch(turn, rank, SAVED.microbatches)
    pipelines.loss_of(model(inputs), targets).backward()
    polyshard.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def resumed_whole(rank: int, directory: Path) -> dict[str, torch.Tensor]:
    """The same of a model without stages."""
    model, optimizer = whole_and_sharded(rank)
    assert polyshard.checkpoint.load(directory, model, optimizer) == {"turn": 2}
    step_of_whole(model, optimizer, 2, rank)
    with polyshard.unsharded(model):
        values = {name: each.detach().clone() for name, each in model.named_parameters(remove_duplicate=False)}
    polyshard.close(model)
    return values


def saved_whole(rank: int, folder: Path) -> Path:
    model, optimizer = whole_and_sharded(rank)
    for turn in range(2):
        step_of_whole(model, optimizer, turn, rank)
    path = polyshard.checkpoint.save(folder, 2, model, optimizer, extra={"turn": 2})
    polyshard.close(model)
    return path


def assert_third_step(everyone: list[dict[str, torch.Tensor]]) -> None:
    wanted = dict(pipelines.expected(SAVED, 3)[0].named_parameters(remove_duplicate=False))
    assert {name for values in everyone for name in values} == wanted.keys()
    for values in everyone:
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "plan",
    [
        Plan("ZBVZeroBubble", each=2),
        *(pytest.param(plan, marks=pytest.mark.nightly) for plan in (SAVED, Plan("GPipe", sizes=(4, 2)))),
    ],
    ids=str,
)
def test_any_number_of_stages_goes_on_with_it(plan: Plan, tmp_path: Path) -> None:
    directory = RANKS.run(4, trained_and_saved, SAVED, tmp_path)[0]
    assert_third_step(RANKS.run(torch.Size(plan.sizes).numel(), resumed, plan, directory))


def test_models_without_stages_go_on_with_it(tmp_path: Path) -> None:
    directory = RANKS.run(4, trained_and_saved, Plan("Interleaved1F1B", each=2), tmp_path, True)[0]
    assert_third_step(RANKS.run(2, resumed_whole, directory))
    polyshard.checkpoint.verify(directory)
    state = polyshard.checkpoint.read(directory)
    plain = pipelines.whole_model(SAVED)
    plain.load_state_dict(state["model"])
    reference = pipelines.expected(SAVED, 2)[0]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-12, atol=1e-12)
    assert state["optimizer"]["state"].keys() == dict(reference.named_parameters()).keys()


def test_stages_go_on_with_a_checkpoint_of_a_model_without_any(tmp_path: Path) -> None:
    directory = RANKS.run(2, saved_whole, tmp_path)[0]
    assert_third_step(RANKS.run(4, resumed, SAVED, directory))


def states_of(trainer: Trainer) -> dict[str, Any]:
    """What ``torch.distributed.checkpoint`` saves of this rank's stages: under names of the whole model."""
    model, optimizer = {}, {}
    for each, its in zip(trainer.models, trainer.optimizers, strict=True):
        if trainer.plan.drop_in:
            flat = StateDictOptions(flatten_optimizer_state_dict=True)
            values, state = get_state_dict(each, its, options=flat)
            optimizer.update(state)
        else:
            # Torch's makes the state of an optimizer that never stepped.
            get_optimizer_state_dict(each, its)
            values, state = polyshard.state.get_state_dict(each, its)
            optimizer.update(state["state"])
        model.update(values)
    return {"model": model, "optimizer": optimizer}


def through_dcp(rank: int, plan: Plan, folder: Path) -> dict[str, torch.Tensor]:
    """The parameters behind a third step, of a trainer that got the state of another one."""
    trainer = Trainer(plan)
    for turn in range(2):
        trainer.step(turn)
    dcp.save(states_of(trainer), checkpoint_id=folder)
    trainer.close()
    trainer = Trainer(plan)
    state = states_of(trainer)
    dcp.load(state, checkpoint_id=folder)
    for each, its in zip(trainer.models, trainer.optimizers, strict=True):
        names = dict(each.named_parameters(remove_duplicate=False))
        model = {name: value for name, value in state["model"].items() if name in names}
        if plan.drop_in:
            flat = StateDictOptions(flatten_optimizer_state_dict=True)
            kept = get_state_dict(each, its, options=flat)[1].keys()
            optimizer = {name: state["optimizer"][name] for name in kept}
            set_state_dict(each, its, model_state_dict=model, optim_state_dict=optimizer, options=flat)
        else:
            optimizer = polyshard.state.get_optimizer_state_dict(each, its)
            optimizer["state"] = {name: value for name, value in state["optimizer"].items() if name in names}
            polyshard.state.set_state_dict(each, its, model_state_dict=model, optim_state_dict=optimizer)
    trainer.step(2)
    values = trainer.values()
    trainer.close()
    return values


@pytest.mark.parametrize(
    "plan",
    [
        Plan("1F1B", tied=False),
        pytest.param(Plan("Interleaved1F1B", each=2, tied=False, drop_in=True), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_states_of_all_stages_are_one_checkpoint_of_torchs(plan: Plan, tmp_path: Path) -> None:
    wanted = dict(pipelines.expected(plan, 3)[0].named_parameters())
    found = RANKS.run(4, through_dcp, plan, tmp_path)
    assert {name for values in found for name in values} == wanted.keys()
    for values in found:
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)


def message_of(rank: int, case: str, folder: Path) -> str:
    """The error of a wrong use; parts of two stages, each on one rank."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    whole = pipelines.whole_model(Plan("1F1B", tied=case == "tied"))
    part: nn.Module = part_of(whole, rank, 2)
    if case == "renumbered":
        part = nn.Sequential(*part.blocks.values())
    polyshard.shard(part, polyshard.ShardConfig(mesh=mesh["dp"], strategy="no_shard"))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1 * (1 + rank * (case == "rates")))]
    optimizers *= 1 + (case == "optimizers")
    try:
        directory = polyshard.checkpoint.save(folder, 1, Stages([part]), optimizers)
        if case == "left over":
            polyshard.checkpoint.load(directory, Stages([part] if rank == 0 else [whole_head(mesh)]))
    except (ConfigError, RuntimeError) as error:
        return str(error)
    return ""


def whole_head(mesh: torch.distributed.device_mesh.DeviceMesh) -> nn.Module:
    part = part_of(pipelines.whole_model(Plan("1F1B", tied=False)), 1, 2)
    part.blocks.clear()
    return polyshard.shard(part, polyshard.ShardConfig(mesh=mesh["dp"], strategy="no_shard"))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("renumbered", "Several stages have '0.down.weight', '0.up.bias'"),
        ("rates", "'lr of the optimizer's group 0' is"),
        ("optimizers", "1 stages and 2 optimizers"),
        ("left over", "'blocks.2.down.weight', 'blocks.2.up.bias'"),
    ],
)
def test_wrong_use_is_refused_on_every_rank(case: str, words: str, tmp_path: Path) -> None:
    assert all(words in each for each in RANKS.run(2, message_of, case, tmp_path))
