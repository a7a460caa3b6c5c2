"""Modules and parameters that come into a model after it was sharded: told apart from those that were there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_all_close,
    assert_observed,
    assert_parity,
    draw,
    on_ranks,
    one_by_one,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    train_reference,
    units_of,
)
from polyshard import checkpoint
from polyshard.errors import ParameterChangedError, ParameterMovedError
from polyshard.state import StateForm, StateOptions, get_model_state_dict, get_optimizer_state_dict
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.nn.utils import parametrize

BLOCKS = {"policy": units_of(Block)}
INPUTS = draw(4, 3)


class Adapted(nn.Module):
    """A layer and two matrices beside it, as adapters put them there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 1, bias=False).double()
        self.up = nn.Linear(1, base.out_features, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


Change = Callable[[Any], object]


def head() -> nn.Linear:
    return nn.Linear(5, 2).double()


def delete_and_set(model: Any) -> None:
    del model.last
    model.last = head()


def in_two_steps(model: Any) -> None:
    model.more = nn.ModuleList()
    with torch.no_grad():
        model(INPUTS)
    model.more.append(nn.Linear(2, 2).double())


def tie(model: Any) -> None:
    model.blocks[1].down.weight = model.blocks[0].down.weight


def use_again(model: Any) -> None:
    model.again = model.last.bias


#: What is done to a model of three blocks, and the names that it brings.
ADDED: dict[str, tuple[Change, str]] = {
    "a head replaced": (lambda model: setattr(model, "last", head()), "'last.weight', 'last.bias'"),
    "a head deleted and set": (delete_and_set, "'last.weight', 'last.bias'"),
    "a block appended": (
        lambda model: model.blocks.append(Block().double()),
        "'blocks.3.up.weight', 'blocks.3.up.bias', 'blocks.3.down.weight'",
    ),
    "put at an index": (lambda model: model.blocks.__setitem__(1, Block().double()), "'blocks.1.up.weight'"),
    "a bias": (
        lambda model: setattr(model.blocks[0].down, "bias", nn.Parameter(torch.zeros(5).double())),
        "'blocks.0.down.bias'",
    ),
    "registered": (
        lambda model: model.blocks[0].register_parameter("scale", nn.Parameter(torch.ones(5).double())),
        "'blocks.0.scale'",
    ),
    "in a container": (
        lambda model: model.blocks[0].add_module("more", nn.Sequential(nn.Identity(), nn.Linear(2, 2).double())),
        "'blocks.0.more.1.weight', 'blocks.0.more.1.bias'",
    ),
    "an adapter": (
        lambda model: setattr(model.blocks[0], "up", Adapted(model.blocks[0].up)),
        "'blocks.0.up.down.weight', 'blocks.0.up.up.weight'",
    ),
    "in two steps": (in_two_steps, "'more.0.weight'"),
    # Each has values of its own in the sharded model: they would be copied once, and go apart.
    "tied": (tie, "'blocks.1.down.weight' is 'blocks.0.down.weight' now"),
    "used again": (use_again, "'again' is 'last.bias' now"),
}


@one_by_one("strategy", ["full_shard", "no_shard"], "change", ADDED)
def test_trained_parameters_that_came_or_were_tied_later_are_refused_by_name(change: str, strategy: str) -> None:
    add, names = ADDED[change]

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, strategy=strategy)
        square_step(model, 0, rank)
        add(model)
        for _ in range(2):
            with pytest.raises(ParameterChangedError) as caught:
                model(INPUTS)
            assert names in str(caught.value)
            assert f"rank {rank}" in str(caught.value)

    on_ranks(2, on_rank)


def test_in_a_model_of_composed_parts_too() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model: Any = seeded(Net)
        config = threaded(world, rank)
        for block in model.blocks:
            polyshard.fully_shard(block, config)
        # Before the call around it, and behind.
        model.blocks[0].up.extra = nn.Parameter(torch.zeros(2).double())
        polyshard.fully_shard(model, config)
        model.blocks[2].extra = nn.Parameter(torch.zeros(2).double())
        with pytest.raises(ParameterChangedError, match=r"'blocks\.0\.up\.extra', 'blocks\.2\.extra'"):
            model(INPUTS)
        del model.blocks[0].up.extra, model.blocks[2].extra
        square_step(model, 0, rank)

    on_ranks(2, on_rank)


def losses(change: Change) -> tuple[list[float], list[list[float]]]:
    """Of three steps, before the second of which ``change`` is called: of the unsharded model, and of two ranks."""

    def train(model: Any, ranks: list[int]) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for turn in range(3):
            if turn == 1:
                change(model)
            total = sum((model(draw(4, 3, turn=turn, rank=rank)).square().mean() for rank in ranks), torch.zeros(()))
            (total / len(ranks)).backward()
            seen.append(total.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def on_rank(rank: int, world: ThreadedWorld) -> list[float]:
        return train(sharded_copy(seeded(Net), rank, world, **BLOCKS), [rank])

    return train(seeded(Net), [0, 1]), on_ranks(2, on_rank)


def assert_same_losses(change: Change) -> None:
    expected, found = losses(change)
    assert [sum(each) for each in zip(*found, strict=True)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("change", ["a head replaced", "a block appended", "a bias"])
def test_the_model_goes_on_where_that_is_undone(change: str) -> None:
    def undone(model: Any) -> None:
        last, down, blocks = model.last, model.blocks[0].down, list(model.blocks)
        ADDED[change][0](model)
        if "_polyshard_module_state" in model.__dict__:
            with pytest.raises(ParameterChangedError):
                model(INPUTS)
        model.last, down.bias, model.blocks = last, None, nn.ModuleList(blocks)

    assert_same_losses(undone)


def reverse(model: Any) -> None:
    model.blocks = nn.ModuleList(reversed(model.blocks))


def wrap_known(model: Any) -> None:
    model.first = nn.Sequential(model.first, nn.Tanh())


def insert_without_parameters(model: Any) -> None:
    model.blocks.insert(1, nn.Tanh())


def take_out_and_put_back(model: Any) -> None:
    last = model.last
    del model.last
    model.last = nn.Linear(5, 2)
    model.last = last


def leave_out(model: Any) -> None:
    del model.blocks[1]


def add_frozen(model: Any) -> None:
    frozen = seeded(lambda: nn.Linear(3, 3), seed=3)
    model.first = nn.Sequential(frozen.requires_grad_(False), model.first)


@pytest.mark.parametrize(
    "change",
    [
        reverse,
        wrap_known,
        insert_without_parameters,
        take_out_and_put_back,
        lambda model: model.blocks[0].register_buffer("mask", torch.zeros(7).double()),
        leave_out,
        add_frozen,
    ],
)
def test_what_brings_nothing_to_train_is_computed_as_the_unsharded_model_does(change: Change) -> None:
    assert_same_losses(change)


def test_what_came_frozen_is_refused_once_it_is_trained() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        model.last = nn.Sequential(model.last, nn.Linear(2, 2).double().requires_grad_(False))
        square_step(model, 0, rank)
        model.last[1].weight.requires_grad_(True)
        with pytest.raises(ParameterChangedError, match=r"'last\.1\.weight' came"):
            model(INPUTS)
        model.last[1].weight.requires_grad_(False)
        square_step(model, 0, rank)

    on_ranks(2, on_rank)


def test_forwards_without_gradients_train_nothing() -> None:
    head = nn.Linear(5, 2).double()
    plain: Any = seeded(Net)
    plain.last = head

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        model.last = copy.deepcopy(head)
        with torch.no_grad():
            found: torch.Tensor = model(INPUTS)
        with pytest.raises(ParameterChangedError, match=r"'last\.weight'"):
            model(INPUTS)
        return found

    assert_all_close(on_ranks(2, on_rank), plain(INPUTS).detach())


def test_unsharded_shows_what_came_and_the_next_step_does_not() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        last = model.last
        model.last = nn.Identity()
        square_step(model, 0, rank)
        model.zero_grad()
        model.last = nn.Linear(5, 2).double()
        with polyshard.unsharded(model):
            assert model.state_dict()["last.weight"].shape == (2, 5)
        with pytest.raises(ParameterChangedError, match=r"'last\.weight'"):
            square_step(model, 1, rank)
        model.last = last
        found: torch.Tensor = model(INPUTS).detach()
        return found

    assert_all_close(on_ranks(2, on_rank), seeded(Net)(INPUTS).detach())


@pytest.mark.filterwarnings("ignore:Nothing averages the gradients of")
def test_ignored_modules_are_the_users_own() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model: Any = seeded(Net)
        polyshard.shard(
            model, threaded(world, rank, **BLOCKS), ignored_modules=[model.last], ignored_parameters=[model.first.bias]
        )
        square_step(model, 0, rank)
        model.last.add_module("more", nn.Linear(2, 2).double())
        model.first.bias = nn.Parameter(torch.ones(5).double())
        square_step(model, 1, rank)

    on_ranks(2, on_rank)


def test_what_another_call_shards_looks_after_itself() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[float]:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        with world.lock:
            head = seeded(lambda: nn.Linear(5, 2), seed=4)
        model.last = polyshard.shard(head, threaded(world, rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for turn in range(2):
            loss = model(draw(4, 3, turn=turn, rank=rank)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    plain: Any = seeded(Net)
    plain.last = seeded(lambda: nn.Linear(5, 2), seed=4)
    reference = train_reference(plain, square_step, 2, turns=2)
    for rank, seen in enumerate(on_ranks(2, on_rank)):
        assert seen == pytest.approx([turn[rank][0].item() for turn in reference.observed], rel=1e-12)


def tie_whole(model: Any) -> None:
    with polyshard.unsharded(model, writeback=True):
        tie(model)
        with torch.no_grad():
            model.first.weight.zero_()


def test_parameters_that_are_tied_inside_of_unsharded_are_not_written_back_as_copies() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        with pytest.raises(ParameterChangedError, match=rf"'blocks.1.down.weight' is 'blocks.0.down.*rank {rank}"):
            tie_whole(model)
        # As before, for nothing was written.
        found: torch.Tensor = model(INPUTS).detach()
        return found

    assert_all_close(on_ranks(2, on_rank), seeded(Net)(INPUTS).detach())


def test_weights_that_were_tied_before_may_be_tied_again() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.tie()

        def tie(self) -> None:
            self.blocks[2].down.weight = self.blocks[0].down.weight

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        model: Any = sharded_copy(seeded(Tied), rank, world, **BLOCKS)
        model.tie()
        return square_step(model, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(seeded(Tied), square_step, 2, turns=1))


@pytest.mark.parametrize("how", ["by attribute", "in the dict"])
def test_checkpoints_do_not_keep_one_ranks_values(how: str, tmp_path: Path) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        if how == "by attribute":
            model.blocks[0].extra = nn.Parameter(torch.full((2,), float(rank)))
        else:
            # Of which no hook hears.
            model.blocks[0]._parameters["extra"] = nn.Parameter(torch.full((2,), float(rank)))
        with pytest.raises(ParameterChangedError, match=rf"'blocks\.0\.extra' came .*rank {rank}"):
            checkpoint.save(tmp_path, 1, model)
        with pytest.raises(ParameterChangedError, match=rf"'blocks\.0\.extra' came .*rank {rank}"):
            get_model_state_dict(model)
        del model.blocks[0].extra
        checkpoint.save(tmp_path, 2, model)

    on_ranks(2, on_rank)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize("change", [reverse, insert_without_parameters, leave_out])
def test_names_that_are_another_parameters_now_are_refused_in_state(change: Change, tmp_path: Path) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        square_step(model, 0, rank)
        optimizer.step()
        optimizer.zero_grad()
        blocks = list(model.blocks)
        change(model)
        calls: list[Callable[[], object]] = [
            lambda: checkpoint.save(tmp_path, 1, model),
            lambda: get_model_state_dict(model),
            lambda: get_model_state_dict(model, StateOptions(form=StateForm.FULL_ON_RANK_0)),
            lambda: get_optimizer_state_dict(model, optimizer),
        ]
        for call in calls:
            with pytest.raises(ParameterChangedError, match=rf"'blocks\.\d\.up\.weight' is what .*rank {rank}"):
                call()
        square_step(model, 1, rank)
        model.blocks = nn.ModuleList(blocks)
        checkpoint.save(tmp_path, 2, model, optimizer)

    on_ranks(2, on_rank)


def test_state_of_a_model_whose_modules_were_wrapped_has_the_names_of_before() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, Any]:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        wrap_known(model)
        return get_model_state_dict(model, StateOptions(form=StateForm.FULL))

    for found in on_ranks(2, on_rank):
        torch.testing.assert_close(found, dict(seeded(Net).state_dict()), rtol=0, atol=0)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Exponential(Doubled):
    """Sets the parameter to what gives its values back."""

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


class Parametrized(Block):
    """A parametrization that comes and goes inside of the forward, as those of PEFT's ``target_parameters``."""

    by: type[Doubled] = Doubled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Saves another parameter of the unit before torch sets this one, to itself.
        x = torch.tanh(self.down(nn.functional.pad(x, (0, 2))))
        parametrize.register_parametrization(self.up, "weight", self.by())
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self.up, "weight", leave_parametrized=False)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_parametrization_that_comes_and_goes_inside_of_a_forward(strategy: str) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), Parametrized(), Parametrized(), nn.Linear(5, 2)))
    assert_parity(model, settings={"policy": units_of(Parametrized), "strategy": strategy}, world_size=2, turns=3)


def test_a_parametrization_that_sets_other_values_is_refused_inside_of_a_forward() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), Parametrized(), nn.Linear(5, 2)))

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine: Any = sharded_copy(model, rank, world, policy=units_of(Parametrized))
        mine[1].by = Exponential
        with pytest.raises(ParameterMovedError, match=r"gave '1\.up\.weight' other memory by set_\(\)"):
            mine(INPUTS)
        mine[1].by = Doubled
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))
