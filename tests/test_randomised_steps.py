"""What each rank does with each block in each step is drawn at random: the sums are right, or all ranks are told.

The reference is one unsharded copy of the model a rank, that does what its rank does; gradients are averaged over the
copies, and a parameter that no copy used has none. `POLYSHARD_EXAMPLES` sets how many examples are drawn, and
`POLYSHARD_SEED` from where.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import polyshard
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from one_core import one_core
from parity import Block, adam, draw, is_sharded, seeded, threaded, units_of, warns_for
from polyshard.errors import CollectiveTimeoutError, PolyshardError, RankMismatchError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.utils.checkpoint import checkpoint

EXAMPLES = int(os.environ.get("POLYSHARD_EXAMPLES", "60"))
SEED = int(os.environ.get("POLYSHARD_SEED", "17"))
STEPS = 6
BLOCKS = 3


class Use(Enum):
    """What a rank does with a block in a forward."""

    USE = "use"
    DROP = "run it, and go on without its output"
    SKIP = "skip"
    TWICE = "run it twice"
    NO_GRAD = "run it under no_grad"
    RAISE = "let it raise at its end, and go on without it"
    RECOMPUTE = "run it under a checkpoint"


#: Uses after which each rank has run the same modules with gradients: ranks may mix them as they like.
ALIKE = (Use.USE, Use.DROP, Use.RAISE)


class Turn(Enum):
    """What a step is, on all ranks alike."""

    PLAIN = "a forward and a backward"
    TOGETHER = "two forwards, then one backward of both"
    APART = "two forwards, then a backward of each, the later one first"
    IN_ORDER = "two forwards, then a backward of each, the earlier one first"
    NO_SYNC = "a microbatch under no_sync before one that reduces"


@dataclass(frozen=True)
class Plan:
    """One example."""

    world_size: int
    settings: dict[str, Any]
    turns: tuple[Turn, ...]
    uses: tuple[tuple[tuple[tuple[Use, ...], ...], ...], ...]
    """By step, forward, rank and block."""


class PlannedError(Exception):
    """What a block raises."""


class Raising(Block):
    raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.raises:
            raise PlannedError
        return y


class Routed(nn.Module):
    """Does with each block as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Raising() for _ in range(BLOCKS))
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, uses: Sequence[Use]) -> torch.Tensor:
        x = self.first(x)
        for block, use in zip(self.blocks, uses, strict=True):
            x = self._run(block, x, use)
        return self.last(x)

    def _run(self, block: nn.Module, x: torch.Tensor, use: Use) -> torch.Tensor:
        if use is Use.SKIP:
            return x
        if use is Use.RECOMPUTE:
            recomputed: torch.Tensor = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            return recomputed
        if use is Use.NO_GRAD:
            with torch.no_grad():
                return x + block(x)
        block.raises = use is Use.RAISE
        try:
            y: torch.Tensor = block(x)
        except PlannedError:
            return x
        finally:
            block.raises = False
        if use is Use.TWICE:
            return torch.tanh(y) + block(y)
        return x if use is Use.DROP else y


@st.composite
def plans(draw_from: st.DrawFn) -> Plan:
    world_size = draw_from(st.integers(2, 4))
    strategies = ["full_shard", "shard_grad_op", "no_shard"] + (["hybrid_shard"] if world_size == 4 else [])
    chosen: dict[str, Any] = {
        "strategy": draw_from(st.sampled_from(strategies)),
        "batch_nbytes": draw_from(st.sampled_from([0, 1024, "128 MiB"])),
        "forward_prefetch": draw_from(st.integers(0, 2)),
        "backward_prefetch": draw_from(st.integers(0, 2)),
    }
    if chosen["strategy"] == "hybrid_shard":
        chosen["shard_size"] = 2
    turns = tuple(draw_from(st.lists(st.sampled_from(Turn), min_size=STEPS, max_size=STEPS)))
    # Most examples must come to an end on all ranks: in one of four, ranks may do things that do not go together.
    free = draw_from(st.integers(0, 3)) == 0
    steps = []
    for turn in turns:
        forwards = []
        for _ in range(1 if turn is Turn.PLAIN else 2):
            columns = []
            for _ in range(BLOCKS):
                everyone = draw_from(st.sampled_from(Use))
                if free and draw_from(st.integers(0, 7)) == 0:
                    columns.append([draw_from(st.sampled_from(Use)) for _ in range(world_size)])
                elif everyone in ALIKE:
                    columns.append([draw_from(st.sampled_from(ALIKE)) for _ in range(world_size)])
                else:
                    columns.append([everyone] * world_size)
            forwards.append(tuple(tuple(column[rank] for column in columns) for rank in range(world_size)))
        steps.append(tuple(forwards))
    return Plan(world_size, chosen, turns, tuple(steps))


def run_step(model: nn.Module, plan: Plan, step: int, rank: int) -> list[torch.Tensor]:
    """One step of one rank, without the optimizer's; what the losses were."""
    turn, losses = plan.turns[step], []
    sharded = is_sharded(model)
    for index, forward in enumerate(plan.uses[step]):
        quiet = turn is Turn.NO_SYNC and index == 0 and sharded
        with polyshard.no_sync(model) if quiet else nullcontext():
            loss = model(draw(4, 3, turn=2 * step + index, rank=rank), forward[rank]).square().mean()
            losses.append(loss)
            if turn is Turn.NO_SYNC:
                loss.backward()
    if turn is not Turn.NO_SYNC:
        for loss in backwards(turn, losses):
            loss.backward()
    return [loss.detach() for loss in losses]


def backwards(turn: Turn, losses: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What is differentiated in turn."""
    if turn is Turn.APART:
        yield from reversed(losses)
    elif turn is Turn.IN_ORDER:
        yield from losses
    else:
        yield torch.stack(losses).sum()


def reference(model: nn.Module, plan: Plan) -> tuple[list[list[list[torch.Tensor]]], dict[str, torch.Tensor]]:
    """Losses by step and rank, and parameters after the last step."""
    copies = [copy.deepcopy(model) for _ in range(plan.world_size)]
    optimizers = [adam(each) for each in copies]
    losses = []
    for step in range(STEPS):
        losses.append([run_step(each, plan, step, rank) for rank, each in enumerate(copies)])
        for same in zip(*(each.parameters() for each in copies), strict=True):
            there = [each.grad for each in same if each.grad is not None]
            mean = sum(there, torch.zeros_like(same[0], requires_grad=False)) / plan.world_size
            for each in same:
                each.grad = mean.clone() if there else None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: each.detach() for name, each in copies[0].named_parameters()}


Outcome = tuple[list[list[torch.Tensor]], "dict[str, torch.Tensor] | type[PolyshardError]"]


def train(model: nn.Module, plan: Plan, rank: int, world: ThreadedWorld) -> Outcome:
    """This rank's losses, and whole parameters, or the kind of error that ended it.

    Not the error itself: it holds frames of checkpoints, which torch can leave on the thread alone that entered them.
    """
    with world.lock:
        mine = copy.deepcopy(model)
    losses: list[list[torch.Tensor]] = []
    try:
        polyshard.shard(mine, threaded(world, rank, policy=units_of(Raising), **plan.settings))
        optimizer = adam(mine)
        for step in range(STEPS):
            losses.append(run_step(mine, plan, step, rank))
            optimizer.step()
            optimizer.zero_grad()
        with polyshard.unsharded(mine):
            return losses, {name: each.detach().clone() for name, each in mine.named_parameters()}
    except PolyshardError as error:
        return losses, type(error)


@seed(SEED)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    # Of two ranks or four, three blocks and six steps: small enough to read, and shrinking takes minutes.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(plan=plans())
def test_training_is_right_or_every_rank_is_told(plan: Plan) -> None:
    model = seeded(Routed)
    wanted_losses, wanted = reference(model, plan)
    with warns_for(plan.world_size, plan.settings), one_core():
        outcomes = ThreadedWorld(plan.world_size, timeout=5.0).run(
            lambda rank, world: train(model, plan, rank, world), timeout=40.0
        )
    errors = [result for _, result in outcomes if isinstance(result, type)]
    # What was computed before anybody was told is right, too.
    for rank, (losses, _) in enumerate(outcomes):
        for step, values in enumerate(losses):
            torch.testing.assert_close(values, wanted_losses[step][rank], rtol=1e-11, atol=1e-11)
    if errors:
        # Ranks that wait for each other in a circle of groups do not meet in any.
        told = (RankMismatchError, CollectiveTimeoutError) if "shard_size" in plan.settings else (RankMismatchError,)
        assert errors[0] in told
        assert errors == [errors[0]] * plan.world_size
        assert any(len(set(forward)) > 1 for step in plan.uses for forward in step)
        return
    for _, parameters in outcomes:
        torch.testing.assert_close(parameters, wanted, rtol=1e-10, atol=1e-11)
