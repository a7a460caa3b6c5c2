"""Training programs that are drawn at random: how a model is sharded, and what each rank does with it in each step.

A program is a function of its number alone, so that one that fails is run again by that number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from parity import Block
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 5
BLOCKS = 4


class Use(Enum):
    """What a rank does with a block in a forward."""

    USE = "use"
    DROP = "run it, and go on without its output"
    SKIP = "skip"
    TWICE = "run it twice"
    NO_GRAD = "run it under no_grad"
    RAISE = "let it raise at its end, and go on without it"
    ASIDE = "let it leave a loss beside its output"


#: Uses after which each rank has run the same modules with gradients: ranks may mix them as they like.
ALIKE = (Use.USE, Use.USE, Use.USE, Use.DROP, Use.RAISE)


class Turn(Enum):
    """What a step is, on all ranks alike."""

    PLAIN = "a forward and a backward"
    TOGETHER = "two forwards, then one backward of both"
    APART = "two forwards, then a backward of each, the later one first"
    IN_ORDER = "two forwards, then a backward of each, the earlier one first"
    NO_SYNC = "a microbatch under no_sync before one that reduces"
    MICROBATCHES = "two forwards, each with its backward"
    RETAINED = "two backwards through one graph"
    GRAD_FIRST = "autograd.grad of the input through a graph that is retained, then a backward through it"
    GRAD_ALONE = "autograd.grad of the input, then a forward and a backward"
    INPUTS = "backward(inputs=[x]), then a forward and a backward"
    PARAMETERS = "backward(inputs=some parameters)"
    PENALTY = "a backward through autograd.grad(create_graph=True) of the input"


#: Those that torch refuses where a re-entrant checkpoint is on the way.
WITHOUT_REENTRANT = (Turn.GRAD_FIRST, Turn.GRAD_ALONE, Turn.INPUTS, Turn.PARAMETERS, Turn.PENALTY)
ONE_FORWARD = (Turn.PLAIN, Turn.RETAINED, Turn.GRAD_FIRST, Turn.PARAMETERS, Turn.PENALTY)


class Event(Enum):
    """What happens before a step, on all ranks alike."""

    EVALUATE = "a forward in eval mode, without gradients"
    READ = "whole parameters are read"
    WRITE = "a whole parameter is changed"
    FREEZE = "a block is frozen, or trained again"
    SAVE = "a checkpoint is loaded into a new model, sharded in another way"
    LOCAL = "this rank's part of the state is taken and given back"
    RAISE = "the whole forward raises at its end"
    UNUSED = "a forward whose output nobody uses"


@dataclass(frozen=True)
class Segment:
    """Blocks that are called one after the other."""

    blocks: tuple[int, ...]
    uses: tuple[tuple[Use, ...], ...]
    """By rank and position in ``blocks``."""
    drops: tuple[bool, ...]
    """By rank: whether it goes on without what they computed."""
    around: bool | None = None
    """Whether they are under one checkpoint, and whether that is re-entrant; None for no checkpoint."""
    each: bool | None = None
    """The same for each block."""

    @property
    def reentrant(self) -> bool:
        """Whether a re-entrant checkpoint is among its own."""
        return True in (self.around, self.each)


Way = tuple[Segment, ...]


@dataclass(frozen=True)
class Step:
    """One step."""

    events: tuple[Event, ...]
    turn: Turn
    ways: tuple[Way, ...]
    """By forward."""
    gated: tuple[bool, ...]
    """By rank: whether a parameter of the outermost module is used."""
    apart: bool
    """Whether the blocks are called without the outermost module."""
    differentiable: bool
    """Whether the input needs a gradient."""
    clip: str | None
    set_to_none: bool | None
    """How gradients are cleared after it; None for not at all."""


@dataclass(frozen=True)
class Program:
    """One example."""

    number: int
    world_size: int
    settings: dict[str, Any]
    """Of a configuration, but for the policy; ``front`` is who shards: ``polyshard.shard``, or FSDP2's drop-in."""
    policy: str
    optimizer: str
    frozen: bool
    """Whether a block is frozen from the beginning."""
    tied: bool
    """Whether two blocks share a weight."""
    nested: bool
    """Whether a block has another one inside."""
    free: bool
    """Whether ranks may do what does not go together."""
    steps: tuple[Step, ...] = field(repr=False)
    others: tuple[dict[str, Any], ...] = field(repr=False)
    """Settings of later models, in turn."""

    @property
    def mixed(self) -> bool:
        """Whether ranks differ in what they do anywhere."""
        return any(len(set(segment.uses)) > 1 for step in self.steps for way in step.ways for segment in way)

    def __str__(self) -> str:
        lines = [repr(self)]
        for index, step in enumerate(self.steps):
            events = "".join(f"{event.value}; " for event in step.events)
            lines.append(
                f"step {index}: {events}{step.turn.value}; "
                f"apart {step.apart}, gated {step.gated}, input needs gradient "
                f"{step.differentiable}, clip {step.clip}, set_to_none {step.set_to_none}"
            )
            lines += [f"  forward {number}: {segment}" for number, way in enumerate(step.ways) for segment in way]
        return "\n".join(lines)


class PlannedError(Exception):
    """What a block raises."""


class Raising(Block):
    """A block that can be told to raise at its end."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.raises = False
        self.inner = inner
        #: Where a loss of its own goes; None for nowhere.
        self.aside: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.inner is not None:
            y = self.inner(y)
        if self.aside is not None:
            self.aside.append(torch.tanh(self.up(torch.tanh(self.down(self.up(x))))).square().mean())
        if self.raises:
            raise PlannedError
        return y


class Routed(nn.Module):
    """Does with each block as it is told."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.again = nn.Linear(3, 5)
        self.again.weight = self.first.weight
        self.blocks = nn.ModuleList(
            Raising(Raising() if program.nested and index == 1 else None) for index in range(BLOCKS)
        )
        if program.tied:
            blocks: Any = self.blocks
            blocks[2].down.weight = blocks[0].down.weight
        if program.frozen:
            self.blocks[1].requires_grad_(False)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.last = nn.Linear(5, 2)
        self.aside: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, way: Way, rank: int, gated: bool = False, raises: bool = False) -> torch.Tensor:
        self.aside = []
        y = self.first(x) + torch.tanh(self.again(x))
        if gated:
            y = y * self.gate
        y = self.along(y, way, rank)
        if raises:
            raise PlannedError
        output: torch.Tensor = self.last(y)
        return sum(self.aside, output)

    def along(self, x: torch.Tensor, way: Way, rank: int) -> torch.Tensor:
        """What the blocks make of ``x``."""
        for segment in way:
            y = self._segment(segment, rank, x)
            x = x if segment.drops[rank] else y
        return x

    def _segment(self, segment: Segment, rank: int, x: torch.Tensor) -> torch.Tensor:
        def run(y: torch.Tensor) -> torch.Tensor:
            for index, use in zip(segment.blocks, segment.uses[rank], strict=True):
                y = _under(segment.each, _using(self.blocks[index], use, self.aside), y)
            return y

        return _under(segment.around, run, x)


def _under(reentrant: bool | None, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if reentrant is None:
        return function(x)
    # Random states belong to the process, and ranks are threads.
    output: torch.Tensor = checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False)
    return output


def _using(block: Any, use: Use, aside: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        if use is Use.SKIP:
            return x * 1.0
        if use is Use.NO_GRAD:
            with torch.no_grad():
                y = block(x)
            return x + y
        block.raises, block.aside = use is Use.RAISE, aside if use is Use.ASIDE else None
        try:
            y = block(x)
        except PlannedError:
            return x * 1.0
        finally:
            block.raises, block.aside = False, None
        if use is Use.TWICE:
            return torch.tanh(y) + block(y)
        return x * 1.0 if use is Use.DROP else y

    return run


def draw_program(number: int) -> Program:
    """The program of that number."""
    drawn = random.Random(number)
    world_size = drawn.choice((1, 2, 2, 2, 3, 3, 4, 4))
    optimizer = drawn.choice(("momentum", "adamw", "adamw", "flat momentum", "flat adamw", "muon"))
    free = world_size > 1 and drawn.random() < 0.15
    flat = optimizer.startswith("flat")
    policy = drawn.choice(("blocks", "blocks", "blocks", "always", "blocks" if flat else "never"))
    # One tensor a unit is decayed as a whole, so that all of a unit must be used or nothing.
    tied = not flat and drawn.random() < 0.3
    # A tied weight, and all of them where blocks are no units, are the outermost module's.
    alone = policy != "never" and not tied
    steps = tuple(_step(drawn, world_size, optimizer, free, alone) for _ in range(STEPS))
    saves = sum(event is Event.SAVE for step in steps for event in step.events)
    return Program(
        number=number,
        world_size=world_size,
        settings=_settings(drawn, world_size),
        policy=policy,
        optimizer=optimizer,
        frozen=drawn.random() < 0.2,
        tied=tied,
        nested=drawn.random() < 0.3,
        free=free,
        steps=steps,
        others=tuple(_settings(drawn, world_size) for _ in range(saves)),
    )


def _settings(drawn: random.Random, world_size: int) -> dict[str, Any]:
    strategies = ["full_shard", "full_shard", "shard_grad_op", "no_shard"]
    if world_size in (2, 4):
        strategies += ["hybrid_shard", "hybrid_shard_zero2"]
    settings: dict[str, Any] = {
        "strategy": drawn.choice(strategies),
        "front": drawn.choice(("shard", "shard", "drop-in")),
        "offload": drawn.choice(
            ("none", "none", "none", "cpu", {"name": "partial", "device_bytes": drawn.choice((256, 1024, 4096))})
        ),
        "batch_nbytes": drawn.choice((0, 0, 1024, "128 MiB")),
        "forward_prefetch": drawn.randint(0, 2),
        "backward_prefetch": drawn.randint(0, 2),
        "split_root": drawn.random() < 0.5,
        "reshard_after_forward": drawn.choice((None, None, True, False)),
    }
    if settings["front"] == "drop-in":
        settings["offload"] = drawn.choice(("none", "none", "cpu"))
        return {key: settings[key] for key in ("front", "offload", "reshard_after_forward")}
    if settings["strategy"].startswith("hybrid"):
        settings["shard_size"] = drawn.choice((1, 2) if world_size == 2 else (2, 4))
    if settings["reshard_after_forward"] is True and settings.get("shard_size", world_size) == 4:
        settings["reshard_after_forward"] = 2
    return settings


def _step(drawn: random.Random, world_size: int, optimizer: str, free: bool, alone: bool) -> Step:
    turn = drawn.choice(tuple(Turn))
    apart = alone and drawn.random() < 0.15
    if apart and turn is Turn.NO_SYNC:
        # A second microbatch that runs no block, or drops all, reduces nothing.
        turn = Turn.MICROBATCHES
    if turn is Turn.PARAMETERS and optimizer.startswith("flat"):
        # All of a unit must have gradients or nothing.
        turn = Turn.PLAIN
    forwards = 1 if turn in ONE_FORWARD else 2
    # Called apart, each block has a backward of its own to notice: all ranks do the same with them. What a backward
    # computed is on no record that others know of.
    alike = apart or turn is Turn.PENALTY
    ways = tuple(_way(drawn, 1 if alike else world_size, free, turn not in WITHOUT_REENTRANT) for _ in range(forwards))
    if alike:
        ways = tuple(tuple(_alike(segment, world_size) for segment in way) for way in ways)
    reentrant = any(segment.reentrant for way in ways for segment in way)
    possible = [event for event in Event if event is not Event.FREEZE or optimizer in ("momentum", "adamw")]
    return Step(
        events=tuple(drawn.sample(possible, drawn.choice((0, 0, 0, 1, 1, 2)))),
        turn=turn,
        ways=ways,
        # One tensor a unit is decayed as a whole, so that all of a unit must be used or nothing.
        gated=tuple(optimizer.startswith("flat") or drawn.random() < 0.5 for _ in range(world_size)),
        apart=apart,
        differentiable=reentrant or turn in WITHOUT_REENTRANT or drawn.random() < 0.5,
        clip=drawn.choice((None, None, "polyshard", "torch")),
        set_to_none=drawn.choice((True, True, True, False, None)),
    )


def _alike(segment: Segment, world_size: int) -> Segment:
    return replace(segment, uses=segment.uses * world_size, drops=segment.drops * world_size)


def _way(drawn: random.Random, world_size: int, free: bool, reentrant: bool) -> Way:
    """The blocks in one order, in segments of one or more."""
    blocks = list(range(BLOCKS))
    if drawn.random() < 0.2:
        drawn.shuffle(blocks)
    segments = []
    kinds = (None, False, True) if reentrant else (None, False)
    while blocks:
        count = drawn.choice((1, 1, 1, 2, 2, 3))
        these, blocks = blocks[:count], blocks[count:]
        columns = [_column(drawn, world_size, free) for _ in these]
        # A backward comes to what is left aside through the output, and a checkpoint leaves it again.
        aside = any(Use.ASIDE in column for column in columns)
        dropped = drawn.random() < 0.3 and not aside
        segments.append(
            Segment(
                blocks=tuple(these),
                uses=tuple(tuple(column[rank] for column in columns) for rank in range(world_size)),
                drops=tuple(dropped and drawn.random() < 0.5 for _ in range(world_size)),
                around=drawn.choice(kinds) if drawn.random() < 0.6 and not aside else None,
                each=drawn.choice(kinds) if drawn.random() < 0.3 and not aside else None,
            )
        )
    return tuple(segments)


def _column(drawn: random.Random, world_size: int, free: bool) -> Sequence[Use]:
    """What each rank does with one block."""
    if free and drawn.random() < 0.05:
        return [drawn.choice(tuple(Use)) for _ in range(world_size)]
    everyone = drawn.choice((*ALIKE, Use.SKIP, Use.TWICE, Use.NO_GRAD, Use.ASIDE))
    if everyone in ALIKE:
        return [drawn.choice(ALIKE) for _ in range(world_size)]
    return [everyone] * world_size
