"""What saves and loads are called with: refused where it is of another kind, or differs between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polyshard
import pytest
import torch
from parity import Block, Net, adam, draw, on_ranks, seeded, sgd, sharded_copy, units_of
from polyshard import checkpoint
from polyshard.errors import ConfigError, ConfigTypeError, RankMismatchError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
RANKS = 3


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(draw(2, 3, rank=rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with polyshard.unsharded(model):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": others}])


def alone() -> nn.Module:
    config = polyshard.ShardConfig(collectives={"name": "fake", "world_size": 1}, strategy="no_shard")
    return polyshard.shard(nn.Linear(3, 2), config)


#: The arguments on rank 1, the last of which differs, and what all ranks are told of it.
DIFFERENT_SAVES: list[tuple[Mapping[str, Any], str, str]] = [
    ({"step": 8}, "'step' is 7 on rank 0, and 8 on rank 1", "'step' is 8 on rank 1, and 7 on rank 0, 7 on rank 2"),
    ({"keep": 2}, "'keep' is None on rank 0, and 2 on rank 1", "'keep' is 2 on rank 1"),
    ({"frozen": False}, "'frozen' is True on rank 0, and False on rank 1", "'frozen' is False on rank 1"),
    ({"make": None}, "'optimizer' is 'AdamW of 1 group(s)' on rank 0, and 'None' on rank 1", "'optimizer' is 'None'"),
    ({"make": sgd}, "and 'SGD of 1 group(s)' on rank 1", "'optimizer' is 'SGD of 1 group(s)' on rank 1"),
]


@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save], ids=["save", "async_save"])
@pytest.mark.parametrize(
    ("other", "words", "own"), DIFFERENT_SAVES, ids=[next(iter(each[0])) for each in DIFFERENT_SAVES]
)
def test_ranks_that_save_otherwise_are_told_and_nothing_is_written(
    tmp_path: Path, save: Callable[..., Any], other: Mapping[str, Any], words: str, own: str
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        given = {"step": 7, "make": adam, **(other if rank == 1 else {})}
        make = given.pop("make")
        optimizer = adam(model)
        step(model, optimizer, rank)
        saved = optimizer if make is adam else make and make(model)
        with pytest.raises(
            RankMismatchError, match=r"Preparing the checkpoint of step . in .* was given up"
        ) as refused:
            save(tmp_path, given.pop("step"), model, saved, **given)
        checkpoint.save(tmp_path, 7, model, optimizer)
        return str(refused.value)

    told = on_ranks(RANKS, on_rank)
    assert words in told[0]
    assert own in told[1]
    assert "Call it with the same on every rank." in told[2]
    # Of the save that was refused nothing is left.
    assert {path.name for path in tmp_path.iterdir()} - {".job-lock"} == {"step-00000007"}


def test_a_setting_that_one_rank_alone_has_is_told(tmp_path: Path) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer = adam(model)
        if rank == 1:
            optimizer.param_groups[0]["initial_lr"] = 0.25
        with pytest.raises(RankMismatchError) as refused:
            checkpoint.save(tmp_path, 1, model, optimizer)
        return str(refused.value)

    for rank, text in enumerate(on_ranks(RANKS, on_rank)):
        own, other = ("0.25", "left out on rank 0, left out on rank 2") if rank == 1 else ("left out", "0.25 on rank 1")
        assert f"'initial_lr of the optimizer's group 0' is {own} on rank {rank}, and {other}." in text


def test_settings_may_stand_in_any_order(tmp_path: Path) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer = adam(model)
        group = optimizer.param_groups[0]
        items = list(group.items())
        group.clear()
        group.update(items if rank else reversed(items))
        return checkpoint.save(tmp_path, 1, model, optimizer).name

    assert on_ranks(RANKS, on_rank) == ["step-00000001"] * RANKS


def test_ranks_whose_learning_rates_drifted_apart_are_told(tmp_path: Path) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer = two_groups(model)
        # A schedule that looks at the rank's own loss.
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for loss in (1.0, 2.0 if rank == 2 else 0.5):
            step(model, optimizer, rank)
            plateau.step(loss)
        with pytest.raises(RankMismatchError) as refused:
            checkpoint.save(tmp_path, 1, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 0.001
        checkpoint.save(tmp_path, 1, model, optimizer)
        return str(refused.value)

    told = on_ranks(RANKS, on_rank)
    assert "'lr of the optimizer's group 0' is 0.001 on rank 0, and 0.0005 on rank 2" in told[0]
    assert "'lr of the optimizer's group 0' is 0.0005 on rank 2, and 0.001 on rank 0, 0.001 on rank 1" in told[2]


DIFFERENT_LOADS: list[tuple[Mapping[str, Any], str]] = [
    ({"make": None}, "'optimizer' is 'AdamW of 2 group(s)' on rank 0, and 'None' on rank 1"),
    ({"frozen": False}, "'frozen' is True on rank 0, and False on rank 1"),
    ({"pickles": True}, "'pickles' is False on rank 0, and True on rank 1"),
]


@pytest.mark.parametrize(("other", "words"), DIFFERENT_LOADS, ids=[next(iter(each[0])) for each in DIFFERENT_LOADS])
def test_ranks_that_load_otherwise_are_told_and_nothing_is_changed(
    tmp_path: Path, other: Mapping[str, Any], words: str
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer = two_groups(model)
        step(model, optimizer, rank)
        directory = checkpoint.save(tmp_path, 1, model, optimizer)
        saved = whole(model)
        step(model, optimizer, rank)
        before = whole(model)
        given = {"make": two_groups, **(other if rank == 1 else {})}
        loaded = optimizer if given.pop("make") else None
        with pytest.raises(RankMismatchError, match=r"Opening the checkpoint .* was given up") as refused:
            checkpoint.load(directory, model, loaded, **given)
        assert all(torch.equal(before[name], value) for name, value in whole(model).items())
        checkpoint.load(directory, model, optimizer)
        assert all(torch.equal(saved[name], value) for name, value in whole(model).items())
        return str(refused.value)

    assert words in on_ranks(RANKS, on_rank)[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (1.0, r"^step is 1\.0, and must be an int"),
        (True, "^step is True, and must be an int"),
        ("1", "^step is '1', and must be an int"),
        (None, "^step is None, and must be an int"),
    ],
)
def test_steps_that_are_no_whole_numbers_are_refused(tmp_path: Path, given: Any, words: str) -> None:
    model = alone()
    with pytest.raises(ConfigTypeError, match=words):
        checkpoint.save(tmp_path, given, model)
    with pytest.raises(ConfigError, match=r"^keep is 0, and must be 1 or more"):
        checkpoint.save(tmp_path, 1, model, keep=0)
    with pytest.raises(ConfigTypeError, match=r"^keep is 1\.5, and must be an int"):
        checkpoint.save(tmp_path, 1, model, keep=1.5)
    assert checkpoint.save(tmp_path, 1, model).name == "step-00000001"


@pytest.mark.parametrize("given", [np.int64(3), torch.tensor(3)], ids=["numpy", "torch"])
def test_a_step_may_be_any_whole_number(tmp_path: Path, given: Any) -> None:
    model = alone()
    directory = checkpoint.save(tmp_path, given, model, keep=np.int32(2))
    assert directory.name == "step-00000003"
    checkpoint.load(directory, model)


def test_no_path_is_refused_by_name(tmp_path: Path) -> None:
    model = alone()
    none = "is None, and must be a path. latest\\(\\) returns None where a folder holds no checkpoint"
    with pytest.raises(ConfigTypeError, match=f"^directory {none}"):
        checkpoint.load(checkpoint.latest(tmp_path), model)
    with pytest.raises(ConfigTypeError, match=f"^directory {none}"):
        checkpoint.load_dcp(None, model)
    with pytest.raises(ConfigTypeError, match=f"^root {none}"):
        checkpoint.save(None, 1, model)
    assert checkpoint.save(str(tmp_path), 1, model).parent == tmp_path
