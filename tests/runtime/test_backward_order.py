"""Ranks of which one uses less of a forward than the others: the same collectives in the same order, the right sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    assert_all_close,
    assert_parity,
    draw,
    is_sharded,
    on_ranks,
    seeded,
    sharded_copy,
    stepping,
    train,
    train_reference,
    whole,
)
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.utils.checkpoint import checkpoint

BLOCKS: dict[str, Any] = {"policy": {"name": "lambda", "fn": lambda module: isinstance(module, Block)}}
#: Each collective by itself; one unit ahead; the defaults.
SCHEDULES: list[dict[str, Any]] = [
    {"batch_nbytes": 0, "forward_prefetch": 0, "backward_prefetch": 0},
    {"batch_nbytes": 0},
    {},
]


class Dropping(Net):
    """Runs every block, and goes on without the outputs of some."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)

    def forward(self, x: torch.Tensor, dropped: Sequence[int] = ()) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            y = block(x)
            x = x if index in dropped else y
        return self.last(x)


@pytest.mark.parametrize(
    ("schedule", "strategy"),
    [(SCHEDULES[0], "full_shard"), (SCHEDULES[1], "shard_grad_op"), ({}, "full_shard"), ({}, "no_shard")],
)
@pytest.mark.parametrize("dropped", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_one_rank_drops_outputs_of_blocks_that_it_ran(
    dropped: tuple[int, ...], strategy: str, schedule: dict[str, Any]
) -> None:
    step = stepping(
        lambda model, x, turn, rank: model(x, dropped if rank == turn % 2 else ()).square().mean(), grad=False
    )

    settings = {**BLOCKS, "strategy": strategy, **schedule}
    assert_parity(seeded(Dropping), step, world_size=2, settings=settings)


class Recomputing(Dropping):
    """Drops what checkpoints computed, of a block each or of several; ``arrangement`` says where these lie."""

    def __init__(self, arrangement: str, reentrant: bool) -> None:
        super().__init__()
        self.arrangement, self.reentrant = arrangement, reentrant

    def _checkpoint(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(function, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return output

    def forward(self, x: torch.Tensor, dropped: Sequence[int] = ()) -> torch.Tensor:
        def run(*indices: int, around: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
            def function(y: torch.Tensor) -> torch.Tensor:
                for index in indices:
                    block = self.blocks[index]
                    z = self._checkpoint(block, y) if around else block(y)
                    y = y if index in dropped else z
                return y

            return function

        x = self.first(x)
        if self.arrangement == "each":
            return self.last(run(0, 1, 2, 3, around=True)(x))
        if self.arrangement == "inside":
            # What the rank drops is in the middle of what is computed again.
            return self.last(self._checkpoint(run(0, 1, 2, 3), x))
        for indices in ((0, 1), (2, 0), (3,)):
            y = self._checkpoint(run(*indices, around=self.arrangement == "nested"), x)
            x = x if indices[0] in dropped else y
        return self.last(x)


# Torch's word on a re-entrant checkpoint inside a re-entrant one, whose first forward runs without gradients.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(("schedule", "dropped"), [*zip(SCHEDULES, [(0,), (2,), (1, 3)], strict=True), ({}, (0, 2))])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("arrangement", ["each", "inside", "spanning", "nested"])
def test_one_rank_drops_what_a_checkpoint_computed(
    arrangement: str, reentrant: bool, dropped: tuple[int, ...], schedule: dict[str, Any]
) -> None:
    step = stepping(lambda model, x, turn, rank: model(x, dropped if rank == turn % 2 else ()).square().mean())

    settings = {**BLOCKS, **schedule}
    make = partial(Recomputing, arrangement, reentrant)
    assert_parity(seeded(make), step, world_size=2, turns=2, optimizer=adam, settings=settings)


@pytest.mark.parametrize("reentrant", [False, True])
def test_all_that_is_trained_is_under_checkpoints_and_one_rank_drops_some_of_it(reentrant: bool) -> None:
    """No parameter is in the graph that the backward is asked for, so it cannot tell that gradients add up."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(3) for _ in range(3))

        def forward(self, x: torch.Tensor, dropped: Sequence[int] = ()) -> torch.Tensor:
            for index, block in enumerate(self.blocks):
                y = checkpoint(block, x, use_reentrant=reentrant)
                x = x if index in dropped else y
            return x

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        model(x, (turn,) if rank else ()).square().mean().backward()
        assert x.grad is not None
        return [x.grad]

    assert_parity(seeded(Bare), step, world_size=2, optimizer=adam, settings=BLOCKS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_reentrant_checkpoint_whose_input_needs_a_gradient_on_one_rank_alone() -> None:
    """As of frozen embeddings, where the samples of one rank alone have an image, whose projection is trained."""

    class Projected(Dropping):
        def forward(self, x: torch.Tensor, dropped: Sequence[int] = ()) -> torch.Tensor:
            y = self.first(x)
            y = y.detach() if dropped else y
            for block in self.blocks:
                y = checkpoint(block, y, use_reentrant=True)
            return self.last(y)

    def loss_of(model: nn.Module, x: torch.Tensor, turn: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = model(x, (0,) if rank == turn % 2 else ()).square().mean()
        return loss

    step = stepping(loss_of, grad=False)
    assert_parity(seeded(Projected), step, world_size=2, turns=2, optimizer=adam, settings=BLOCKS)


@pytest.mark.slow
def test_two_forwards_of_which_one_rank_drops_what_a_unit_returns_of_a_unit_inside() -> None:
    """Both notice the gradient of one tensor. What comes next is gathered once, and nothing of the other forward's."""

    class Outer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(super().forward(x))

    class Nested(Dropping):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1] = Outer()

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        losses = [
            model(draw(4, 3, turn=2 * turn + part, rank=rank), (1,) if part == rank else ()).square().mean()
            for part in range(2)
        ]
        torch.stack(losses).sum().backward()
        return [loss.detach() for loss in losses]

    settings = {**BLOCKS, "batch_nbytes": 0, "backward_prefetch": 2}
    assert_parity(seeded(Nested), step, world_size=2, settings=settings)


@pytest.mark.slow
def test_two_forwards_of_which_one_computes_a_dropped_block_again() -> None:
    """A rank keeps for its recomputation what the others release, and gathers it with them for the other forward."""

    class Once(Recomputing):
        def forward(self, x: torch.Tensor, dropped: Sequence[int] = ()) -> torch.Tensor:
            return super().forward(x, dropped) if dropped else Dropping.forward(self, x)

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        # Dropped by nobody is -1.
        losses = [model(x, (3,) if rank else (-1,)).square().mean(), model(2 * x).square().mean()]
        torch.stack(losses).sum().backward()
        assert x.grad is not None
        return [*(loss.detach() for loss in losses), x.grad]

    make = partial(Once, "inside", False)
    assert_parity(seeded(make), step, world_size=2, settings={**BLOCKS, **SCHEDULES[0]})


@pytest.mark.parametrize(("schedule", "dropped"), list(zip(SCHEDULES, [(0,), (2,), (1, 3)], strict=True)))
@pytest.mark.parametrize("then", ["a backward through the same graph", "a step of its own"])
def test_gradients_of_inputs_alone_while_one_rank_drops_a_block(
    then: str, dropped: tuple[int, ...], schedule: dict[str, Any]
) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        loss = model(x, dropped if rank == turn % 2 else ()).square().mean()
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        if then == "a step of its own":
            loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None
        return [slope, x.grad]

    assert_parity(seeded(Dropping), step, world_size=2, settings={**BLOCKS, **schedule})


@pytest.mark.parametrize(
    ("schedule", "strategy"), list(zip(SCHEDULES, ["full_shard", "shard_grad_op", "full_shard"], strict=True))
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_and_two_backwards_of_which_one_drops_a_block_on_one_rank(
    order: tuple[int, int], strategy: str, schedule: dict[str, Any]
) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        losses = [
            model(draw(4, 3, turn=2 * turn + part, rank=rank), (1, 2) if part == rank else ()).square().mean()
            for part in range(2)
        ]
        for part in order:
            losses[part].backward()
        return [loss.detach() for loss in losses]

    assert_parity(seeded(Dropping), step, world_size=2, settings={**BLOCKS, "strategy": strategy, **schedule})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_called_without_the_root_of_which_one_rank_drops_one(schedule: dict[str, Any]) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        blocks = model.get_submodule("blocks")
        assert isinstance(blocks, nn.ModuleList)
        x = draw(4, 5, turn=turn, rank=rank, requires_grad=True)
        y = x
        for index, block in enumerate(blocks):
            dropped = rank == 1 and index == turn
            y = y if dropped and block(y) is not None else block(y)
        y.square().mean().backward()
        assert x.grad is not None
        return [x.grad]

    assert_parity(seeded(Dropping), step, world_size=2, settings={**BLOCKS, **schedule})


class Gated(Block):
    """A unit that is used without one of its parameters at times."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, gates: bool = True) -> torch.Tensor:
        return super().forward(x) * self.gate if gates else super().forward(x)


class Parts(nn.Module):
    """A unit and a parameter that are used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.spare = Gated()
        self.used = Gated()

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        x = self.first(x)
        y = self.spare(x)
        return self.used(y if uses else x, gates=uses)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("users", [(), (1,), (0, 2), (0, 1, 2)])
def test_an_optimizer_leaves_alone_what_no_rank_used(users: tuple[int, ...], strategy: str, world_size: int) -> None:
    """AdamW decays a weight whose gradient is zero, and not one that has none; units and single parameters alike."""

    step = stepping(lambda model, x, turn, rank: model(x, turn in (0, 3) or rank in users).square().mean(), grad=False)

    settings = {**BLOCKS, "strategy": strategy, "precision": "mixed" if world_size == 1 else "none"}
    assert_parity(seeded(Parts), step, world_size, turns=5, optimizer=adam, settings=settings)


@pytest.mark.parametrize("users", [(), (1,)])
def test_what_no_microbatch_used_has_no_gradient_after_no_sync(users: tuple[int, ...]) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        losses = []
        for part in range(3):
            uses = turn == 0 or (rank in users and part == 0)
            loss = model(draw(4, 3, turn=3 * turn + part, rank=rank), uses).square().mean()
            if part < 2 and is_sharded(model):
                with polyshard.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.detach())
        return losses

    assert_parity(seeded(Parts), step, world_size=2, optimizer=adam, settings=BLOCKS)


@pytest.mark.slow
def test_the_optimizer_of_flat_parameters_leaves_a_unit_alone_that_no_rank_used() -> None:
    step = stepping(lambda model, x, turn, rank: model(x, turn == 0).square().mean(), grad=False)

    model = seeded(Parts)
    # Of units that are used as a whole or not at all, for a flat parameter is decayed as one.
    del model.get_submodule("used").gate
    model.get_submodule("used").register_buffer("gate", torch.ones(5, dtype=torch.float64))

    def flat(each: nn.Module) -> torch.optim.Optimizer:
        if is_sharded(each):
            return torch.optim.AdamW(polyshard.flat_parameters(each), lr=1e-2)
        return adam(each)

    reference = train_reference(model, step, 2, turns=3, optimizer=adam)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(model, rank, world, **BLOCKS)
        optimizer = flat(mine)
        train(mine, optimizer, step, rank, 3)
        return whole(mine)

    assert_all_close(on_ranks(2, on_rank), reference.parameters)
