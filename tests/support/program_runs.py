"""Runs training programs that were drawn: each step is that of unsharded copies, or all ranks are told why not.

The reference is one unsharded copy of the model a rank, that does what its rank does; gradients are averaged over the
copies, and a parameter that no copy used has none. After every step losses, gradients of inputs, every rank's pieces of
gradients and parameters are compared; in the end, whole parameters.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import polyshard
import pytest
import torch
from matrices import exact
from parity import draw, local, one_core, seeded, threaded, units_of
from polyshard import checkpoint
from polyshard.errors import CollectiveTimeoutError, ConfigError, PolyshardError, RankMismatchError
from polyshard.interfaces import PluginContext
from polyshard.optim import step_in_backward
from polyshard.planning import thresholds
from polyshard.planning.device_mesh import mesh_over
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from polyshard_fsdp._common_utils import clean_tensor_name
from polyshard_fsdp.wrap import CustomPolicy
from polyshard_fsdp2 import CPUOffloadPolicy, FSDPModule, fully_shard
from program_models import Extra, Raising, Routed
from random_programs import (
    ONE_REDUCTION,
    Event,
    Program,
    Segment,
    Step,
    Turn,
    Use,
    Way,
    forwards_of,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as activation_checkpoint

MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda parameters, **options: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=0.01, **options
    ),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-2, **options),
    # Makes its state at once, from parameters of any size.
    "adagrad": lambda parameters, **options: torch.optim.Adagrad(parameters, lr=0.1, **options),
}


@dataclass
class Seen:
    """What one rank saw of one step."""

    values: list[torch.Tensor] = field(default_factory=list)
    """Losses, gradients of inputs, norms, outputs, in the order in which they came."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Which of how many parts of each parameter the rank holds, in rows; none of an unsharded model."""


class Run:
    """One rank of a program: its model, sharded or not, and its optimizer."""

    def __init__(self, program: Program, rank: int, model: nn.Module, world: ThreadedWorld | None, folder: Path):
        self.program, self.rank, self.folder = program, rank, folder
        self._start, self._world = model, world
        self._models = 0
        self.model, self.optimizer = self._made(program.settings)
        # What is drawn of a program that all ranks draw alike while it runs.
        self._drawn = random.Random(program.number)
        self.seen = Seen()

    @property
    def sharded(self) -> bool:
        """Whether it is a rank of the sharded model."""
        return self._world is not None

    def _made(self, settings: dict[str, Any]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        self._shards_gradients = settings.get("shard_gradients", False)
        if self._world is None:
            model = copy.deepcopy(self._start)
        else:
            with self._world.lock:
                model = copy.deepcopy(self._start)
            model.pass_by = polyshard.skip
            early = self._optimizers(model) if settings.get("early") else None
            model = self._shard(model, **settings)
            if early is not None:
                return model, early
        return model, self._optimizers(model)

    def _optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        kind, form = self.program.optimizer, self.program.form
        if kind == "muon":
            made: Any = exact(model)
            return list(made.optimizers)
        parameters: list[Any] = list(model.parameters())
        if kind.startswith("flat"):
            parameters = polyshard.flat_parameters(model) if self.sharded else parameters
        elif form == "groups":
            weights = {id(each) for name, each in model.named_parameters() if name.endswith("weight")}
            parameters = [
                {"params": [each for each in parameters if id(each) in weights]},
                {"params": [each for each in parameters if id(each) not in weights], "lr": 3e-3, "weight_decay": 0.1},
                {"params": [], "weight_decay": 0.0},
            ]
        options = {form: True} if form in ("foreach", "fused") else {}
        return [MAKERS[kind.removeprefix("flat ")](parameters, **options)]

    def _shard(self, model: nn.Module, *, front: str, **settings: Any) -> nn.Module:
        assert self._world is not None
        if front == "wrapper":
            return self._wrapped(model, **settings)
        if front == "shard":
            policy: Any = units_of(Raising) if self.program.policy == "blocks" else self.program.policy
            polyshard.shard(model, threaded(self._world, self.rank, policy=policy, **settings))
            # What was one parameter is one.
            assert model.again.weight is model.first.weight
            return model
        inner: Any = {"blocks": Raising, "always": (nn.Linear, Extra), "never": ()}[self.program.policy]
        held = [parameter for module in model.modules() for parameter in module._parameters.values()]
        # What modules share is the outermost one's.
        alone = {id(each) for each in held if sum(other is each for other in held) == 1}
        chosen = [
            each for each in model.modules() if isinstance(each, inner) and alone.issuperset(map(id, each.parameters()))
        ]
        if front == "composed":
            config = threaded(self._world, self.rank, **settings)
            for module in (*reversed(chosen), model):
                polyshard.fully_shard(module, config)
            return model
        context = PluginContext("threaded", torch.device("cpu"))
        mesh = mesh_over(ThreadedCollectives(context, self._world, self.rank), "cpu")
        given: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": settings["reshard_after_forward"],
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if settings["offload"] == "cpu" else None,
        }
        size = 2 if settings["together"] else 1
        lists: list[Any] = [chosen[at : at + size] for at in range(0, len(chosen), size)]
        for modules in (*reversed(lists), [model]):
            fully_shard(modules, **given)
        return model

    def _wrapped(
        self, model: nn.Module, *, strategy: str, inner: str | None, offload: bool, **settings: Any
    ) -> nn.Module:
        assert self._world is not None
        apart = cast("Any", model).blocks[2] if inner else None

        def choose(module: nn.Module) -> bool | dict[str, Any]:
            if module is apart:
                return {"sharding_strategy": ShardingStrategy[inner or strategy]}
            return isinstance(module, Raising) and self.program.policy == "blocks"

        group: Any = ThreadedCollectives(PluginContext("threaded", torch.device("cpu")), self._world, self.rank)
        if "HYBRID" in strategy:
            group = group.partition([[0, 1], [2, 3]]), group.partition([[0, 2], [1, 3]])
        return FullyShardedDataParallel(
            model,
            group,
            ShardingStrategy[strategy],
            CPUOffload(offload),
            CustomPolicy(choose),
            use_orig_params=settings["use_orig_params"],
            backward_prefetch=settings["backward_prefetch"],
            forward_prefetch=settings["forward_prefetch"],
        )

    def _whole(self, writeback: bool = False) -> AbstractContextManager[Any]:
        """In which parameters are whole."""
        if not self.sharded:
            return nullcontext()
        if self.program.wrapped:
            return FullyShardedDataParallel.summon_full_params(self.model, writeback=writeback)
        return polyshard.unsharded(self.model, writeback=writeback)

    def begin(self, index: int, step: Step) -> None:
        """Events, forwards and backwards of one step."""
        self.seen = Seen()
        where = self.program.in_backward if self.sharded else None
        if where == "always":
            self._hand_over(keeps_former=True)
        for event in step.events:
            self._happens(event, index)
        if where == "where it can" and step.turn in ONE_REDUCTION and step.clip is None:
            self._hand_over()
        self._train(index, step)

    def _hand_over(self, **options: Any) -> None:
        """Let the optimizer step in the backward, if its parameters are offloaded, with a copy."""
        with suppress(ConfigError):
            step_in_backward(self.model, self.optimizer[0], **options)

    def _train(self, index: int, step: Step) -> None:
        turn, losses = step.turn, []
        seen = self.seen.values
        for number in range(forwards_of(turn)):
            x = draw(4, 3, turn=3 * index + number, rank=self.rank, requires_grad=step.differentiable)
            shown = [each.grad for each in self._optimized()]
            with self._waiting(turn, index, number):
                if turn is Turn.CHILD:
                    beside = cast("Any", self.model).blocks[1](torch.nn.functional.pad(x, (0, 2))).square().mean()
                loss = self._output(step, number, x).square().mean()
                if turn is Turn.CHILD:
                    loss = loss + beside
                losses.append(loss)
                seen.append(loss.detach())
                if turn is Turn.INSIDE:
                    continue
                if turn is Turn.LOOK:
                    with torch.no_grad():
                        seen.append(self._output(step, number, x))
                if turn is Turn.STUMBLE:
                    self._raise_in(cast("Any", self.model).blocks[2].up, x)
                if turn is Turn.RETAINED:
                    loss.backward(retain_graph=True)
                elif turn is Turn.GRAD_FIRST or (turn is Turn.GRAD_ALONE and number == 0):
                    seen.append(torch.autograd.grad(loss, x, retain_graph=turn is Turn.GRAD_FIRST)[0])
                    if turn is Turn.GRAD_ALONE:
                        continue
                elif turn is Turn.INPUTS and number == 0:
                    loss.backward(inputs=[x])
                    continue
                elif turn is Turn.PARAMETERS:
                    blocks: Any = self.model.blocks
                    given = [self.model.last.weight, blocks[0].up.weight, blocks[1].down.weight, x]
                    polyshard.backward(loss, inputs=[each for each in given if each.requires_grad])  # type: ignore[union-attr]
                    seen.append(x.grad.clone())  # type: ignore[union-attr]
                    continue
                elif turn is Turn.PENALTY:
                    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                    loss = loss + slope.square().sum()
                if turn not in (Turn.APART, Turn.IN_ORDER, Turn.TOGETHER):
                    loss.backward()
            if turn is Turn.TOGETHER and number == 0 and self.program.settings.get("summons"):
                seen += self.whole().values()
            if x.grad is not None:
                seen.append(x.grad.clone())
            if turn is Turn.NO_SYNC and number < 2 and self._hides_sums:
                assert all(each.grad is its for each, its in zip(self._optimized(), shown, strict=True))
        if turn in (Turn.APART, Turn.IN_ORDER, Turn.TOGETHER):
            for loss in _backwards(turn, losses):
                loss.backward()

    def _waiting(self, turn: Turn, index: int, number: int) -> AbstractContextManager[Any]:
        """Under what a microbatch may wait for the last."""
        model: Any = self.model
        if self.sharded and turn is Turn.SOME and isinstance(model, FSDPModule):
            drawn, last = random.Random(3 * index + number), number == 2
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    for call in (
                        module.set_requires_gradient_sync,
                        module.set_requires_all_reduce,
                        module.set_reshard_after_backward,
                    ):
                        call(last or drawn.random() < 0.5, recurse=False)
            model.set_is_last_backward(last or drawn.random() < 0.5)
        elif self.sharded and self.program.wrapped and turn is Turn.NO_SYNC and number < 2:
            return cast("AbstractContextManager[Any]", model.no_sync())
        elif self.sharded and turn in (Turn.NO_SYNC, Turn.REPLICAS) and number < 2:
            return (polyshard.no_sync if turn is Turn.NO_SYNC else polyshard.no_all_reduce)(model)
        return nullcontext()

    def _output(self, step: Step, number: int, x: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        if step.apart:
            # All of them need a graph, with or without one of the input's.
            y = torch.nn.functional.pad(x, (0, 2)).requires_grad_()
            output: torch.Tensor = model.along(y, step.ways[number], self.rank)
        else:
            self._agree(step.ways[number])
            given = x, step.ways[number], self.rank, step.gated[self.rank]
            if step.turn is Turn.AROUND:
                reentrant = step.differentiable
                output = activation_checkpoint(model, *given, use_reentrant=reentrant, preserve_rng_state=False)
            else:
                output = model(*given, inside=step.turn is Turn.INSIDE, nested=step.turn is Turn.NESTED)
        return output

    def _agree(self, way: Way) -> None:
        """Tell other ranks which blocks this one passes by."""
        model: Any = self.model
        if self.sharded and any(Use.PASS in its for segment in way for its in segment.uses):
            uses = [pair for each in way for pair in zip(each.blocks, each.uses[self.rank], strict=True)]
            polyshard.agree_on_use(model, {model.blocks[index]: use is not Use.PASS for index, use in uses})

    def _plain(self, around: bool | None = None) -> Way:
        """All blocks in their order, on all ranks."""
        world_size = self.program.world_size
        return (Segment((0, 1, 2, 3), ((Use.USE,) * 4,) * world_size, (False,) * world_size, around),)

    def _raise_in(self, module: nn.Module, x: torch.Tensor) -> None:
        handle = module.register_forward_hook(_fail)
        with pytest.raises(ArithmeticError):
            self.model(x, self._plain(), self.rank)
        handle.remove()

    def _happens(self, event: Event, index: int) -> None:
        model: Any = self.model
        plain = self._plain()
        x = draw(2, 3, turn=100 + index, rank=self.rank)
        whole = self._whole(writeback=event is Event.WRITE)
        block = self._drawn.randrange(4)
        if event in (Event.EVALUATE, Event.INFER):
            model.eval()
            with torch.no_grad() if event is Event.EVALUATE else torch.inference_mode():
                self.seen.values.append(model(x, plain, self.rank).clone())
            model.train()
        elif event is Event.READ:
            with whole:
                self.seen.values += [each.detach().clone() for each in model.parameters()]
                with torch.no_grad():
                    if not self.program.wrapped:
                        self.seen.values.append(model(x, plain, self.rank))
                    if self.sharded and not self.program.keeps_writes:
                        # Lost.
                        model.blocks[block].up.weight.zero_()
        elif event is Event.WRITE:
            with whole, torch.no_grad():
                model.blocks[block].up.weight.mul_(0.5)
        elif event is Event.CHANGE:
            with torch.no_grad():
                model.blocks[block].up.weight.mul_(0.5)
        elif event in (Event.FREEZE, Event.FREEZE_WHOLE):
            for optimizer in self.optimizer:
                optimizer.zero_grad()
            part = model.blocks[block]
            # One tensor a unit is trained and frozen as a whole.
            if self.program.settings.get("use_orig_params", True) and self._drawn.random() < 0.5:
                part = part.up
            trained = next(part.parameters()).requires_grad
            with whole if event is Event.FREEZE_WHOLE else nullcontext():
                part.requires_grad_(not trained)
        elif event is Event.UNUSED:
            model(x, plain, self.rank)
        elif event is Event.RAISE:
            inside = (model.first, model.blocks[block], model.blocks[block].up, model.last)
            self._raise_in(self._drawn.choice(inside), x)
        elif event is Event.FAIL:
            again = self._drawn.choice((None, False, True))
            if again is None:
                handle = model.blocks[block].register_forward_hook(_fail_in_backward)
            loss = model(x, self._plain(again), self.rank).sum()
            if again is not None:
                # Its recomputation raises.
                handle = model.blocks[block].up.register_forward_hook(_fail)
            with pytest.raises(ArithmeticError):
                loss.backward()
            handle.remove()
            # What it left in ``.grad`` is undefined, unsharded too.
            for optimizer in self.optimizer:
                optimizer.zero_grad()
        elif event is Event.LOCAL and self.sharded:
            model.load_state_dict(model.state_dict())
        elif event is Event.SAVE:
            self._move(index)

    def _move(self, index: int) -> None:
        """Gradients end here; the rest goes on in another model."""
        for optimizer in self.optimizer:
            optimizer.zero_grad()
        if not self.sharded:
            return
        path = checkpoint.save(self.folder, 10 * index + self._models, self.model, self.optimizer)
        before = self.model
        settings = self.program.others[self._models]
        self._models += 1
        self.model, self.optimizer = self._made(settings)
        if self.program.optimizer != "muon" and not self.program.optimizer.startswith("flat"):
            for old, new in zip(before.parameters(), self.model.parameters(), strict=True):
                new.requires_grad_(old.requires_grad)
        checkpoint.load(path, self.model, self.optimizer)

    def clip(self, step: Step) -> None:
        """Clip gradients, ours or torch's, as the step says."""
        if step.clip is None:
            return
        order = self.program.order
        if self.program.wrapped and self.sharded:
            norm = cast("FullyShardedDataParallel", self.model).clip_grad_norm_(0.3, order)
        elif self.sharded and (step.clip == "polyshard" or math.isinf(order)):
            # Torch has no largest element of a rank's part that is empty.
            norm = polyshard.clip_grad_norm_(self.model, 0.3, order)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self._optimized(), 0.3, order)
        # Of no gradient at all, torch says so in float32.
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.seen.values.append(whole.double())

    @property
    def _hides_sums(self) -> bool:
        """Whether no optimizer sees what waits to be reduced. FSDP's wrapper shows it, as does ``shard_gradients``."""
        shows = self.program.wrapped or self._shards_gradients or self.program.optimizer.startswith("flat")
        return self.sharded and not shows

    def _optimized(self) -> list[torch.Tensor]:
        return [p for each in self.optimizer for group in each.param_groups for p in group["params"]]

    def end(self, step: Step) -> Seen:
        """The optimizer's step; what was seen of all."""
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            self.seen.gradients[name] = None if gradient is None else local(gradient.detach()).clone()
        for optimizer in self.optimizer:
            optimizer.step()
            if step.set_to_none is not None:
                optimizer.zero_grad(set_to_none=step.set_to_none)
        if self.sharded and self.program.in_backward == "where it can":
            step_in_backward(self.model, None)
        for name, parameter in self.model.named_parameters():
            self.seen.parameters[name] = local(parameter.detach()).clone()
            if isinstance(parameter, DTensor):
                mesh, placed = parameter.device_mesh, parameter.placements[-1]
                of = mesh.ndim - 1
                self.seen.places[name] = (mesh.get_local_rank(of), mesh.size(of)) if placed.is_shard() else (0, 1)
        if self.program.wrapped and self._drawn.random() < 0.5:
            # A rank has elements of its flat parameters, in no rows.
            self.seen.values += self.whole().values()
        return self.seen

    def whole(self) -> dict[str, torch.Tensor]:
        """Whole parameters."""
        with self._whole():
            return {clean_tensor_name(name): each.detach().clone() for name, each in self.model.named_parameters()}


def _fail(*_: Any) -> None:
    raise ArithmeticError


def _fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(_fail)


def _backwards(turn: Turn, losses: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What is differentiated in turn."""
    if turn is Turn.APART:
        yield from reversed(losses)
    elif turn is Turn.IN_ORDER:
        yield from losses
    else:
        yield torch.stack(losses).sum()


def average(copies: list[nn.Module]) -> None:
    """Give each copy the mean of all copies' gradients; none where none has any."""
    for same in zip(*(each.parameters() for each in copies), strict=True):
        there = [each.grad for each in same if each.grad is not None]
        mean = sum(there, torch.zeros_like(same[0], requires_grad=False)) / len(copies)
        for each in same:
            each.grad = mean.clone() if there else None


def reference(program: Program, start: nn.Module, folder: Path) -> tuple[list[list[Seen]], dict[str, torch.Tensor]]:
    """What unsharded copies see, by step and rank, and their parameters in the end."""
    runs = [Run(program, rank, start, None, folder) for rank in range(program.world_size)]
    seen = []
    for index, step in enumerate(program.steps):
        for run in runs:
            run.begin(index, step)
        average([run.model for run in runs])
        for run in runs:
            run.clip(step)
        seen.append([run.end(step) for run in runs])
    return seen, runs[0].whole()


Outcome = tuple[list[Seen], "dict[str, torch.Tensor] | type[PolyshardError]"]


def train(program: Program, start: nn.Module, rank: int, world: ThreadedWorld, folder: Path) -> Outcome:
    """What this rank saw, and whole parameters, or the kind of error that ended it.

    Not the error itself: it holds frames of checkpoints, which torch can leave on the thread alone that entered them.
    """
    seen: list[Seen] = []
    try:
        run = Run(program, rank, start, world, folder)
        for index, step in enumerate(program.steps):
            run.begin(index, step)
            run.clip(step)
            seen.append(run.end(step))
        return seen, run.whole()
    except PolyshardError as error:
        if not program.free:
            raise
        return seen, type(error)


def compare(program: Program, got: Seen, wanted: Seen, where: str) -> None:
    """One rank's step is that of its copy."""
    rtol = 1e-8 if program.optimizer == "muon" else 1e-10

    def close(mine: Any, theirs: Any, what: str) -> None:
        # Torch's words on what differs take a tenth of the time of a program in which nothing does.
        alike = isinstance(mine, torch.Tensor) and (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if alike and torch.allclose(mine, theirs, rtol=rtol, atol=rtol / 10, equal_nan=True):
            return
        torch.testing.assert_close(
            mine, theirs, rtol=rtol, atol=rtol / 10, equal_nan=True, msg=lambda text: f"{where}, {what}: {text}"
        )

    assert len(got.values) == len(wanted.values), f"{where}: {len(got.values)} values, not {len(wanted.values)}"
    for number, pair in enumerate(zip(got.values, wanted.values, strict=True)):
        close(*pair, f"value {number} of what was computed")
    for name, place in got.places.items():
        mine, theirs = got.gradients[name], wanted.gradients[name]
        assert (mine is None) is (theirs is None), f"{where}: gradient of {name} is {mine}, not {theirs}"
        if mine is not None and theirs is not None:
            close(mine, rows_of(theirs, *place), f"gradient of {name}")
        close(got.parameters[name], rows_of(wanted.parameters[name], *place), f"parameter {name}")


def rows_of(whole: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """The rows that ``Shard(0)`` gives the rank ``part`` of ``parts``."""
    chunks = whole.chunk(parts) if parts > 1 else (whole,)
    return chunks[part] if part < len(chunks) else whole[:0]


def check(program: Program, folder: Path) -> None:
    """Run ``program``."""
    start = seeded(lambda: Routed(program))
    wanted, parameters = reference(program, start, folder)
    with one_core(), pytest.MonkeyPatch.context() as patch:
        for name, size in program.small.items():
            patch.setattr(thresholds, name, size)
        outcomes = ThreadedWorld(program.world_size, timeout=10.0).run(
            lambda rank, world: train(program, start, rank, world, folder), timeout=60.0
        )
    errors = [result for _, result in outcomes if isinstance(result, type)]
    # What was computed before anybody was told is right, too.
    for rank, (seen, _) in enumerate(outcomes):
        for index, values in enumerate(seen):
            compare(program, values, wanted[index][rank], f"step {index}, rank {rank}")
    if errors:
        groups = any(
            "shard_size" in settings or type(settings["reshard_after_forward"]) is int
            for settings in (program.settings, *program.others)
        )
        # Ranks that wait for each other in a circle of groups do not meet in any.
        told = (RankMismatchError, CollectiveTimeoutError) if groups else (RankMismatchError,)
        assert errors[0] in told, errors
        assert errors == [errors[0]] * program.world_size
        assert program.mixed
        return
    rtol = 1e-8 if program.optimizer == "muon" else 1e-10
    for _, whole in outcomes:
        torch.testing.assert_close(whole, parameters, rtol=rtol, atol=rtol / 10, equal_nan=True)
