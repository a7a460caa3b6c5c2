"""The plan of a training step: memory, bytes between ranks, time; and its picture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from polyshard.api import report
from polyshard.config import ShardConfig
from polyshard.errors import ConfigError
from polyshard.inspect import ShardedModel, ShardedUnit
from polyshard.io.progress import report_progress
from torch import nn

from .. import pictures
from ..explaining.explanation import plain
from .recording import Issued, Kind, MemoryTimeline, Operation, Part, Span, Stream, Transfer
from .timing import Device, LinkModel, StepTime, find_links, timed
from .trace import RecordedCollectives, TracedModel, TracedStep
from .workload import BatchMaker, FusedAdamW, OptimizerModel

#: Steps that a search for the largest batch may trace. Peaks grow by straight pieces, so few are needed; where hardly
#: any memory depends on the batch, as many as doubling and halving take.
_MOST_TRACES = 48


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind in a step, added up."""

    operation: Operation
    over: str
    """The dimensions of the mesh along which its ranks lie: ``"dp"``, ``"edp, ep"``; empty without names."""
    ranks: int
    launches: int
    collectives: int
    """A launch may carry several."""
    received_nbytes: int
    """Bytes that reach one rank; as many leave it."""


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """The units over one group of ranks, added up: what one rank has of them."""

    over: str
    """The dimensions of the mesh that they are cut and replicated over, ``"edp and dp_replicate"``; empty where these
    have no names."""
    parts: str
    """The dimensions along which ranks have other parts of their parameters, ``DTensor`` ones: ``"tp"``; else empty."""
    shards: int
    """Ranks that share them."""
    replicas: int
    """Ranks that hold the same shard."""
    units: int
    parameters_nbytes: int
    """Master shards."""
    gradients_nbytes: int
    """Gradient shards."""
    optimizer_nbytes: int
    """The optimizer's state; of one that is run it is known behind a step, so 0 without a batch."""
    gathered_nbytes: int
    """Gather buffers of all of them, of which few are there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Of one rank; others, of a pipeline those of its stages, hold as much, to the padding of the last slices."""

    model: str
    rank: int = 0
    world_size: int
    parameters: int
    """Elements of the whole model."""
    units: int
    padding: int
    """Elements of all units that belong to no parameter."""
    over: Mapping[str, tuple[str, ...]]
    """Names of units by the dimensions of the mesh that they are cut and replicated over, where these have names."""
    groups: tuple[UnitGroup, ...]
    microbatches: int
    """Forwards and backwards of a step."""
    samples: int | None = None
    """In one rank's batch; None where no batch was given, and the forward not run."""
    peak: Mapping[Kind, int]
    """Bytes at the moment with most. Without a batch that of the optimizer's step, at which no activation is alive: the
    least that any batch takes."""
    most: Mapping[Kind, int]
    """The most bytes of each kind, at whatever moment."""
    peak_part: str
    """In which part of the step the peak is."""
    saved_nbytes: int | None = None
    """Activations at the end of the forward."""
    traffic: tuple[Traffic, ...]
    memory_nbytes: int | None
    """The device's memory."""
    largest_samples: int | None = None
    """The largest batch that fits; 0 where none does, None where it was not asked."""
    time: StepTime | None = None
    device: str | None
    links: str | None = None
    notes: tuple[str, ...]
    timeline: MemoryTimeline | None = None

    @property
    def peak_nbytes(self) -> int:
        return sum(self.peak.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the device; None where its memory is not known, or no forward was run."""
        if self.memory_nbytes is None:
            return None
        fits = self.peak_nbytes <= self.memory_nbytes
        return None if fits and self.samples is None else fits

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: bytes and seconds. The timeline is left out."""
        names = [field.name for field in fields(self) if field.name not in ("time", "timeline")]
        time = None
        if self.time is not None:
            shown = ("device_s", "host_s", "launches", "flops", "parts_s", "busy_s", "waited_s", "delayed_s")
            time = {"step_s": self.time.total_s, **{name: plain(getattr(self.time, name)) for name in shown}}
        own = {name: plain(getattr(self, name)) for name in names}
        return {**own, "peak_nbytes": self.peak_nbytes, "fits": self.fits, "time": time}


def plan(
    config: ShardConfig,
    model: nn.Module,
    world_size: int,
    *,
    batch: BatchMaker | None = None,
    samples: int = 1,
    optimizer: OptimizerModel | None = None,
    device: Device | None = None,
    memory_nbytes: int | None = None,
    links: LinkModel | None = None,
    largest: bool = False,
    microbatches: int = 1,
) -> Plan:
    """Plan one training step: forward, backward, ``optimizer.step()``, ``zero_grad()``.

    Args:
        config: as it would be given to ``polyshard.shard``. Its collectives are replaced by pretended ones, which take
            the memory that ``nccl`` takes; its listeners are left out.
        model: on the meta device. It is sharded in place, and of no further use.
        world_size: number of ranks.
        batch: makes the arguments of a forward; None to plan parameters alone.
        samples: the argument of ``batch``: one rank's part.
        optimizer: fused AdamW where None.
        device: gives memory and rates; without one nothing is timed.
        memory_nbytes: bytes that tensors may take, in the place of the memory of ``device``.
        links: those of ``device`` where None.
        largest: also find the largest number of samples that fits.
        microbatches: forwards and backwards of a step, each of ``samples``; only the last one reduces.

    Raises:
        ConfigError: a setting that cannot be planned, or a batch that the model does not take.
        ShardingError: the model cannot be sharded so.
        UnsupportedError: the forward or the backward needs values.
    """
    if samples < 1:
        raise ConfigError(f"samples is {samples}; give 1 or more.")
    name = type(model).__name__
    workspace = 0 if device is None else device.workspace_nbytes
    traced = TracedModel(model, config, world_size, optimizer or FusedAdamW(), workspace, microbatches)
    if memory_nbytes is None and device is not None:
        memory_nbytes = device.memory_nbytes
    if largest and (batch is None or memory_nbytes is None):
        raise ConfigError("The largest batch needs a batch to begin from, and a device or its memory.")
    layout = report(traced.model)
    common: dict[str, Any] = {
        "model": name,
        "world_size": world_size,
        "microbatches": microbatches,
        "parameters": layout.parameters,
        "units": layout.units,
        "padding": layout.padding,
        "over": layout.over,
        "memory_nbytes": memory_nbytes,
        "device": None if device is None else device.name,
    }
    if batch is None:
        return Plan(**common, groups=groups_of(traced, layout.over), **_of_layout(traced))
    report_progress(samples, 0)
    step = traced.step(batch(samples))
    time = None
    if device is not None:
        links = links or links_for(device, world_size)
        time = timed(step.issued, device, links)
    most = None
    if largest and memory_nbytes is not None:
        make = batch

        def peak_of(number: int) -> int:
            return traced.step(make(number)).memory.peak.total

        most = largest_fitting(peak_of, samples, step.memory.peak.total, memory_nbytes)
    return Plan(
        **common,
        groups=groups_of(traced, layout.over),
        samples=samples,
        largest_samples=most,
        time=time,
        links=None if links is None else f"{links.name}: {links.source}",
        notes=tuple(traced.notes),
        **of_step(step),
    )


def links_for(device: Device, world_size: int) -> LinkModel:
    """Those of ``device`` for a job of so many ranks."""
    one_host = world_size <= find_links(device.links).ranks_per_host
    return find_links(device.links if one_host else device.links_between)


def of_step(step: TracedStep) -> dict[str, Any]:
    """The values of a plan that follow from a step alone."""
    peak = step.memory.peak
    return {
        "peak": dict(peak.nbytes),
        "most": {kind: max(moment.nbytes[kind] for moment in step.memory.moments) for kind in Kind},
        "peak_part": peak.part.value,
        "saved_nbytes": step.memory.saved_nbytes,
        "traffic": _traffic_of_step(step.issued),
        "timeline": step.memory,
    }


def _of_layout(traced: TracedModel) -> dict[str, Any]:
    """The values of a plan whose forward is not run."""
    layout, standing = report(traced.model), traced.standing_nbytes
    peak = {
        **dict.fromkeys(Kind, 0),
        Kind.PARAMETERS: layout.master_nbytes + layout.beside_nbytes,
        Kind.GRADIENTS: layout.gradient_nbytes,
        Kind.OPTIMIZER: standing[Kind.OPTIMIZER],
        Kind.BUFFERS: standing[Kind.BUFFERS],
    }
    note = (
        "No batch, so no forward was run: the peak is that of the optimizer's step, activations are not counted, and "
        "nothing is timed."
    )
    return {
        "peak": peak,
        "most": {**peak, Kind.GATHERED: layout.gathered_nbytes, Kind.REDUCTION: layout.reduction_nbytes},
        "peak_part": Part.OPTIMIZER.value,
        "traffic": _traffic_of_layout(traced.sharded),
        "notes": (*traced.notes, note),
    }


def largest_fitting(peak_of: Callable[[int], int], samples: int, peak: int, limit: int) -> int:
    """The largest number of samples whose peak is at most ``limit``; 0 where one does not fit.

    Peaks grow with samples, by pieces that are straight: what is alive at one moment is a sum of constants and of
    tensors of so many samples. A line through two of them leads to the next to try. The answer was tried, and so was
    one more, but where the search took too many steps.

    Args:
        peak_of: bytes for a number of samples.
        samples: one that was tried, with ``peak``.
        limit: bytes.
    """
    known = {samples: peak}

    def tried(number: int) -> int:
        if number not in known:
            report_progress(number, 0)
            known[number] = peak_of(number)
        return known[number]

    if tried(1) > limit:
        return 0
    if samples == 1:
        tried(2)
    for attempt in range(_MOST_TRACES):
        fitting = max(number for number in known if known[number] <= limit)
        above = [number for number in known if known[number] > limit]
        if above and min(above) == fitting + 1:
            return fitting
        # Where pieces bend, a line falls short each time; halving what is left does not.
        halves = bool(above) and attempt % 2 == 1
        tried((fitting + min(above)) // 2 if halves else _next_to_try(known, fitting, min(above, default=None), limit))
    return max(number for number in known if known[number] <= limit)


def _next_to_try(known: Mapping[int, int], fitting: int, above: int | None, limit: int) -> int:
    """Where the line through the largest that fits and a neighbour crosses ``limit``, between both bounds."""
    other = above if above is not None else max((number for number in known if number < fitting), default=fitting + 1)
    slope = (known[other] - known[fitting]) / (other - fitting) if other in known else 0.0
    if slope <= 0:
        return fitting * 2
    guess = fitting + int((limit - known[fitting]) / slope)
    # One more than a guess that fits exactly shows whether it is the last.
    guess = max(guess, fitting + 1)
    return guess if above is None else min(guess, above - 1)


def _traffic_of_step(issued: Iterable[Issued]) -> tuple[Traffic, ...]:
    """The collectives of a step, by operation and group of ranks."""
    found: dict[tuple[Operation, str, int], Traffic] = {}
    for each in issued:
        if isinstance(each, Transfer):
            key = each.operation, ", ".join(each.span.over), each.span.ranks
            before = found.get(key, Traffic(*key, 0, 0, 0))
            found[key] = Traffic(
                *key,
                before.launches + 1,
                before.collectives + each.members,
                before.received_nbytes + each.received_nbytes,
            )
    return tuple(found.values())


def _traffic_of_layout(model: ShardedModel) -> tuple[Traffic, ...]:
    """The same, read off the units: for models whose forward is not run.

    Each unit is gathered for forward and, where it was released, for backward; each trained one is reduced. Only a
    forward would show which unit ran last, and may be kept, and that an embedding is not gathered twice. Launches are
    counted as if nothing travelled together.
    """
    rows: list[Traffic] = []
    for operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.ALL_REDUCE, Operation.ALL_TO_ALL):
        carried: dict[tuple[str, int], list[int]] = {}
        for unit in model.units:
            for nbytes, span in _carried(model, unit, operation):
                carried.setdefault((", ".join(span.over), span.ranks), []).append(
                    operation.received_nbytes(nbytes, span.ranks)
                )
        rows += [
            Traffic(operation, *group, len(received), len(received), sum(received))
            for group, received in carried.items()
        ]
    return tuple(rows)


def _carried(model: ShardedModel, unit: ShardedUnit, operation: Operation) -> list[tuple[int, Span]]:
    """Whole bytes and ranks of each collective of ``operation`` that ``unit`` takes part in."""
    if operation is Operation.ALL_GATHER:
        found: list[tuple[int, object]] = [(unit.gathered_nbytes, among) for among in model.gathers_of(unit)]
    elif operation is Operation.REDUCE_SCATTER:
        found = [(unit.reduction_nbytes, unit.reduction)]
    elif operation is Operation.ALL_TO_ALL:
        # Of what it has several shards of, one is its own.
        shards = unit.gathered_nbytes // unit.layout.world_size, unit.reduced_nbytes
        found = [((unit.rows - 1) * nbytes, unit.shard) for nbytes in shards]
    else:
        found = [(unit.reduction_nbytes if unit.shard is None else unit.reduced_nbytes, unit.replicate)]
    return [(nbytes, among.span) for nbytes, among in found if nbytes and isinstance(among, RecordedCollectives)]


def groups_of(traced: TracedModel, over: Mapping[str, tuple[str, ...]]) -> tuple[UnitGroup, ...]:
    """The units by group; ``over``: their names by dimensions."""
    labels = {name: dimensions for dimensions, names in over.items() for name in names}
    found: dict[tuple[str, str, int, int], list[ShardedUnit]] = {}
    for unit in traced.sharded.units:
        meshes = [each.part.mesh for each in unit.parameters if each.part is not None]
        parts = dict.fromkeys(name for mesh in meshes for name in mesh.mesh_dim_names or ())
        sizes = [1 if group is None else group.world_size for group in (unit.shard, unit.replicate)]
        found.setdefault((labels.get(unit.name, ""), ", ".join(parts), sizes[0], sizes[1]), []).append(unit)
    return tuple(
        UnitGroup(
            *group,
            units=len(units),
            parameters_nbytes=sum(each.nbytes for unit in units for each in (*unit.values, *unit.attribute_tensors)),
            gradients_nbytes=sum(unit.layout.shard_numel * unit.grad_dtype.itemsize for unit in units if unit.trained),
            optimizer_nbytes=sum(traced.state_nbytes(unit) for unit in units),
            gathered_nbytes=sum(unit.gathered_nbytes for unit in units),
        )
        for group, units in found.items()
    )


_GIB = 2**30
#: Of each kind, in the order in which they are stacked.
_COLOURS = {
    Kind.PARAMETERS: "#4c72b0",
    Kind.OPTIMIZER: "#8172b3",
    Kind.GRADIENTS: "#55a868",
    Kind.BUFFERS: "#8c8c8c",
    Kind.ACTIVATIONS: "#ccb974",
    Kind.TEMPORARIES: "#dd8452",
    Kind.GATHERED: "#64b5cd",
    Kind.REDUCTION: "#c44e52",
}
_STREAMS = {Stream.COMPUTE: "#8c8c8c", Stream.GATHER: "#64b5cd", Stream.REDUCE: "#c44e52"}


def draw(plan: Plan, file: str | Path) -> None:
    """Write ``plan`` to ``file``, whose ending says how: ``.svg``, ``.png``, ``.pdf``.

    Memory of each kind lies on what stands throughout; below it are the streams where the step was timed.

    Raises ConfigError: the plan has no batch, matplotlib is not installed, or it cannot write that.
    """
    if plan.timeline is None:
        raise ConfigError("A plan without a batch has no step to draw. Give --batch.")
    figure = pictures.blank(9, 5.5 if plan.time else 4)
    above, *below = figure.subplots(
        2 if plan.time else 1, 1, sharex=bool(plan.time), height_ratios=(4, 1)[: 1 + bool(plan.time)], squeeze=False
    )[:, 0]
    positions = _draw_memory(above, plan)
    if below and plan.time is not None:
        _draw_streams(below[0], plan)
        below[0].set_xlabel("ms")
    else:
        above.set_xlabel("operations of the step, in order")
    peak = plan.timeline.peak
    x = positions[plan.timeline.moments.index(peak)]
    above.annotate(f"{peak.total / _GIB:.2f} GiB", (x, peak.total / _GIB), fontsize=8, ha="center", va="bottom")
    pictures.write(figure, file)


def _draw_memory(axes: Any, plan: Plan) -> list[float]:
    """Stack the kinds; returns where each moment lies."""
    assert plan.timeline is not None
    moments = plan.timeline.moments
    positions = _positions(plan)
    kinds = [kind for kind in _COLOURS if plan.most[kind]]
    heights = [[moment.nbytes[kind] / _GIB for moment in moments] for kind in kinds]
    axes.stackplot(
        positions, heights, labels=[kind.value for kind in kinds], colors=[_COLOURS[k] for k in kinds], step="post"
    )
    if plan.memory_nbytes is not None and plan.memory_nbytes < 1.5 * plan.peak_nbytes:
        axes.axhline(plan.memory_nbytes / _GIB, color="black", linewidth=0.8, linestyle="--")
    for part in Part:
        first = next((x for x, moment in zip(positions, moments, strict=True) if moment.part is part), None)
        if first is not None and part is not Part.FORWARD:
            axes.axvline(first, color="black", linewidth=0.5, linestyle=":")
    axes.set_ylabel("GiB")
    axes.set_title(f"{plan.model}, rank {plan.rank} of {plan.world_size}", fontsize=10)
    axes.margins(x=0)
    axes.set_ylim(0, 1.12 * plan.peak_nbytes / _GIB)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return positions


def _positions(plan: Plan) -> list[float]:
    """Milliseconds of each moment where the step was timed, else how much was issued before it."""
    assert plan.timeline is not None
    moments = plan.timeline.moments
    if plan.time is None:
        return [float(moment.position) for moment in moments]
    # A moment is behind the last of compute's kernels that was issued before it.
    ends = [(index, each.end_s * 1e3) for index, each in plan.time.issued_at if each.stream is Stream.COMPUTE]
    order = [index for index, _ in ends]
    found = [bisect_right(order, moment.position - 1) for moment in moments]
    return [ends[each - 1][1] if each else 0.0 for each in found]


def _draw_streams(axes: Any, plan: Plan) -> None:
    assert plan.time is not None
    for row, stream in enumerate(Stream):
        bars = [
            (each.begin_s * 1e3, (each.end_s - each.begin_s) * 1e3)
            for _, each in plan.time.issued_at
            if each.stream is stream
        ]
        axes.broken_barh(bars, (-row - 0.4, 0.8), color=_STREAMS[stream], linewidth=0)
    axes.set_yticks([-row for row in range(len(Stream))], [stream.value for stream in Stream])
    axes.tick_params(axis="y", length=0)
