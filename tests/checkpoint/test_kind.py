"""State is loaded by the optimizer that made it, into the dtypes that it was made in; everything else is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polyshard
import polyshard.state
import pytest
import torch
from parity import Block, Net, seeded, units_of
from polyshard import checkpoint, flat_parameters
from polyshard.errors import ConfigError
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RAdam, RMSprop

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def sharded(dtype: torch.dtype = torch.float64, strategy: str = "full_shard") -> nn.Module:
    """One rank of a pretended world of two, which takes back its own part."""
    config = polyshard.ShardConfig(
        collectives={"name": "fake", "rank": 0, "world_size": 2}, policy=units_of(Block), strategy=strategy
    )
    return polyshard.shard(seeded(Net).to(dtype), config)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(4, 3, dtype=dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(root: Path, make: Make, dtype: torch.dtype = torch.float64) -> Path:
    model = sharded(dtype)
    optimizer = make(model.parameters())
    train(model, optimizer)
    return checkpoint.save(root, 1, model, optimizer)


def state_of(make: Make) -> dict[str, Any]:
    """A state dict, which does not name the optimizer's class."""
    model = sharded()
    optimizer = make(model.parameters())
    train(model, optimizer)
    return polyshard.state.get_optimizer_state_dict(model, optimizer)


def give_state(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    polyshard.state.set_optimizer_state_dict(model, optimizer, state)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = [value.clone() for values in optimizer.state.values() for value in values.values()]
    return [[p.detach().clone() for p in model.parameters()], settings, state]


REFUSED: dict[str, tuple[Make, Make, str]] = {
    "AdamW into SGD": (AdamW, lambda p: SGD(p, lr=0.1), r"saved by torch\.optim\.adamw\.AdamW, .*optim\.sgd\.SGD"),
    "SGD into AdamW": (lambda p: SGD(p, lr=0.1, momentum=0.9), AdamW, r"saved by torch\.optim\.sgd\.SGD"),
    "Adam into AdamW": (Adam, AdamW, r"saved by torch\.optim\.adam\.Adam,"),
    "Adam into RAdam": (Adam, RAdam, r"saved by torch\.optim\.adam\.Adam,"),
    "Adam into NAdam": (Adam, NAdam, r"saved by torch\.optim\.adam\.Adam,"),
    "amsgrad off": (lambda p: AdamW(p, amsgrad=True), AdamW, "'amsgrad' was True and is False"),
    "amsgrad on": (AdamW, lambda p: AdamW(p, amsgrad=True), "'amsgrad' was False and is True"),
    "maximize": (AdamW, lambda p: AdamW(p, maximize=True), "'maximize' was False and is True"),
    "momentum on": (lambda p: SGD(p, lr=0.1), lambda p: SGD(p, lr=0.1, momentum=0.9), "'momentum' was 0 and is 0.9"),
    "momentum off": (lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: SGD(p, lr=0.1), "'momentum' was 0.9 and is 0"),
    "centered": (RMSprop, lambda p: RMSprop(p, centered=True), "'centered' was False and is True"),
}


@pytest.mark.parametrize("known", [True, False], ids=["checkpoint", "state dict"])
@pytest.mark.parametrize("name", REFUSED)
def test_state_of_another_optimizer_or_of_other_settings_is_refused(tmp_path: Path, name: str, known: bool) -> None:
    save, load, words = REFUSED[name]
    source = saved(tmp_path, save) if known else state_of(save)
    if not known and words.startswith("saved by"):
        words = "Group 0 of the optimizer does not fit the state .* (is missing|'decoupled_weight_decay' was)"
    _refused(source, load, words)


def _refused(source: Path | dict[str, Any], load: Make, words: str) -> None:
    for choose in (nn.Module.parameters, flat_parameters):
        model = sharded()
        optimizer = load(choose(model))  # type: ignore[operator]
        train(model, optimizer)
        before = everything(model, optimizer)
        give = checkpoint.load if isinstance(source, Path) else give_state
        with pytest.raises(ConfigError, match=words):
            give(source, model, optimizer)  # type: ignore[operator]
        torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)
        # The model alone may be taken, and goes on.
        if isinstance(source, Path):
            checkpoint.load(source, model)
        train(model, optimizer)


class Mine(AdamW):
    """Of the same name as another class."""


def test_a_class_that_moved_to_another_module_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = type("Mine", (Adagrad,), {"__module__": "elsewhere", "__qualname__": "Mine"})
    monkeypatch.setattr(Mine, "__module__", "somewhere")
    directory = saved(tmp_path, Mine)
    assert json.loads((directory / "manifest.json").read_text())["optimizer"]["kind"]["module"] == "somewhere"
    monkeypatch.undo()
    model = sharded()
    optimizer = Mine(model.parameters())
    checkpoint.load(directory, model, optimizer)
    train(model, optimizer)
    # The settings tell another class of that name.
    _refused(
        directory, moved, r"'initial_accumulator_value' is missing in the checkpoint.*'amsgrad' is missing in the opt"
    )


def test_how_a_step_is_carried_out_stays_as_the_optimizer_was_made(tmp_path: Path) -> None:
    directory = saved(tmp_path, lambda p: AdamW(p, lr=0.5, foreach=True))
    model = sharded()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    checkpoint.load(directory, model, optimizer)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["foreach"], group["fused"]) == (0.5, None, True)
    train(model, optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize(
    ("before", "after"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float32)],
)
@pytest.mark.parametrize("choose", [nn.Module.parameters, flat_parameters], ids=["own", "flat"])
def test_another_dtype_is_refused_by_name(
    tmp_path: Path, before: torch.dtype, after: torch.dtype, choose: Callable[[nn.Module], Any]
) -> None:
    directory = saved(tmp_path, AdamW, before)
    model = sharded(after)
    optimizer = AdamW(choose(model))
    train(model, optimizer)
    was = everything(model, optimizer)
    words = rf"'first\.weight' is {before} in the checkpoint .* but {after} in the model \(rank 0\)"
    with pytest.raises(ConfigError, match=words):
        checkpoint.load(directory, model, optimizer)
    torch.testing.assert_close(everything(model, optimizer), was, rtol=0, atol=0)
    train(model, optimizer)


@pytest.mark.parametrize("choose", [nn.Module.parameters, flat_parameters], ids=["own", "flat"])
def test_state_in_another_dtype_is_refused_by_name(tmp_path: Path, choose: Callable[[nn.Module], Any]) -> None:
    directory = saved(tmp_path, AdamW)
    model = sharded()
    optimizer = AdamW(choose(model))
    train(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(torch.float16)
    with pytest.raises(ConfigError, match=r"state 'exp_avg' of .* is torch\.float64 in .* torch\.float16 in the optim"):
        checkpoint.load(directory, model, optimizer)


def test_state_that_has_no_part_for_this_rank_is_refused_by_name(tmp_path: Path) -> None:
    def alone(strategy: str, world_size: int) -> nn.Module:
        config = polyshard.ShardConfig(
            collectives={"name": "fake", "rank": 0, "world_size": world_size}, policy=units_of(Block), strategy=strategy
        )
        return polyshard.shard(seeded(Net), config)

    model = alone("no_shard", 1)
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer)
    directory = checkpoint.save(tmp_path, 1, model, optimizer)
    cut = alone("full_shard", 2)
    with pytest.raises(ConfigError, match=r"state 'row_var' of 'first\.weight' has shape \(5, 1\) .* no part of it"):
        checkpoint.load(directory, cut, torch.optim.Adafactor(cut.parameters()))
