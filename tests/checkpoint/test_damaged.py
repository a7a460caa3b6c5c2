"""Checkpoints as polyshard 0.1 wrote them, with numbers of steps that stood still, are repaired or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parity import Block, Net, draw, on_ranks, root_of, seeded, sharded_copy, units_of
from pickled_checkpoints import write_pickled
from plain_checkpoints import tensors_in
from polyshard import checkpoint, flat_parameters, unsharded
from polyshard.errors import ConfigError, PolyshardError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

Make = Callable[[Any], torch.optim.Optimizer]
Values = dict[str, torch.Tensor]
FIRST, SECOND, END = 10, 20, 30

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, lambd=0.1, t0=5.0),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, turns: range, rank: int) -> None:
    for turn in turns:
        model(draw(4, 3, turn=turn, rank=rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_model(rank: int, world: ThreadedWorld, seed: int = 0, **settings: Any) -> nn.Module:
    return sharded_copy(seeded(lambda: Net(blocks=2), seed), rank, world, policy=units_of(Block), **settings)


def whole(model: nn.Module) -> Values:
    with unsharded(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def write_as_0_1(
    root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, stale: dict[str, dict[str, Any]]
) -> Path:
    """What 0.1 wrote: every rank tells of every parameter, with ``stale`` where it has no element."""
    return write_pickled(root, step, model, optimizer, version=1, stale=stale)


def scalars_everywhere(model: nn.Module, optimizer: torch.optim.Optimizer, world: ThreadedWorld) -> dict[str, Any]:
    """State that is not per element, of the parameters of which this rank has no element: as a load of 0.1 gave it."""
    owner = root_of(model)
    named = dict(model.named_parameters())
    mine = {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items() if value.ndim == 0}
        for name, parameter in named.items()
        if parameter.numel()
    }
    everyone = owner.collectives.all_gather_object(mine)
    return {
        name: next(each[name] for each in everyone if name in each)
        for name, parameter in named.items()
        if not parameter.numel()
    }


def damaged(root: Path, make: Make, ranks: int, **settings: Any) -> tuple[Path, Values]:
    """A checkpoint of step 20, of a run that 0.1 took up at step 10; and where that run ends if nothing is lost."""

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[Path, Values]:
        model = make_model(rank, world, **settings)
        optimizer = make(model.parameters())
        train(model, optimizer, range(FIRST), rank)
        stale = scalars_everywhere(model, optimizer, world)
        train(model, optimizer, range(FIRST, SECOND), rank)
        directory = write_as_0_1(root, SECOND, model, optimizer, stale)
        train(model, optimizer, range(SECOND, END), rank)
        return directory, whole(model)

    return on_ranks(ranks, on_rank)[0]


def steps_in(directory: Path) -> dict[str, float]:
    """What the file says, read by torch alone."""
    metadata = dcp.FileSystemReader(directory).read_metadata()
    keys = [key for key in metadata.state_dict_metadata if key.startswith("optimizer.state.") and key.endswith(".step")]
    state: dict[str, Any] = {key: torch.zeros(()) for key in keys}
    with pytest.warns(UserWarning, match="uninitialized"):
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    return {key.removeprefix("optimizer.state.").removesuffix(".step"): float(value) for key, value in state.items()}


def finish(directory: Path, make: Make, ranks: int, flat: bool = False, **settings: Any) -> list[Values]:
    """Train from the checkpoint to the end."""

    def on_rank(rank: int, world: ThreadedWorld) -> Values:
        model = make_model(rank, world, seed=1, **settings)
        optimizer = make(flat_parameters(model) if flat else model.parameters())
        checkpoint.load(directory, model, optimizer, pickles=True)
        train(model, optimizer, range(SECOND, END), rank)
        return whole(model)

    return on_ranks(ranks, on_rank)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "full_shard"), (3, "full_shard"), (3, "shard_grad_op")])
def test_state_that_stood_still_is_repaired(tmp_path: Path, name: str, ranks: int, strategy: str) -> None:
    directory, expected = damaged(tmp_path, OPTIMIZERS[name], ranks, strategy=strategy)
    steps = steps_in(directory)
    assert set(steps.values()) == {float(FIRST), float(SECOND)}
    wrong = sorted(parameter for parameter, step in steps.items() if step == FIRST)
    with pytest.warns(UserWarning, match=r"by polyshard 0\.1, which let 'step' .* for \d+ parameters") as told:
        results = finish(directory, OPTIMIZERS[name], ranks, strategy=strategy)
    # The planner chooses a rank for each value: another one than the steps may have stood still.
    assert all(f"'{parameter}'" in str(told[0].message) for parameter in wrong)
    for values in results:
        for parameter, value in values.items():
            assert torch.equal(value, expected[parameter]), parameter


@pytest.mark.parametrize("flat", [False, True], ids=["own", "flat"])
@pytest.mark.parametrize("settings", [{"strategy": "no_shard"}, {"strategy": "full_shard"}])
def test_it_is_repaired_under_another_sharding_as_well(tmp_path: Path, flat: bool, settings: dict[str, Any]) -> None:
    make = OPTIMIZERS["AdamW"]

    def same_batch(rank: int, world: ThreadedWorld) -> tuple[Path, Values]:
        model = make_model(rank, world)
        optimizer = make(model.parameters())
        train(model, optimizer, range(FIRST), 0)
        stale = scalars_everywhere(model, optimizer, world)
        train(model, optimizer, range(FIRST, SECOND), 0)
        directory = write_as_0_1(tmp_path, SECOND, model, optimizer, stale)
        train(model, optimizer, range(SECOND, END), 0)
        return directory, whole(model)

    def elsewhere(rank: int, world: ThreadedWorld) -> Values:
        model = make_model(rank, world, seed=1, **settings)
        optimizer = make(flat_parameters(model) if flat else model.parameters())
        checkpoint.load(directory, model, optimizer, pickles=True)
        train(model, optimizer, range(SECOND, END), 0)
        return whole(model)

    directory, expected = on_ranks(2, same_batch)[0]
    assert FIRST in steps_in(directory).values()
    with pytest.warns(UserWarning, match="stand still"):
        results = on_ranks(3, elsewhere)
    torch.testing.assert_close(results[0], expected, rtol=1e-12, atol=1e-12)


def test_what_was_saved_after_a_repair_is_sound(tmp_path: Path) -> None:
    make = OPTIMIZERS["AdamW"]
    directory, _ = damaged(tmp_path, make, 2)

    def again(rank: int, world: ThreadedWorld) -> Path:
        model = make_model(rank, world)
        optimizer = make(model.parameters())
        checkpoint.load(directory, model, optimizer, pickles=True)
        train(model, optimizer, range(SECOND, END), rank)
        return checkpoint.save(tmp_path, END, model, optimizer, keep=2)

    with pytest.warns(UserWarning, match="stand still"):
        after = on_ranks(2, again)[0]
    steps = {float(each) for name, each in tensors_in(after).items() if name.endswith(".step")}
    assert steps == {float(END)}
    assert checkpoint.latest(tmp_path) == after
    # A run of 0.1 goes back to what it saved before.
    assert directory.is_dir()


@pytest.mark.parametrize("sound", [True, False])
def test_a_unit_of_which_nothing_is_known_is_refused_by_name(tmp_path: Path, sound: bool) -> None:
    make = OPTIMIZERS["AdamW"]

    def write(rank: int, world: ThreadedWorld) -> Path:
        model = make_model(rank, world, strategy="no_shard")
        optimizer = make(model.parameters())
        train(model, optimizer, range(3), rank)
        if not sound:
            for parameter in model.blocks[1].parameters():
                optimizer.state[parameter]["step"].fill_(1.0)
        return write_as_0_1(tmp_path, 3, model, optimizer, {})

    directory = on_ranks(2, write)[0]

    def load(rank: int, world: ThreadedWorld) -> None:
        model = make_model(rank, world, seed=1)
        optimizer = make(model.parameters())
        before = whole(model)
        with nullcontext() if sound else pytest.raises(ConfigError, match=MESSAGE):
            checkpoint.load(directory, model, optimizer, pickles=True)
        if not sound:
            assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
            assert not optimizer.state
            checkpoint.load(directory, model, pickles=True)

    with warnings.catch_warnings(action="error"):
        on_ranks(2, load)


MESSAGE = r"'step' stand still: in unit 'blocks\.1' \('blocks\.1\..*\) it is 1, parameters elsewhere made 3 steps"


def test_parameters_that_step_apart_are_let_alone_in_new_checkpoints(tmp_path: Path) -> None:
    make = OPTIMIZERS["AdamW"]

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, float]:
        model = make_model(rank, world)
        optimizer = make(model.parameters())
        train(model, optimizer, range(2), rank)
        # As of a parameter that was frozen for a while.
        if model.blocks[0].up.bias.numel():
            optimizer.state[model.blocks[0].up.bias]["step"].fill_(1.0)
        directory = checkpoint.save(tmp_path, 2, model, optimizer)
        fresh = make(model.parameters())
        checkpoint.load(directory, model, fresh)
        return {n: float(fresh.state[p]["step"]) for n, p in model.named_parameters() if p.numel()}

    for found in on_ranks(2, on_rank):
        assert all(step == (1.0 if name == "blocks.0.up.bias" else 2.0) for name, step in found.items())


def test_a_format_that_it_does_not_have_is_refused(tmp_path: Path) -> None:
    directory, _ = damaged(tmp_path, OPTIMIZERS["AdamW"], 2)
    marker = directory / "COMMITTED"
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 3'))
    with pytest.raises(PolyshardError, match="'COMMITTED' cannot be what was written"):
        finish(directory, OPTIMIZERS["AdamW"], 1, strategy="no_shard")
