"""When units are gathered and released: as often as the strategy says, and as far ahead as asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import polyshard
import pytest
import torch
from parity import Block, Net, adam, assert_parity, draw, fake, root_of, seeded, square_step, units_of
from torch import nn

BLOCKS = {"policy": units_of(Block)}


#: Gathers of a block and of the root, one a parameter.
BLOCK, ROOT = 3, 4


def gathers_in_a_step(policy: Any, **settings: Any) -> tuple[int, tuple[str, ...]]:
    """How many parameters were gathered in one step, and which were whole between its forward and its backward."""
    model, collectives = seeded(Net), fake()
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, policy=policy, **settings))
    loss = model(draw(4, 3)).square().mean()
    between = root_of(model).gathered
    loss.backward()
    assert root_of(model).gathered == ()
    return sum(call.operation == "all_gather" for call in collectives.calls), between


def test_each_strategy_gathers_as_often_as_it_says() -> None:
    # Three blocks and the root; the outermost module is kept for its backward, which follows at once.
    blocks = BLOCKS["policy"]
    everything, once = ("(root)", "blocks.0", "blocks.1", "blocks.2"), 3 * BLOCK + ROOT
    assert gathers_in_a_step(blocks, strategy="full_shard") == (6 * BLOCK + ROOT, ("(root)",))
    assert gathers_in_a_step(blocks, strategy="full_shard", reshard_after_forward=True) == (2 * once, ())
    assert gathers_in_a_step(blocks, strategy="full_shard", reshard_after_forward=False) == (once, everything)
    assert gathers_in_a_step(blocks, strategy="shard_grad_op") == (once, everything)
    assert gathers_in_a_step(blocks, strategy="shard_grad_op", reshard_after_forward=True) == (2 * once, ())
    assert gathers_in_a_step(blocks, strategy="no_shard") == (0, ())


def keeps_wide_blocks(module: nn.Module) -> bool | dict[str, Any]:
    """Blocks of 9 hidden features stay whole until their backward."""
    return {"reshard_after_forward": module.up.out_features != 9} if isinstance(module, Block) else False


class Uneven(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Block(5, 9)


def test_a_policy_decides_for_each_unit_whether_it_is_released() -> None:
    model, collectives = seeded(Uneven), fake()
    config = polyshard.ShardConfig(collectives=collectives, policy=keeps_wide_blocks)
    polyshard.shard(model, config)
    loss = model(draw(4, 3)).square().mean()
    assert root_of(model).gathered == ("(root)", "blocks.1")
    loss.backward()
    assert root_of(model).gathered == ()
    assert sum(call.operation == "all_gather" for call in collectives.calls) == 5 * BLOCK + ROOT
    assert_parity(seeded(Uneven), world_size=3, turns=5, optimizer=adam, settings={"policy": keeps_wide_blocks})


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_units_are_fetched_as_far_ahead_as_asked(ahead: int) -> None:
    model = cast("Net", seeded(lambda: Net(blocks=4)))
    settings = {"forward_prefetch": ahead, "backward_prefetch": ahead, "batch_nbytes": 0}
    polyshard.shard(model, polyshard.ShardConfig(collectives=fake(), **BLOCKS, **settings))
    gathered: dict[str, list[set[str]]] = {"forward": [], "backward": []}

    def note(direction: str) -> None:
        gathered[direction].append(set(root_of(model).gathered) - {"(root)"})

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        note("forward")
        output.register_hook(lambda gradient: note("backward"))

    # Inside a block, so that its own parameters are there.
    handles = [cast("Block", block).up.register_forward_hook(watch) for block in model.blocks]
    square_step(model, 0, 0)
    # The first forward has no order to follow yet.
    assert gathered["forward"] == [{f"blocks.{index}"} for index in range(4)]
    backward = [{f"blocks.{each}" for each in range(max(0, index - ahead), index + 1)} for index in (3, 2, 1, 0)]
    assert gathered["backward"] == backward
    gathered["forward"].clear()
    square_step(model, 1, 0)
    forward = [{f"blocks.{each}" for each in range(index, min(4, index + ahead + 1))} for index in range(4)]
    assert gathered["forward"] == forward
    # A backward each behind both forwards, as in a pipeline.
    losses = [model(draw(4, 3)).square().mean() for _ in range(2)]
    gathered["backward"].clear()
    for loss in losses:
        loss.backward()
    assert gathered["backward"] == [*backward, *backward]
    for handle in handles:
        handle.remove()


def gathers_a_step(model: nn.Module, x: torch.Tensor, **settings: Any) -> list[int]:
    """How many parameters are gathered in each of three steps, over four pretended ranks."""
    collectives = fake()
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, policy=units_of(nn.Linear), **settings))
    counts = []
    for _ in range(3):
        collectives.calls.clear()
        model(x).sum().backward()
        counts.append(sum(call.operation == "all_gather" for call in collectives.calls))
        assert root_of(model).gathered == ()
    return counts


def linears() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))


class Scaled(nn.Module):
    """Parameters of the outermost module's own around those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layers(x)


@pytest.mark.parametrize(
    ("make", "settings", "counts"),
    [
        # The backward of the last layer follows its forward at once, which the first step finds out.
        (linears, {}, [20, 18, 18]),
        (linears, {"reshard_after_forward": True}, [20, 20, 20]),
        # Here that of the outermost module does.
        (Scaled, {}, [21, 21, 21]),
    ],
    ids=["last", "released", "outermost"],
)
def test_what_is_needed_again_at_once_is_gathered_once(
    make: Callable[[], nn.Module], settings: dict[str, Any], counts: list[int]
) -> None:
    assert gathers_a_step(make(), torch.ones(2, 8), **settings) == counts


def test_the_last_unit_is_released_where_no_backward_follows() -> None:
    model = polyshard.shard(linears(), polyshard.ShardConfig(collectives=fake(), policy=units_of(nn.Linear)))
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(2, 8))
        assert root_of(model).gathered == ()


class Wanders(Net):
    """Takes its blocks in the order that it is told."""

    route: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in self.route:
            x = self.blocks[index](x)
        return self.last(x)


@pytest.mark.slow
@pytest.mark.parametrize("other", [(0, 2, 1, 3), (0, 3), (2, 3), (0, 1)])
@pytest.mark.parametrize("batch", [0, "16 MiB"])
def test_orders_that_alternate_lose_no_prefetch(other: tuple[int, ...], batch: int | str) -> None:
    model, collectives = cast("Wanders", seeded(lambda: Wanders(blocks=4))), fake()
    settings = {"forward_prefetch": 1, "batch_nbytes": batch}
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, **BLOCKS, **settings))
    fetched: list[bool] = []

    def watch(block: nn.Module, args: Any) -> None:
        # Before the block's own gather would be issued.
        name = f"blocks.{list(model.blocks).index(block)}"
        fetched.append(name in root_of(model).gathered)

    for block in model.blocks:
        block.register_forward_pre_hook(watch, prepend=True)
    for turn in range(8):
        model.route = other if turn % 2 else (0, 1, 2, 3)
        fetched.clear()
        collectives.calls.clear()
        square_step(model, turn, 0)
        if turn >= 3:
            assert fetched == [True] * len(model.route)
            # Each block for its forward and for its backward, the root once: nothing that is not used.
            gathers = sum(call.operation == "all_gather" for call in collectives.calls)
            assert gathers == 2 * len(model.route) * BLOCK + ROOT
    assert_parity(seeded(lambda: Wanders(blocks=4)), world_size=2, step=alternating(other), turns=4, settings=BLOCKS)


def alternating(other: tuple[int, ...]) -> Callable[[nn.Module, int, int], list[torch.Tensor]]:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        cast("Wanders", model).route = other if turn % 2 else (0, 1, 2, 3)
        return square_step(model, turn, rank)

    return step
