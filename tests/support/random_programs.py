"""Training programs that are drawn at random: how a model is sharded, and what each rank does with it in each step.

A program is a function of its number alone, so that one that fails is run again by that number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from polyshard_fsdp import BackwardPrefetch

STEPS = 5
BLOCKS = 4
#: Thresholds of the engine: of a program some are as small as its parameters.
SMALL = {"SMALLEST_SPLIT": 10, "DIRECT_NUMEL": 1, "SIDE_BY_SIDE_NBYTES": 0, "HELD_NBYTES": 0, "GROUPED_NBYTES": 4096}


class Family(Enum):
    """What each block has behind its layers."""

    DENSE = "nothing"
    SCALAR = "a parameter of no dimension"
    SLIVERS = "a parameter of one element, and one of none"
    LOOKUP = "an embedding"
    RECURRENT = "a recurrent layer"
    EXPERTS = "a parameter of three dimensions"
    ADAPTED = "a frozen layer with a trained addition of low rank"
    RECOMPUTED = "a layer under a checkpoint"
    AGAIN = "nothing; each calls itself in the middle"
    QUERIED = "nothing; a parameter of the outermost module goes through the first of them"
    WORDS = "nothing; an embedding in front of the blocks and a head behind them share a weight"
    BORROWED = "nothing; the weight of the last layer is read beside its forward"


#: Families whose blocks have nothing more than their layers.
BARE = (Family.DENSE, Family.WORDS, Family.BORROWED, Family.AGAIN, Family.QUERIED)


class Use(Enum):
    """What a rank does with a block in a forward."""

    USE = "use"
    DROP = "run it, and go on without its output"
    SKIP = "skip"
    TWICE = "run it twice"
    NO_GRAD = "run it under no_grad"
    RAISE = "let it raise at its end, and go on without it"
    ASIDE = "let it leave a loss beside its output"
    PASS = "agree with the others that it passes by, and do"


#: Uses after which each rank has run the same modules with gradients: ranks may mix them as they like.
ALIKE = (Use.USE, Use.USE, Use.USE, Use.DROP, Use.RAISE)


class Turn(Enum):
    """What a step is, on all ranks alike."""

    PLAIN = "a forward and a backward"
    TOGETHER = "two forwards, then one backward of both"
    APART = "two forwards, then a backward of each, the later one first"
    IN_ORDER = "two forwards, then a backward of each, the earlier one first"
    NO_SYNC = "two microbatches under no_sync before one that reduces"
    MICROBATCHES = "two forwards, each with its backward"
    RETAINED = "two backwards through one graph"
    GRAD_FIRST = "autograd.grad of the input through a graph that is retained, then a backward through it"
    GRAD_ALONE = "autograd.grad of the input, then a forward and a backward"
    INPUTS = "backward(inputs=[x]), then a forward and a backward"
    PARAMETERS = "backward(inputs=some parameters)"
    PENALTY = "a backward through autograd.grad(create_graph=True) of the input"
    LOOK = "a forward without gradients between a forward and its backward"
    STUMBLE = "a forward that raises between a forward and its backward"
    CHILD = "a block by itself, then a forward, and one backward of both"
    NESTED = "a forward that calls itself, and a backward"
    INSIDE = "a forward that calls its backward itself"
    AROUND = "a forward under one checkpoint, and a backward"
    SOME = "two microbatches in which gradients of some modules wait, FSDP2's way, before one that reduces all"
    REPLICAS = "two microbatches under no_all_reduce before one that reduces over replicas, too"


#: Those that torch refuses where a re-entrant checkpoint is on the way.
WITHOUT_REENTRANT = (Turn.GRAD_FIRST, Turn.GRAD_ALONE, Turn.INPUTS, Turn.PARAMETERS, Turn.PENALTY)
#: Those of three forwards, the last of which reduces what the others left.
WAITING = (Turn.NO_SYNC, Turn.SOME, Turn.REPLICAS)
ONE_FORWARD = (
    *(Turn.PLAIN, Turn.RETAINED, Turn.GRAD_FIRST, Turn.PARAMETERS, Turn.PENALTY, Turn.LOOK, Turn.INSIDE, Turn.AROUND),
    *(Turn.STUMBLE, Turn.CHILD, Turn.NESTED),
)


#: Those with one backward that reduces a unit, behind which an optimizer may step over it.
ONE_REDUCTION = (
    *(Turn.PLAIN, Turn.NO_SYNC, Turn.GRAD_FIRST, Turn.GRAD_ALONE, Turn.INPUTS, Turn.PARAMETERS, Turn.PENALTY),
    *(Turn.LOOK, Turn.AROUND, Turn.INSIDE),
)


def forwards_of(turn: Turn) -> int:
    """How many forwards a step has, but for those that only look."""
    if turn in WAITING:
        return 3
    return 1 if turn in ONE_FORWARD else 2


class Event(Enum):
    """What happens before a step, on all ranks alike."""

    EVALUATE = "a forward in eval mode, without gradients"
    INFER = "a forward in inference mode"
    READ = "whole parameters are read, and computed with"
    WRITE = "a whole parameter is changed"
    CHANGE = "a sharded parameter is changed"
    FREEZE = "a block is frozen, or trained again"
    FREEZE_WHOLE = "the same, while parameters are whole"
    SAVE = "a checkpoint is loaded into a new model, sharded in another way"
    LOCAL = "this rank's part of the state is taken and given back"
    RAISE = "a forward raises inside of a block"
    FAIL = "a backward raises on its way"
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
    """Of a configuration, but for the policy; ``front`` is who shards: ``polyshard.shard``, or FSDP2's drop-in,
    which takes modules in pairs where they come ``together``. Of FSDP's wrapper also the strategy of one block
    (``inner``), whether its optimizer is made before (``early``), and whether parameters are looked at between two
    forwards (``summons``)."""
    policy: str
    optimizer: str
    form: str | None
    """Whether it steps over lists (``"foreach"``, ``"fused"``), or over parameter ``"groups"`` of other settings."""
    order: float
    """Of norms."""
    frozen: str | None
    """The module that is frozen from the beginning."""
    tied: bool
    """Whether two blocks share a weight."""
    nested: bool
    """Whether a block has another one inside."""
    family: Family
    in_backward: str | None
    """Whether the optimizer steps there: ``"where it can"``, ``"always"``, taken back where it came too early; None."""
    small: dict[str, int]
    """Sizes (``planning/thresholds.py``) from which on the engine takes another way: small, as these parameters are."""
    free: bool
    """Whether ranks may do what does not go together."""
    steps: tuple[Step, ...] = field(repr=False)
    others: tuple[dict[str, Any], ...] = field(repr=False)
    """Settings of later models, in turn."""

    @property
    def wrapped(self) -> bool:
        """Whether FSDP's wrapper shards."""
        return bool(self.settings["front"] == "wrapper")

    @property
    def keeps_writes(self) -> bool:
        """Whether what is written into whole parameters stays: where nothing is copied."""
        if not self.wrapped or self.settings["offload"]:
            return False
        return self.world_size == 1 or "NO_SHARD" in (self.settings["strategy"], self.settings["inner"])

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
    family = drawn.choice((Family.DENSE, Family.DENSE, *Family))
    if family in (Family.BORROWED, Family.LOOKUP) and policy == "always":
        # The weight of one unit, in another one's forward; an embedding that recomputations gather, and backwards not.
        family = Family.DENSE
    # A tied weight, and all of them where blocks are no units, are the outermost module's.
    alone = policy != "never" and not tied
    steps = tuple(_step(drawn, world_size, optimizer, free, alone) for _ in range(STEPS))
    if family is Family.QUERIED and any(step.turn is Turn.PENALTY for step in steps):
        # A slope goes through no forward on that parameter.
        family = Family.DENSE
    saves = sum(event is Event.SAVE for step in steps for event in step.events)
    # Of one tensor all must have gradients or nothing, and penalties read lists of modules that are gathered once.
    single = flat or any(step.turn is Turn.PENALTY for step in steps)
    forms = random.Random(f"form {number}")
    form = forms.choice((None, None, "foreach", "fused", "groups"))
    if optimizer == "muon" or (form == "groups" and flat) or (form == "fused" and "momentum" in optimizer):
        # Torch's fused SGD takes no DTensor.
        form = None
    # Torch has no largest element of an empty gradient.
    order = forms.choice((2.0, 2.0, 1.0, 3.0, 2.0 if family is Family.SLIVERS else math.inf))
    if optimizer == "momentum" and forms.random() < 0.3:
        optimizer = "adagrad"
    return Program(
        number=number,
        world_size=world_size,
        settings=_settings(drawn, world_size, family, single),
        policy=policy,
        optimizer=optimizer,
        form=form,
        order=order,
        frozen=drawn.choice((*(None,) * 6, "blocks.1", "blocks.0.up", "first", "last")),
        tied=tied,
        nested=drawn.random() < 0.3,
        family=family,
        in_backward=drawn.choice((None, "where it can", "always")) if optimizer != "muon" and not free else None,
        small={name: size for name, size in SMALL.items() if drawn.random() < 0.3},
        free=free,
        steps=steps,
        others=tuple(_settings(drawn, world_size, family, single) for _ in range(saves)),
    )


def draw_wrapped(number: int) -> Program:
    """The program of that number, as far as FSDP's wrapper can be asked of it."""
    program, drawn = draw_program(number), random.Random(number)
    strategies = ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if program.world_size == 4:
        strategies += ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    settings: dict[str, Any] = {
        "front": "wrapper",
        "strategy": drawn.choice(strategies),
        "use_orig_params": drawn.random() < 0.5,
        "offload": drawn.random() < 0.3,
        "backward_prefetch": drawn.choice((None, *BackwardPrefetch)),
        "forward_prefetch": drawn.random() < 0.5,
        "summons": drawn.random() < 0.5,
    }
    # Of the third block, over the same ranks.
    settings["inner"] = None if "HYBRID" in settings["strategy"] else drawn.choice((None, None, *strategies[1:4]))
    settings["early"] = settings["use_orig_params"] and drawn.random() < 0.5
    # One tensor a unit is trained and frozen as a whole.
    flat = not settings["use_orig_params"]
    without = program.family is Family.SCALAR or (flat and program.family is Family.ADAPTED)
    return replace(
        program,
        settings=settings,
        # Of a unit of which a part is used the rest has zeros, which are decayed: blocks are used or not.
        policy="blocks",
        optimizer=program.optimizer if program.optimizer in ("momentum", "adamw") else "adamw",
        form="foreach" if flat and program.form else program.form,
        frozen=None if flat else program.frozen,
        tied=False,
        family=Family.DENSE if without else program.family,
        in_backward=None,
        free=False,
        steps=tuple(_wrapped_step(step, flat, program.nested) for step in program.steps),
        others=(),
    )


#: What the wrapper is not made for, and what stands in its place.
INSTEAD = {Turn.SOME: Turn.NO_SYNC, Turn.REPLICAS: Turn.NO_SYNC, Turn.PARAMETERS: Turn.PLAIN}
#: Where a backward reduces a unit before it is released, the gradient does not fit the whole flat parameter.
INSTEAD_OF_FLAT = {**INSTEAD, Turn.INSIDE: Turn.PLAIN, Turn.PENALTY: Turn.GRAD_FIRST}


def _wrapped_step(step: Step, flat: bool, nested: bool) -> Step:
    turn = (INSTEAD_OF_FLAT if flat else INSTEAD).get(step.turn, step.turn)
    others = {Event.SAVE, Event.FREEZE_WHOLE, *((Event.CHANGE,) if flat else ())}
    if turn is Turn.NO_SYNC or len(step.events) > 1:
        # Behind a backward that raised comes a forward.
        others.add(Event.FAIL)

    def alike(segment: Segment) -> Segment:
        # What an instance with another one inside leaves beside its output is refused: it was released. What runs again
        # for nobody, too, is reduced before it is released.
        again = segment.around is not None or segment.each is not None
        refused = {*((Use.ASIDE,) if nested else ()), *((Use.DROP, Use.RAISE) if flat and again else ())}
        its = tuple(Use.USE if use in refused else use for use in segment.uses[0])
        drops = (segment.drops[0] and not (flat and again),)
        return _alike(replace(segment, uses=(its,), drops=drops), len(segment.uses))

    return replace(
        step,
        events=tuple(event for event in step.events if event not in others),
        turn=turn,
        ways=tuple(tuple(alike(segment) for segment in way) for way in step.ways),
        gated=(True,) * len(step.gated),
        apart=False,
    )


def _settings(drawn: random.Random, world_size: int, family: Family, single: bool) -> dict[str, Any]:
    strategies = ["full_shard", "full_shard", "shard_grad_op", "zero1", "no_shard"]
    if world_size in (2, 4):
        strategies += ["hybrid_shard", "hybrid_shard_zero2"]
    if world_size == 4:
        strategies += ["hfsdp", "hfsdp", "hpz"]
    settings: dict[str, Any] = {
        "strategy": drawn.choice(strategies),
        "front": drawn.choice(("shard", "shard", "composed", "drop-in")),
        "offload": drawn.choice(
            (
                *("none", "none", "none", "cpu", "optimizer", "optimizer"),
                {
                    "name": "partial",
                    "device_bytes": drawn.choice((256, 1024, 4096)),
                    "inner": drawn.choice(("cpu", "optimizer")),
                },
            )
        ),
        "batch_nbytes": drawn.choice((0, 0, 1024, "128 MiB")),
        "forward_prefetch": drawn.randint(0, 2),
        "backward_prefetch": drawn.randint(0, 2),
        "split_root": drawn.random() < 0.5,
        "reshard_after_forward": drawn.choice((None, None, True, False, "auto")),
        "shard_gradients": drawn.random() < 0.2,
        "together": not single and drawn.random() < 0.5,
    }
    if settings["front"] == "drop-in" and family is Family.SCALAR:
        # FSDP2 takes no scalars.
        settings["front"] = "composed"
    if settings["reshard_after_forward"] == "auto":
        releases = settings["front"] != "drop-in" and settings["strategy"] in ("full_shard", "hybrid_shard", "hfsdp")
        settings |= {"memory_budget": "1 GiB"} if releases else {"reshard_after_forward": None}
    if settings["front"] == "drop-in":
        settings["offload"] = drawn.choice(("none", "none", "cpu"))
        return {key: settings[key] for key in ("front", "offload", "reshard_after_forward", "together")}
    del settings["together"]
    if settings["strategy"].startswith("hybrid"):
        settings["shard_size"] = drawn.choice((1, 2) if world_size == 2 else (2, 4))
    elif settings["strategy"] in ("hfsdp", "hpz"):
        settings["shard_size"] = 2
    if settings["strategy"] in ("zero1", "hpz"):
        settings["reshard_after_forward"] = None
    if settings["reshard_after_forward"] is True and settings.get("shard_size", world_size) == 4:
        settings["reshard_after_forward"] = 2
    return settings


def _step(drawn: random.Random, world_size: int, optimizer: str, free: bool, alone: bool) -> Step:
    turn = drawn.choice(tuple(Turn))
    apart = alone and drawn.random() < 0.15
    if apart and turn in WAITING:
        # A second microbatch that runs no block, or drops all, reduces nothing.
        turn = Turn.MICROBATCHES
    if (apart and turn in (Turn.INSIDE, Turn.AROUND)) or (not alone and turn is Turn.CHILD):
        turn = Turn.PLAIN
    if turn is Turn.PARAMETERS and optimizer.startswith("flat"):
        # All of a unit must have gradients or nothing.
        turn = Turn.PLAIN
    # Called apart, each block has a backward of its own to notice: all ranks do the same with them. What a backward
    # computed is on no record that others know of.
    alike = apart or turn is Turn.PENALTY
    reentrant = turn not in WITHOUT_REENTRANT and turn is not Turn.INSIDE
    # Who passes by does so in a step of forwards and whole backwards.
    passes = turn not in (*WITHOUT_REENTRANT, Turn.AROUND, Turn.SOME)
    ways = tuple(_way(drawn, 1 if alike else world_size, free, reentrant, passes) for _ in range(forwards_of(turn)))
    if alike:
        ways = tuple(tuple(_alike(segment, world_size) for segment in way) for way in ways)
    reentrant = any(segment.reentrant for way in ways for segment in way)
    possible = [event for event in Event if "FREEZE" not in event.name or optimizer in ("momentum", "adamw")]
    events = drawn.sample(possible, drawn.choice((0, 0, 0, 1, 1, 2)))
    return Step(
        # Behind it comes the next forward: FSDP2's modules may hold whole parameters until then.
        events=tuple(sorted(events, key=(Event.UNUSED,).__contains__)),
        turn=turn,
        ways=ways,
        # One tensor a unit is decayed as a whole, so that all of a unit must be used or nothing.
        gated=tuple(optimizer.startswith("flat") or drawn.random() < 0.5 for _ in range(world_size)),
        apart=apart,
        # A backward inside of a forward is not to reach the model's own inputs.
        differentiable=reentrant or turn in WITHOUT_REENTRANT or drawn.random() < 0.5,
        clip=drawn.choice((None, None, "polyshard", "torch")),
        set_to_none=drawn.choice((True, True, True, False, None)),
    )


def _alike(segment: Segment, world_size: int) -> Segment:
    (its,) = segment.uses
    # Outside of a forward nobody passes by.
    uses = tuple(Use.SKIP if use is Use.PASS else use for use in its)
    return replace(segment, uses=(uses,) * world_size, drops=segment.drops * world_size)


def _way(drawn: random.Random, world_size: int, free: bool, reentrant: bool, passes: bool) -> Way:
    """The blocks in one order, in segments of one or more."""
    blocks = list(range(BLOCKS))
    if drawn.random() < 0.2:
        drawn.shuffle(blocks)
    segments = []
    kinds = (None, False, True) if reentrant else (None, False)
    while blocks:
        count = drawn.choice((1, 1, 1, 2, 2, 3))
        these, blocks = blocks[:count], blocks[count:]
        columns = [_column(drawn, world_size, free, passes) for _ in these]
        # A backward comes to what is left aside through the output, and a checkpoint leaves it again.
        aside = any(Use.ASIDE in column for column in columns)
        dropped = drawn.random() < 0.3 and not aside
        around = drawn.choice(kinds) if drawn.random() < 0.6 and not aside else None
        segments.append(
            Segment(
                blocks=tuple(these),
                uses=tuple(tuple(column[rank] for column in columns) for rank in range(world_size)),
                drops=tuple(dropped and drawn.random() < 0.5 for _ in range(world_size)),
                around=around,
                each=drawn.choice(kinds) if drawn.random() < 0.3 and not aside else None,
            )
        )
    return tuple(segments)


def _column(drawn: random.Random, world_size: int, free: bool, passes: bool) -> Sequence[Use]:
    """What each rank does with one block."""
    if free and drawn.random() < 0.05:
        return [drawn.choice([use for use in Use if use is not Use.PASS]) for _ in range(world_size)]
    everyone = drawn.choice((*ALIKE, Use.SKIP, Use.TWICE, Use.NO_GRAD, Use.ASIDE, *([Use.PASS] if passes else [])))
    if everyone is Use.PASS:
        return [drawn.choice((Use.USE, Use.PASS)) for _ in range(world_size)]
    if everyone in ALIKE:
        return [drawn.choice(ALIKE) for _ in range(world_size)]
    return [everyone] * world_size
