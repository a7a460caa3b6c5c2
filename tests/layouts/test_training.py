"""Training is the unsharded model's under every layout, and what users do to parameters and gradients is honoured."""

from __future__ import annotations

import dataclasses
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    assert_parity,
    draw,
    is_sharded,
    on_ranks,
    root_of,
    seeded,
    square_step,
    threaded,
    train,
    train_reference,
    units_of,
    whole,
)
from polyshard.planning import thresholds
from polyshard_backends.threaded import ThreadedWorld
from processes import RankPool
from reference_models import LAYOUTS, WIDTH, WORDS, Frozen, Halves, Tailed, mixed, mixed_step, tailed_step
from torch import nn
from wires import Int8Wire

UNITS = units_of(Block, Frozen)
EVERY = {**LAYOUTS, "halves": Halves()}
STRATEGIES = ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]
#: Every layout under every strategy, and every pair of either with a number of ranks; each second one at night.
CASES = [
    pytest.param(layout, strategy, 2 + (row + column) % 3, marks=[pytest.mark.nightly] * ((row + column) % 2))
    for row, layout in enumerate(LAYOUTS)
    for column, strategy in enumerate(STRATEGIES)
]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


def settings_of(layout: str, strategy: str, ranks: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"layout": EVERY[layout], "strategy": strategy, "policy": UNITS}
    if strategy.startswith("hybrid"):
        settings["shard_size"] = 2 if ranks == 4 else ranks
    return settings


def cut(rank: int, world: ThreadedWorld, **settings: Any) -> nn.Module:
    with world.lock:
        mine = mixed()
    return polyshard.shard(mine, threaded(world, rank, **{"policy": UNITS, **settings}))


def accumulated(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    """Two microbatches, of which the second alone is reduced."""
    if is_sharded(model):
        with polyshard.no_sync(model):
            first = mixed_step(model, 2 * turn, rank)
    else:
        first = mixed_step(model, 2 * turn, rank)
    return first + mixed_step(model, 2 * turn + 1, rank)


@pytest.mark.parametrize(("layout", "strategy", "ranks"), CASES)
def test_training_equals_the_unsharded_models(layout: str, strategy: str, ranks: int) -> None:
    step, optimizer = ((mixed_step, adam), (accumulated, momentum))[(list(LAYOUTS).index(layout) + ranks) % 2]
    assert_parity(mixed(), step, ranks, optimizer=optimizer, settings=settings_of(layout, strategy, ranks))


#: Layouts and settings, and a number of ranks for each; each second one at night.
OTHERS = [
    pytest.param(layout, extra, 2 + (row + column) % 3, marks=[pytest.mark.nightly] * ((row + column) % 2))
    for row, layout in enumerate([*LAYOUTS, "halves"])
    for column, extra in enumerate(
        [
            {"offload": "cpu"},
            {"reshard_after_forward": "auto", "memory_budget": "1 GiB"},
            {"reshard_after_forward": False, "policy": "always"},
        ]
    )
]


@pytest.mark.parametrize(("layout", "extra", "ranks"), OTHERS)
def test_so_does_it_with_other_settings(layout: str, extra: dict[str, Any], ranks: int) -> None:
    settings = {"policy": UNITS, "layout": EVERY[layout], **extra}
    assert_parity(mixed(), accumulated, ranks, optimizer=adam, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_units_of_one_module_train_alike(strategy: str) -> None:
    assert_parity(mixed(), accumulated, 4, optimizer=adam, settings=settings_of("halves", strategy, 4))


def flat_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(polyshard.flat_parameters(model), lr=1e-2) if is_sharded(model) else adam(model)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EVERY)
def test_flat_parameters_train_alike(layout: str) -> None:
    model = mixed()
    expected = train_reference(model, accumulated, 3, turns=2, optimizer=adam).parameters

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = cut(rank, world, layout=EVERY[layout])
        optimizer = flat_adam(mine)
        train(mine, optimizer, accumulated, rank, 2)
        return whole(mine)

    for found in on_ranks(3, on_rank):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def trained(ranks: int, turns: int = 3, double: bool = False, **settings: Any) -> list[dict[str, torch.Tensor]]:
    """Whole parameters after some steps of a model in float32, on every rank."""

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            mine = seeded(Net) if double else seeded(Net).float()
        polyshard.shard(mine, threaded(world, rank, policy=units_of(Block), **settings))
        optimizer = adam(mine)
        for turn in range(turns):
            x = draw(4, 3, turn=turn, rank=rank)
            mine(x if double else x.float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(mine)

    return on_ranks(ranks, on_rank)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EVERY)
def test_an_encoded_wire_trains(layout: str) -> None:
    # One scale of 8 bits a rank, whose elements are others in each layout.
    (expected, *_) = trained(3)
    for got in trained(3, precision=Int8Wire(), layout=EVERY[layout]):
        for name, value in got.items():
            assert (value - expected[name]).abs().max() < 0.05


@pytest.mark.parametrize("layout", EVERY)
@pytest.mark.parametrize("name", ["embedding and head", "root alone"])
def test_parts_of_the_root_train_alike(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "SMALLEST_SPLIT", WIDTH * WORDS if name != "root alone" else 1 << 40)
    settings = {"policy": units_of(Block), "layout": EVERY[layout]}
    assert_parity(seeded(lambda: Tailed("called")), tailed_step, 3, settings=settings, optimizer=adam)


def only_the_second(module: nn.Module) -> bool | dict[str, Any]:
    return {"layout": "rows"} if isinstance(module, Block) and module.up.out_features == 12 else False


def test_a_policy_chooses_the_layout_of_one_module() -> None:
    settings = {"policy": {"name": "custom", "fn": only_the_second}}

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in cut(rank, world, **settings).named_parameters()}

    for shapes in on_ranks(2, on_rank):
        rows = {name for name, shape in shapes.items() if len(shape) > 1}
        assert rows == {"blocks.1.up.weight", "blocks.1.down.weight"}
    assert_parity(mixed(), accumulated, 2, optimizer=adam, settings=settings)


class Wide(nn.Module):
    """Rows without a common multiple, on more ranks than most have rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 40)
        self.second = nn.Linear(40, 37, bias=False)
        self.third = nn.Linear(37, 53)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.slow
def test_rows_divide_a_unit_into_segments_where_that_saves_padding() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[int, int]:
        found = []
        for layout in ("rows", "flat"):
            with world.lock:
                mine = seeded(Wide)
            found.append(polyshard.report(polyshard.shard(mine, threaded(world, rank, layout=layout))).padding)
        return found[0], found[1]

    padding, least = on_ranks(8, on_rank)[0]
    # Of 3654 elements.
    assert least <= padding < 400
    assert_parity(seeded(Wide), square_step, 8, optimizer=adam, settings={"layout": "rows"})


@pytest.mark.slow
def test_modules_composed_one_by_one_may_each_have_a_layout_of_its_own() -> None:
    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        for block, layout in zip(model.blocks, ("rows", Halves()), strict=True):
            polyshard.fully_shard(block, dataclasses.replace(config, layout=layout))
        return polyshard.fully_shard(model, config)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[set[int], set[int]]:
        with world.lock:
            mine = mixed()
        wrap(mine, threaded(world, rank, policy="never"))
        dims = [{parameter.ndim for parameter in block.parameters()} for block in mine.blocks]
        return dims[0], {parameter.ndim for parameter in mine.first.parameters()}

    assert on_ranks(2, on_rank) == [({1, 2}, {1})] * 2
    assert_parity(mixed(), mixed_step, 3, optimizer=adam, settings={"policy": "never"}, wrap=wrap)


@pytest.mark.parametrize("layout", EVERY)
def test_padding_stays_zero_wherever_it_lies(layout: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[float]:
        mine = cut(rank, world, layout=EVERY[layout])
        optimizer = flat_adam(mine)
        for turn in range(3):
            accumulated(mine, turn, rank)
            polyshard.clip_grad_norm_(mine, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found = []
        for unit in root_of(mine).units:
            spare = torch.ones(unit.layout.shard_numel, dtype=torch.bool)
            for piece in unit.layout.pieces(rank):
                spare[piece.shard_offset : piece.shard_offset + piece.numel] = False
            found += unit.master[spare].tolist()
        return found

    ranks = on_ranks(3, on_rank)
    assert not any(any(spare) for spare in ranks)
    assert layout == "flat" or sum(map(len, ranks)) > 0


def trained_over_gloo(rank: int, layout: str) -> dict[str, torch.Tensor]:
    mine = polyshard.shard(mixed(), polyshard.ShardConfig(collectives="gloo", policy=UNITS, layout=EVERY[layout]))
    optimizer = adam(mine)
    train(mine, optimizer, accumulated, rank, 2)
    found = whole(mine)
    polyshard.close(mine)
    return found


@pytest.mark.slow
def test_on_processes() -> None:
    expected = train_reference(mixed(), accumulated, 3, optimizer=adam).parameters
    with RankPool(3) as pool:
        for layout in EVERY:
            for found in pool.run(trained_over_gloo, layout, timeout=60.0):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
