"""Whole values of a module inside a sharded model: its names, its values, and gathers of its units alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, draw, fake, on_ranks, one_by_one, seeded, sgd, sharded_copy, train_reference, units_of
from polyshard.errors import RankMismatchError, StateError, UnshardedUseError
from polyshard.state import StateOptions, get_model_state_dict
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict as torchs_state_dict

BLOCKS = {"policy": units_of(Block)}
#: A unit; a module inside one; one around two; one of the outermost unit, tied to another; parameters and buffers
#: outside of units; no parameter at all; the model itself.
INSIDE = ["blocks.1", "blocks.1.up", "blocks", "head", "norm", "act", ""]
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {"strategy": "shard_grad_op"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2, "offload": "cpu"}),
    (2, {"strategy": "no_shard"}),
]


class Tied(nn.Module):
    """Its head has the weight of its first layer, and its norm is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.BatchNorm1d(5).requires_grad_(False)
        self.act = nn.Tanh()
        self.head = nn.Linear(5, 5)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.act(self.blocks(self.first(x))))
        return y


def sharded(plain: nn.Module, rank: int, world: ThreadedWorld, **settings: Any) -> Tied:
    with world.lock:
        mine = copy.deepcopy(plain)
    assert isinstance(mine, Tied)
    config = polyshard.ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}, **BLOCKS, **settings)
    return polyshard.shard(mine, config, ignored_modules=[mine.norm])


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return list(got) == list(wanted) and all(torch.equal(got[name], value) for name, value in wanted.items())


@one_by_one("name", INSIDE, "world_size, settings", SETTINGS)
def test_names_and_values_are_those_of_the_same_module_of_the_plain_model(
    world_size: int, settings: dict[str, Any], name: str
) -> None:
    plain = seeded(Tied)
    wanted = plain.get_submodule(name).state_dict()
    x = torch.randn(4, 5, dtype=next(plain.parameters()).dtype)
    computed = plain.eval().get_submodule(name)(x)

    def on_rank(rank: int, world: ThreadedWorld) -> list[bool]:
        inside = sharded(plain, rank, world, **settings).eval().get_submodule(name)
        first = get_model_state_dict(inside, StateOptions(form="full_on_rank_0"))
        pieces = get_model_state_dict(inside)
        streamed = {
            name: each for names, given in polyshard.stream(inside) for name, each in zip(names, given, strict=True)
        }
        with polyshard.unsharded(inside), torch.no_grad():
            torchs = torchs_state_dict(inside) if wanted else {}
            shown, torchs, output = *copy.deepcopy((inside.state_dict(), torchs)), inside(x)
        return [
            same(get_model_state_dict(inside, StateOptions(form="full")), wanted),
            same(first, {} if rank else wanted),
            {name: each.shape for name, each in pieces.items()} == {name: each.shape for name, each in wanted.items()},
            # A tied weight comes once.
            streamed.keys() == wanted.keys() - {"head.weight"},
            all(torch.equal(wanted[name], value) for name, value in streamed.items()),
            same(shown, wanted),
            same(torchs, wanted),
            torch.equal(output, computed),
        ]

    for found in on_ranks(world_size, on_rank):
        assert all(found), found


def test_a_tied_parameter_has_all_names_that_the_module_has_for_it() -> None:
    plain = nn.Sequential(seeded(Tied), nn.Linear(5, 5)).double()

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[dict[str, Any], list[str]]:
        inside = sharded_copy(plain, rank, world, **BLOCKS)[0]
        renamed = polyshard.stream(inside, names=lambda name: f"x.{name}" if "first" in name else None)
        return get_model_state_dict(inside, StateOptions(form="full")), [name for names, _ in renamed for name in names]

    for state, renamed in on_ranks(2, on_rank):
        assert same(state, plain[0].state_dict())
        assert renamed == ["x.first.weight"]


def test_units_without_a_parameter_in_it_are_not_gathered() -> None:
    collectives = fake()
    model = polyshard.shard(seeded(Tied), polyshard.ShardConfig(collectives=collectives, **BLOCKS))

    def gathered(call: Callable[[nn.Module], Any], name: str) -> int:
        collectives.calls.clear()
        call(model.get_submodule(name))
        return sum(each.operation == "all_gather" for each in collectives.calls)

    def whole(module: nn.Module) -> None:
        with polyshard.unsharded(module):
            pass

    for call in (whole, lambda module: list(polyshard.stream(module))):
        found = [gathered(call, name) for name in ("blocks", "blocks.0.down", "head", "norm", "act", "")]
        # One of each parameter: of two blocks, one of these, the outermost unit, what is frozen, nothing, and all.
        assert found == [2 * 3, 3, 2, 2, 0, 2 * 3 + 2 + 2]


def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    loss = model(draw(4, 5, turn=turn, rank=rank)).square().mean()
    loss.backward()
    return [loss.detach()]


def test_changes_are_kept_where_asked_and_training_goes_on() -> None:
    trained = train_reference(seeded(Tied), step, 2, turns=2).parameters

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        plain = seeded(Tied)
        with torch.no_grad():
            for parameter in plain.get_submodule("blocks.1").parameters():
                parameter.mul_(0.5)
        model = sharded_copy(plain, rank, world, **BLOCKS)
        inside, optimizer = model.get_submodule("blocks.1"), sgd(model)
        for factor, keeps in ((2.0, True), (3.0, False)):
            with polyshard.unsharded(inside, writeback=keeps), torch.no_grad():
                for parameter in inside.parameters():
                    parameter.mul_(factor)
        for turn in range(2):
            step(model, turn, rank)
            with polyshard.unsharded(inside):
                pass
            optimizer.step()
            optimizer.zero_grad()
        return get_model_state_dict(model, StateOptions(form="full"))

    for state in on_ranks(2, on_rank):
        for name, value in trained.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


REFUSED: dict[str, tuple[type[Exception], Callable[[Tied], Any]]] = {
    "'blocks.0' was called inside of polyshard.unsharded() of another": (UnshardedUseError, lambda m: m.blocks(X)),
    "mixed torch.Tensor and DTensor": (RuntimeError, lambda m: m.head(X)),
    "already unsharding": (StateError, lambda m: polyshard.unsharded(m.head).__enter__()),
    "stream() was called inside polyshard.unsharded()": (StateError, lambda m: polyshard.stream(m.blocks[1])),
    "forward ran inside unsharded()": (StateError, lambda m: m.blocks[1](X).sum().backward()),
}
X = torch.ones(2, 5, dtype=torch.float64)


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_whole_is_refused_inside(words: str) -> None:
    kind, call = REFUSED[words]

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded(seeded(Tied), rank, world)
        with polyshard.unsharded(model.blocks[1]), pytest.raises(kind) as caught:
            call(model)
        return str(caught.value)

    for message in on_ranks(2, on_rank):
        assert words in message


ASKED: list[Callable[[nn.Module], Any]] = [
    polyshard.stream,
    lambda module: get_model_state_dict(module, StateOptions(form="full")),
    lambda module: polyshard.unsharded(module).__enter__(),
]


@pytest.mark.parametrize("call", ASKED, ids=["stream", "get_model_state_dict", "unsharded"])
def test_ranks_that_ask_for_different_modules_are_told(call: Callable[[nn.Module], Any]) -> None:
    """Their units may be of one size."""

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded(seeded(Tied), rank, world)
        with pytest.raises(RankMismatchError) as caught:
            call(model.blocks[rank])
        return str(caught.value)

    for message in on_ranks(2, on_rank):
        assert "blocks.0" in message
        assert "blocks.1" in message


def test_modules_of_no_sharded_model_are_refused() -> None:
    for call in (polyshard.unsharded, get_model_state_dict, polyshard.stream):
        with pytest.raises(StateError, match=r"needs a sharded module, but this Linear is not sharded"):
            call(nn.Linear(2, 2))


def test_loading_what_is_dropped_warns() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Tied), rank, world, **BLOCKS)
        with polyshard.unsharded(model):
            model.load_state_dict(seeded(Tied, seed=5).state_dict())
        return get_model_state_dict(model, StateOptions(form="full"))

    with pytest.warns(UserWarning, match=r"gives '.*' and others values that are dropped.*writeback=True"):
        states = on_ranks(2, on_rank)
    for state in states:
        torch.testing.assert_close(dict(state), dict(seeded(Tied).state_dict()), rtol=0, atol=0)
