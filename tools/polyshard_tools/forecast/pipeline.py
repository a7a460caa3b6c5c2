"""The plan of a pipeline: what each of its ranks holds and receives while a schedule runs, and how long it idles.

[Note: what is traced]
Ranks run their stages in the order of torch's schedules, each by the engine on the meta device, in a ``PipelineStage``
of one rank that sends nothing. What would arrive lies in buffers that are there throughout, one for each microbatch, as
torch makes them. Of ranks whose stages are alike the first is traced: it has as many microbatches in flight as others,
or more.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from polyshard.api import report
from polyshard.config import ShardConfig
from polyshard.errors import ConfigError
from polyshard.io.progress import report_progress
from polyshard.pipelining import Gathers, PipelineStage
from torch import nn

from .plan import Plan, groups_of, largest_fitting, links_for, of_step
from .recording import Kind, Operation, Span
from .timing import Device, LinkModel, StepTime, timed
from .trace import TracedModel, TracedStep
from .workload import Batch, BatchMaker, FusedAdamW, OptimizerModel

_ALONG = "pp"
_META = torch.device("meta")


class Order(enum.Enum):
    """In which order a rank runs forwards and backwards."""

    GPIPE = "gpipe"
    """All forwards, then all backwards."""
    ONE_F_ONE_B = "1f1b"
    """As many forwards as there are stages from this one on, then a backward for each forward."""
    INTERLEAVED_1F1B = "interleaved_1f1b"
    """The same over several stages of each rank."""


@dataclass(frozen=True)
class Pipeline:
    """Stages over ranks, and the schedule of their microbatches.

    Raises:
        ConfigError: torch's schedule of that name takes no such numbers.
    """

    order: Order
    ranks: int
    microbatches: int
    each: int = 1
    """Stages of a rank."""
    gathers: Gathers = Gathers.SCHEDULE

    def __post_init__(self) -> None:
        numbers = f"{self.ranks} ranks with {self.each} stage(s) each, and {self.microbatches} microbatches"
        if min(self.ranks - 1, self.each, self.microbatches) < 1:
            raise ConfigError(f"A pipeline of {numbers} is none. Give two ranks or more, and 1 or more of the others.")
        if (self.order is Order.INTERLEAVED_1F1B) != (self.each > 1):
            raise ConfigError(f"{numbers}: 'interleaved_1f1b', and no other schedule, has several stages a rank.")
        if self.order is Order.ONE_F_ONE_B and self.microbatches < self.ranks:
            raise ConfigError(f"{numbers}: '1f1b' needs as many microbatches as stages, or more.")
        if self.order is Order.INTERLEAVED_1F1B and self.microbatches % self.ranks:
            raise ConfigError(f"{numbers}: give 'interleaved_1f1b' a multiple of the ranks.")

    @property
    def stages(self) -> int:
        return self.ranks * self.each

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank waits for others, where all stages take as long."""
        return (self.ranks - 1) / (self.each * self.microbatches + self.ranks - 1)

    def numbers(self, rank: int) -> range:
        return range(rank, self.stages, self.ranks)

    def in_flight(self, rank: int) -> int:
        """Forwards of ``rank`` that wait for their backward, at most."""
        total = self.microbatches * self.each
        if self.order is Order.GPIPE:
            return total
        behind = self.ranks - 1 - rank
        return min(total, behind + 1 if self.each == 1 else (self.each - 1) * self.ranks + 2 * behind + 1)

    def steps(self, rank: int) -> Iterator[tuple[bool, int]]:
        """In order, whether ``rank`` runs a forward, and of which of its stages."""
        total = self.microbatches * self.each
        forward = backward = 0
        while backward < total:
            goes_on = forward < total and forward - backward < self.in_flight(rank)
            done = forward if goes_on else backward
            local = done // self.ranks % self.each
            yield goes_on, local if goes_on else self.each - 1 - local
            forward, backward = forward + goes_on, backward + (not goes_on)


@dataclass(frozen=True)
class RankPlan:
    """One rank of a pipeline, and those that are like it."""

    ranks: tuple[int, ...]
    """Along the pipeline; the first one was traced."""
    stages: tuple[int, ...]
    """Of the first one."""
    in_flight: int
    plan: Plan


@dataclass(frozen=True)
class PipelineTime:
    """The time of a step, in which ranks wait for each other: that of the slowest rank and the bubble around it."""

    step_s: float
    """Until the last rank has taken its optimizer's step; the host's time where that is longer."""
    device_s: float
    """The same on devices that never wait for the host."""
    waits: tuple[float, ...]
    """By rank along the pipeline, the share of ``device_s`` in which it has nothing to run."""


@dataclass(frozen=True)
class PipelinePlan:
    pipeline: Pipeline
    ranks: tuple[RankPlan, ...]
    """The time of each is its own: what it receives from other ranks counts, and waits until that is sent do not."""

    @property
    def worst(self) -> Plan:
        """That of the rank which needs most memory."""
        return max((each.plan for each in self.ranks), key=lambda plan: plan.peak_nbytes)

    @property
    def time(self) -> PipelineTime | None:
        own = {rank: each.plan.time for each in self.ranks for rank in each.ranks}
        found = [own[rank] for rank in range(self.pipeline.ranks)]
        times = [each for each in found if each is not None]
        if len(times) < len(found):
            return None
        device_s = max(each.device_s for each in times) / (1 - self.pipeline.bubble)
        step_s = max(device_s, *(each.host_s for each in times))
        return PipelineTime(step_s, device_s, tuple(1 - each.device_s / device_s for each in times))

    def to_dict(self) -> dict[str, Any]:
        pipeline = self.pipeline
        return {
            "schedule": pipeline.order.value,
            "stages": pipeline.stages,
            "microbatches": pipeline.microbatches,
            "gathers": pipeline.gathers.value,
            "bubble": pipeline.bubble,
            "time": None if self.time is None else asdict(self.time),
            "ranks": [
                {
                    "ranks": list(each.ranks),
                    "stages": list(each.stages),
                    "in_flight": each.in_flight,
                    **each.plan.to_dict(),
                }
                for each in self.ranks
            ],
        }


#: Makes a stage on the meta device of its number and how many there are.
StageMaker = Callable[[int, int], nn.Module]


def plan_pipeline(
    config: ShardConfig,
    stage_of: StageMaker,
    world_size: int,
    pipeline: Pipeline,
    *,
    batch: BatchMaker,
    samples: int = 1,
    optimizer: Callable[[], OptimizerModel] = FusedAdamW,
    device: Device | None = None,
    memory_nbytes: int | None = None,
    links: LinkModel | None = None,
    largest: bool = False,
) -> PipelinePlan:
    """Plan one step of a pipeline: its schedule, ``optimizer.step()``, ``zero_grad()``.

    Args:
        config: over the ranks of one stage, all of them alike.
        stage_of: makes a stage. The first one takes the positional arguments of ``batch``; others one tensor, which the
            stage before returns; the last one the keyword arguments as well, and returns the loss.
        world_size: number of ranks of all stages.
        pipeline: the schedule.
        batch: makes the arguments of a microbatch.
        samples: its argument: one rank's part of a microbatch.
        optimizer: makes that of one stage.
        device: as in ``plan``.
        memory_nbytes: as in ``plan``.
        links: as in ``plan``; ranks of one stage are neighbours.
        largest: also find the largest number of samples that fits.

    Raises what ``plan`` does.
    """
    if world_size % pipeline.ranks:
        raise ConfigError(
            f"world_size is {world_size}, which {pipeline.ranks} ranks of a pipeline do not divide. Give a multiple."
        )
    if memory_nbytes is None and device is not None:
        memory_nbytes = device.memory_nbytes
    if largest and memory_nbytes is None:
        raise ConfigError("The largest batch needs a device or its memory.")
    report_progress(samples, 0)
    sharing = world_size // pipeline.ranks
    chain = _Chain(config, stage_of, sharing, pipeline.stages, batch)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank in range(pipeline.ranks):
        alike.setdefault(tuple(map(chain.likeness, pipeline.numbers(rank))), []).append(rank)
    workspace = 0 if device is None else device.workspace_nbytes
    traced = [
        _TracedRank(pipeline, ranks[0], config, stage_of, sharing, optimizer, workspace) for ranks in alike.values()
    ]
    steps = [each.step(chain, samples) for each in traced]
    times: list[StepTime] | None = None
    if device is not None:
        links = links or links_for(device, world_size)
        times = [timed(step.issued, device, links) for step in steps]
    most = None
    if memory_nbytes is not None and largest:

        def peak_of(number: int) -> int:
            return max(each.step(chain, number).memory.peak.total for each in traced)

        most = largest_fitting(peak_of, samples, max(each.memory.peak.total for each in steps), memory_nbytes)
    common: dict[str, Any] = {
        "world_size": world_size,
        "samples": samples,
        "memory_nbytes": memory_nbytes,
        "largest_samples": most,
        "device": None if device is None else device.name,
        "links": None if links is None or device is None else f"{links.name}: {links.source}",
    }
    plans = tuple(
        RankPlan(
            tuple(ranks),
            tuple(pipeline.numbers(each.rank)),
            pipeline.in_flight(each.rank),
            each.plan(step, time=None if times is None else times[index], **common),
        )
        for index, (ranks, each, step) in enumerate(zip(alike.values(), traced, steps, strict=True))
    )
    return PipelinePlan(pipeline, plans)


class _Chain:
    """What travels between stages: a tensor like it, for any number of samples."""

    def __init__(self, config: ShardConfig, stage_of: StageMaker, sharing: int, stages: int, batch: BatchMaker) -> None:
        self.batch = batch
        self._likenesses: list[tuple[Any, ...]] = []
        self._models: dict[tuple[Any, ...], TracedModel] = {}
        for number in range(stages):
            model = stage_of(number, stages)
            shapes = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in model.parameters())
            likeness = type(model), shapes, number == 0, number == stages - 1
            self._likenesses.append(likeness)
            if likeness not in self._models:
                self._models[likeness] = TracedModel(model, config, sharing, FusedAdamW())

    def likeness(self, number: int) -> tuple[Any, ...]:
        """Equal for stages that are alike."""
        return self._likenesses[number]

    def inputs(self, samples: int) -> list[tuple[Any, ...]]:
        """The positional arguments of each stage."""
        found: list[tuple[Any, ...]] = [self.batch(samples).args]
        known: dict[tuple[Any, ...], torch.Tensor] = {}
        for likeness in self._likenesses[:-1]:
            given = found[-1]
            key = likeness, *((tuple(each.shape), each.dtype) for each in given if isinstance(each, torch.Tensor))
            if key not in known:
                with torch.no_grad():
                    known[key] = self._models[likeness].forward(Batch(given), self._models[likeness].model, ends=False)
            found.append((known[key],))
        return found


@dataclass
class _Part:
    """One stage of a traced rank."""

    number: int
    model: TracedModel
    stage: PipelineStage
    #: Of each microbatch: what arrives from the stage before, and gradients from the one behind.
    arriving: Sequence[torch.Tensor] = ()
    returning: Sequence[torch.Tensor] = ()


class _TracedRank:
    """The stages of one rank, in the order of its schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        rank: int,
        config: ShardConfig,
        stage_of: StageMaker,
        sharing: int,
        optimizer: Callable[[], OptimizerModel],
        workspace_nbytes: int,
    ) -> None:
        self.rank = rank
        self._pipeline = pipeline
        self._sharing = sharing
        models: list[TracedModel] = []
        for number in pipeline.numbers(rank):
            module, first = stage_of(number, pipeline.stages), models[0] if models else None
            # The memory of libraries is one rank's.
            own = workspace_nbytes if first is None else 0
            models.append(TracedModel(module, config, sharing, optimizer(), own, beside=first))
        # Behind all of them: in a job of one rank they would look for the others.
        with _group_of_one() as group:
            self._parts = [
                _Part(number, model, PipelineStage(model.model, 0, 1, _META, group=group, gathers=pipeline.gathers))
                for number, model in zip(pipeline.numbers(rank), models, strict=True)
            ]

    @cached_property
    def _neighbours(self) -> Span:
        return Span((0, self._sharing), (_ALONG,))

    def step(self, chain: _Chain, samples: int) -> TracedStep:
        """A step whose microbatches are of so many ``samples``."""
        given, batch = chain.inputs(samples), chain.batch(samples)
        first, pipeline = self._parts[0].model, self._pipeline
        for part in self._parts:
            part.arriving = part.returning = ()
            if part.number > 0:
                part.arriving = [torch.empty_like(given[part.number][0]) for _ in range(pipeline.microbatches)]
            if part.number < pipeline.stages - 1:
                part.returning = [torch.empty_like(given[part.number + 1][0]) for _ in range(pipeline.microbatches)]
            first.ledger.see([*part.arriving, *part.returning], Kind.BUFFERS)
        own = [each for each in (*given[0], *batch.kwargs.values()) if isinstance(each, torch.Tensor)]
        first.ledger.see(own, Kind.BUFFERS)
        standing = {
            kind: sum(part.model.standing_nbytes.get(kind, 0) for part in self._parts)
            for kind in (Kind.OPTIMIZER, Kind.BUFFERS)
        }
        return first.record(lambda: self._once(given[0], batch), standing)

    def _once(self, first: tuple[Any, ...], batch: Batch) -> None:
        waiting: list[deque[tuple[torch.Tensor, torch.Tensor | None]]] = [deque() for _ in self._parts]
        counts = [[0, 0] for _ in self._parts]
        for part in self._parts:
            part.stage.has_backward = True
            part.stage.clear_runtime_states()
        for forwards, local in self._pipeline.steps(self.rank):
            part, index = self._parts[local], counts[local][forwards]
            counts[local][forwards] += 1
            if forwards:
                waiting[local].append(self._forward(part, index, first, batch))
            else:
                output, given = waiting[local].popleft()
                self._backward(part, index, output, given)
                del output, given
                part.model.ledger.look_again()
        for part in self._parts:
            part.stage.perform_reduce_grad(self._pipeline.microbatches)
        for part in self._parts:
            part.model.update()

    def _forward(
        self, part: _Part, index: int, first: tuple[Any, ...], batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What microbatch ``index`` comes to, and what it is made from where that gets a gradient."""
        recorder, ends = part.model.recorder, part.number == self._pipeline.stages - 1
        given: torch.Tensor | None = None
        if part.number > 0:
            recorder.transfer(Operation.RECEIVE, part.arriving[index].nbytes, self._neighbours, 1)
            given = part.arriving[index].detach().requires_grad_(part.arriving[index].is_floating_point())
        inputs = Batch(first if given is None else (given,), batch.kwargs if ends else {})
        return part.model.forward(inputs, part.stage.forward_maybe_with_nosync, ends=ends), given

    def _backward(self, part: _Part, index: int, output: torch.Tensor, given: torch.Tensor | None) -> None:
        asked: dict[str, Any] = {"stage_output": output, "output_grads": None, "input_values": []}
        if given is not None:
            asked["input_values"] = [given]
        if part.returning:
            gradient = part.returning[index]
            part.model.recorder.transfer(Operation.RECEIVE, gradient.nbytes, self._neighbours, 1)
            asked |= {"stage_output": (output,), "output_grads": (gradient,)}

        def call() -> None:
            try:
                part.stage.backward_maybe_with_nosync("full", asked)
            except RuntimeError as error:
                # Torch's stages wrap what a backward raised.
                raise error.__cause__ or error from None

        part.model.backward(call)

    def plan(self, step: TracedStep, **common: Any) -> Plan:
        """That of this rank's step; ``common``: what all ranks have alike, and its time."""
        layouts = [report(part.model.model) for part in self._parts]
        numbers = ", ".join(str(part.number) for part in self._parts)
        over: dict[str, tuple[str, ...]] = {}
        for part, layout in zip(self._parts, layouts, strict=True):
            # Stages may have units of one name.
            mark = f"{part.number}: " if len(self._parts) > 1 else ""
            for dimensions, units in layout.over.items():
                over[dimensions] = (*over.get(dimensions, ()), *(f"{mark}{unit}" for unit in units))
        return Plan(
            model=f"{type(self._parts[0].model.model).__name__} (stage {numbers} of {self._pipeline.stages})",
            rank=self.rank * self._sharing,
            parameters=sum(each.parameters for each in layouts),
            units=sum(each.units for each in layouts),
            padding=sum(each.padding for each in layouts),
            over=over,
            groups=tuple(
                group
                for part, each in zip(self._parts, layouts, strict=True)
                for group in groups_of(part.model, each.over)
            ),
            microbatches=self._pipeline.microbatches,
            notes=tuple(dict.fromkeys(note for part in self._parts for note in part.model.notes)),
            **of_step(step),
            **common,
        )


@contextmanager
def _group_of_one() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone, for a stage that sends nothing."""
    began = not dist.is_initialized()
    if began:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        assert isinstance(group, dist.ProcessGroup)
        yield group
    finally:
        if began:
            dist.destroy_process_group()
