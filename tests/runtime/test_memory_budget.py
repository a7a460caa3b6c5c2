"""``reshard_after_forward="auto"``: which units are kept between forward and backward, and from when on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    draw,
    fake,
    on_ranks,
    root_of,
    seeded,
    sgd,
    sharded_copy,
    square_step,
    train_reference,
    units_of,
)
from polyshard.errors import ConfigError
from polyshard.runtime.budget import PATIENCE, Budget, MemoryMeter
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
HUGE = 1 << 50
EVERYTHING = ("(root)", "blocks.0", "blocks.1", "blocks.2")
#: Gathers of a block and of the root, one a parameter.
BLOCK, ROOT = 3, 4
#: Those of a step: of blocks that are released twice, of what is kept once.
RELEASED, KEPT = 6 * BLOCK + ROOT, 3 * BLOCK + ROOT


class Measured(MemoryMeter):
    """A device whose peak is known beforehand."""

    def __init__(self, peak: int) -> None:
        self.peak = peak

    def peak_allocated(self) -> int:
        return self.peak


def with_room(nbytes: Callable[[nn.Module], int]) -> Callable[[nn.Module, polyshard.ShardConfig], nn.Module]:
    """Shards, and pretends that ``nbytes`` of the device are free."""

    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        polyshard.shard(model, config)
        root_of(model).budget = Budget(1000 + nbytes(model), Measured(1000))
        return model

    return wrap


def sizes(model: nn.Module) -> list[int]:
    """Bytes of each block's gather buffer, in the order of the forward."""
    return [unit.gathered.nbytes for unit in root_of(model).units if unit.name != "(root)"]


def with_budget(collectives: FakeCollectives, **settings: Any) -> polyshard.ShardConfig:
    return polyshard.ShardConfig(collectives=collectives, reshard_after_forward="auto", memory_budget=HUGE, **settings)


def kept(model: nn.Module) -> tuple[str, ...]:
    return polyshard.report(model).kept


def gathers_by_step(
    model: nn.Module, collectives: FakeCollectives, steps: int, optimizer: torch.optim.Optimizer
) -> list[int]:
    """How many parameters were gathered in each of ``steps`` training steps."""
    counts = []
    for turn in range(steps):
        collectives.calls.clear()
        square_step(model, turn, 0)
        counts.append(sum(call.operation == "all_gather" for call in collectives.calls))
        optimizer.step()
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize(
    ("room", "fewer", "names"),
    [
        (lambda each: 0, 0, EVERYTHING[:1]),
        (lambda each: each[2] - 1, 0, EVERYTHING[:1]),
        (lambda each: each[2], 1, ("(root)", "blocks.2")),
        (lambda each: each[1] + each[2] + each[0] - 1, 2, ("(root)", "blocks.1", "blocks.2")),
        (lambda each: sum(each), 3, EVERYTHING),
    ],
)
def test_a_kept_unit_is_gathered_once_a_step_instead_of_twice(
    room: Callable[[Sequence[int]], int], fewer: int, names: tuple[str, ...]
) -> None:
    model, collectives = seeded(Net), fake()
    config = polyshard.ShardConfig(collectives=collectives, **BLOCKS)
    with_room(lambda model: room(sizes(model)))(model, config)
    # Three blocks twice and the root once, until the second backward has ended.
    assert gathers_by_step(model, collectives, 4, adam(model)) == [RELEASED] * 2 + [RELEASED - fewer * BLOCK] * 2
    assert kept(model) == names
    model(draw(4, 3)).square().mean()
    assert root_of(model).gathered == names


@pytest.mark.slow
def test_hybrid_training_is_the_same_although_one_group_evaluates_in_between() -> None:
    model = seeded(Net)
    reference = train_reference(model, square_step, 4, turns=5, optimizer=adam)
    evaluated = threading.Barrier(4)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor]]:
        settings = {"strategy": "hybrid_shard", "shard_size": 2, "reshard_after_forward": "auto", **BLOCKS}
        mine = sharded_copy(model, rank, world, memory_budget=HUGE, **settings)
        optimizer, observed = adam(mine), []
        for turn in range(5):
            observed.append(square_step(mine, turn, rank))
            optimizer.step()
            optimizer.zero_grad()
            assert kept(mine) == (EVERYTHING if turn else EVERYTHING[:1])
            if rank < 2:
                with torch.no_grad():
                    mine(draw(4, 3, turn=turn, rank=rank))
            # As users do who let one group evaluate: nobody goes on before it has.
            evaluated.wait(timeout=10.0)
        with polyshard.unsharded(mine):
            return observed, {name: value.detach().clone() for name, value in mine.named_parameters()}

    for rank, (observed, parameters) in enumerate(on_ranks(4, on_rank)):
        for turn, values in enumerate(observed):
            torch.testing.assert_close(values, list(reference.observed[turn][rank]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parameters, reference.parameters, rtol=1e-12, atol=1e-12)


def test_ranks_keep_what_fits_on_the_one_with_the_least_room() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[tuple[str, ...], list[bool]]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        root = root_of(model)
        block = sizes(model)[0]
        root.budget = Budget(10 * block, Measured([6, 8, 7][rank] * block))
        optimizer, pending = adam(model), []
        for turn in range(4):
            square_step(model, turn, rank)
            optimizer.step()
            optimizer.zero_grad()
            pending.append(root.budget_pending)
        return kept(model), pending

    assert on_ranks(3, on_rank) == [(("(root)", "blocks.1", "blocks.2"), [True, False, False, False])] * 3


@pytest.mark.parametrize(
    "make",
    [
        sgd,
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    ],
    ids=["sgd", "fused", "foreach"],
)
@pytest.mark.parametrize("to_none", [True, False])
def test_nothing_is_decided_before_the_optimizer_has_stepped(
    make: Callable[[nn.Module], torch.optim.Optimizer], to_none: bool
) -> None:
    model, collectives = seeded(Net), fake()
    polyshard.shard(model, with_budget(collectives, **BLOCKS))
    optimizer, root = make(model), root_of(model)
    for turn in range(5):
        # Microbatches that are reduced one by one, and steps that a scaler skips.
        square_step(model, turn, 0)
        assert root.budget_pending
        if turn == 3:
            optimizer.zero_grad(set_to_none=to_none)
    optimizer.step()
    assert root.budget_pending
    optimizer.zero_grad(set_to_none=to_none)
    assert gathers_by_step(model, collectives, 2, optimizer) == [RELEASED, KEPT]
    assert not root.budget_pending


def test_only_backwards_that_reduce_count() -> None:
    model, collectives = seeded(Net), fake()
    polyshard.shard(model, with_budget(collectives, **BLOCKS))
    optimizer = adam(model)
    for turn in range(3):
        with polyshard.no_sync(model):
            square_step(model, turn, 0)
        x = draw(4, 3, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
        with torch.no_grad():
            model(x)
            model.blocks[0].up.weight.add_(0.1)
        assert root_of(model).budget_pending
    assert gathers_by_step(model, collectives, 3, optimizer) == [RELEASED, RELEASED, KEPT]


@pytest.mark.slow
def test_without_any_step_the_decision_falls_in_the_end() -> None:
    model, collectives = seeded(Net), fake()
    polyshard.shard(model, with_budget(collectives, **BLOCKS))
    for turn in range(PATIENCE):
        assert root_of(model).budget_pending
        square_step(model, turn, 0)
    assert kept(model) == EVERYTHING


def test_units_that_the_policy_decided_are_left_as_they_are() -> None:
    class Uneven(Net):
        def __init__(self) -> None:
            super().__init__(blocks=4)
            self.blocks[1] = Block(5, 9)
            self.blocks[3] = Block(5, 11)

    releases = {7: None, 9: False, 11: True}

    def policy(module: nn.Module) -> bool | dict[str, Any]:
        return {"reshard_after_forward": releases[module.up.out_features]} if isinstance(module, Block) else False

    model, collectives = seeded(Uneven), fake()
    polyshard.shard(model, with_budget(collectives, policy=policy))
    assert kept(model) == ("(root)", "blocks.1")
    # The root and block 1 once; then blocks 0 and 2 as well.
    assert gathers_by_step(model, collectives, 3, adam(model)) == [7 * BLOCK + ROOT] * 2 + [5 * BLOCK + ROOT]
    assert kept(model) == ("(root)", "blocks.0", "blocks.1", "blocks.2")


def test_without_statistics_the_plan_counts() -> None:
    probe = seeded(Net)
    polyshard.shard(probe, polyshard.ShardConfig(collectives=fake(), batch_nbytes=0, **BLOCKS))
    before = polyshard.report(probe)
    block = sizes(probe)[0]
    assert before.kept == ("(root)",)
    # The root's buffer, the computing block and one ahead.
    root_nbytes = before.gathered_nbytes - 2 * block
    for spare, names in ((-1, EVERYTHING[:1]), (0, ("(root)", "blocks.2")), (block, ("(root)", *EVERYTHING[2:]))):
        model, collectives = seeded(Net), fake()
        config = polyshard.ShardConfig(
            collectives=collectives,
            reshard_after_forward="auto",
            memory_budget=before.total_nbytes() + block + spare,
            batch_nbytes=0,
            **BLOCKS,
        )
        polyshard.shard(model, config)
        gathers_by_step(model, collectives, 2, adam(model))
        report = polyshard.report(model)
        assert report.kept == names
        released = 4 - len(names)
        assert report.gathered_nbytes == root_nbytes + (len(names) - 1) * block + min(2, released) * block


def test_composed_modules_follow_the_outermost_calls_budget() -> None:
    model, collectives = seeded(Net), fake()
    for block in model.blocks:
        polyshard.fully_shard(block, polyshard.ShardConfig(collectives=collectives))
    polyshard.fully_shard(model, with_budget(collectives))
    assert gathers_by_step(model, collectives, 3, adam(model)) == [RELEASED, RELEASED, KEPT]


def test_a_device_without_statistics_needs_a_budget() -> None:
    model = seeded(Net)
    config = polyshard.ShardConfig(collectives=fake(), reshard_after_forward="auto", **BLOCKS)
    with pytest.raises(ConfigError, match=r"'auto' needs memory_budget on cpu, .* \(rank 0\)\. Give it in bytes"):
        polyshard.shard(model, config)
    assert model.first.weight.shape == (5, 3)


def test_a_single_rank_has_nothing_to_decide() -> None:
    model = seeded(Net)
    config = polyshard.ShardConfig(collectives=fake(world_size=1), reshard_after_forward="auto", **BLOCKS)
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD`"):
        polyshard.shard(model, config)
    assert not root_of(model).budget_pending
    square_step(model, 0, 0)
