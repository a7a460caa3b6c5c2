"""What a training step would take: memory, bytes between ranks, time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config import ShardConfig
from ..errors import ConfigError
from .batch import BatchMaker
from .device import Device
from .links import LinkModel
from .memory import Kind, MemoryTimeline
from .named_links import find_links
from .optimizers import FusedAdamW, OptimizerModel
from .recording import Part
from .timeline import StepTime, timed
from .trace import TracedModel
from .wire import Wire, wire_of_layout, wire_of_step

#: Steps that a search for the largest batch may trace. Peaks grow by straight pieces, so few are needed; where hardly
#: any memory depends on the batch, as many as doubling and halving take.
_MOST_TRACES = 48


@dataclass(frozen=True, slots=True)
class Plan:
    """Of rank 0; other ranks hold as much, to the padding of the last slices."""

    model: str
    world_size: int
    parameters: int
    """Elements of the whole model."""
    units: int
    padding: int
    """Elements of all units that belong to no parameter."""
    microbatches: int
    """Forwards and backwards of a step."""
    samples: int | None
    """In one rank's batch; None where no batch was given, and the forward not run."""
    peak: Mapping[Kind, int]
    """Bytes at the moment with most. Without a batch that of the optimizer's step, at which no activation is alive: the
    least that any batch takes."""
    most: Mapping[Kind, int]
    """The most bytes of each kind, at whatever moment."""
    peak_part: str | None
    """In which part of the step the peak is."""
    saved_nbytes: int | None
    """Activations at the end of the forward."""
    wire: tuple[Wire, ...]
    memory_nbytes: int | None
    """What the device has."""
    largest_samples: int | None
    """The largest batch that fits; 0 where none does, None where it was not asked."""
    time: StepTime | None
    device: str | None
    links: str | None
    notes: tuple[str, ...]
    timeline: MemoryTimeline | None

    @property
    def peak_nbytes(self) -> int:
        """All kinds together."""
        return sum(self.peak.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the device; None where its memory is not known, or what a forward would take."""
        if self.memory_nbytes is None:
            return None
        fits = self.peak_nbytes <= self.memory_nbytes
        return None if fits and self.samples is None else fits

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: bytes and seconds."""
        time = self.time
        return {
            "model": self.model,
            "world_size": self.world_size,
            "parameters": self.parameters,
            "units": self.units,
            "padding": self.padding,
            "microbatches": self.microbatches,
            "samples": self.samples,
            "peak_nbytes": self.peak_nbytes,
            "peak": {kind.value: nbytes for kind, nbytes in self.peak.items()},
            "most": {kind.value: nbytes for kind, nbytes in self.most.items()},
            "peak_part": self.peak_part,
            "saved_nbytes": self.saved_nbytes,
            "wire": [
                {
                    "operation": row.operation.value,
                    "ranks": row.ranks,
                    "launches": row.launches,
                    "collectives": row.collectives,
                    "received_nbytes": row.received_nbytes,
                }
                for row in self.wire
            ],
            "memory_nbytes": self.memory_nbytes,
            "fits": self.fits,
            "largest_samples": self.largest_samples,
            "device": self.device,
            "links": self.links,
            "time": None
            if time is None
            else {
                "step_s": time.total_s,
                "device_s": time.device_s,
                "host_s": time.host_s,
                "launches": time.launches,
                "flops": time.flops,
                "parts_s": {part.value: seconds for part, seconds in time.parts_s.items()},
                "busy_s": {stream.value: seconds for stream, seconds in time.busy_s.items()},
                "waited_s": time.waited_s,
                "delayed_s": time.delayed_s,
            },
            "notes": list(self.notes),
        }


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
        samples: what ``batch`` is called with: one rank's part.
        optimizer: fused AdamW where None.
        device: gives memory and rates; without one nothing is timed.
        memory_nbytes: what tensors may take, in the place of what ``device`` has.
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
    traced = TracedModel(
        model,
        config,
        world_size,
        optimizer or FusedAdamW(),
        0 if device is None else device.workspace_nbytes,
        microbatches,
    )
    if memory_nbytes is None and device is not None:
        memory_nbytes = device.memory_nbytes
    if largest and (batch is None or memory_nbytes is None):
        raise ConfigError("The largest batch needs a batch to begin from, and a device or its memory.")
    report = traced.report
    common: dict[str, Any] = {
        "model": name,
        "world_size": world_size,
        "microbatches": microbatches,
        "parameters": report.parameters,
        "units": report.units,
        "padding": report.padding,
        "memory_nbytes": memory_nbytes,
        "device": None if device is None else device.name,
    }
    if batch is None:
        return _of_layout(traced, common)
    step = traced.step(batch(samples))
    time = None
    if device is not None:
        if links is None:
            one_host = world_size <= find_links(device.links).ranks_per_host
            links = find_links(device.links if one_host else device.links_between)
        time = timed(step.issued, device, links)
    most = None
    if largest and memory_nbytes is not None:
        make = batch

        def peak_of(number: int) -> int:
            return traced.step(make(number)).memory.peak.total

        most = largest_fitting(peak_of, samples, step.memory.peak.total, memory_nbytes)
    peak = step.memory.peak
    return Plan(
        **common,
        samples=samples,
        peak=dict(peak.nbytes),
        most={kind: max(moment.nbytes[kind] for moment in step.memory.moments) for kind in Kind},
        peak_part=peak.part.value,
        saved_nbytes=step.memory.saved_nbytes,
        wire=wire_of_step(step.issued),
        largest_samples=most,
        time=time,
        links=None if links is None else f"{links.name}: {links.source}",
        notes=tuple(traced.notes),
        timeline=step.memory,
    )


def _of_layout(traced: TracedModel, common: Mapping[str, Any]) -> Plan:
    report = traced.report
    standing = traced.standing_nbytes
    peak = {
        **dict.fromkeys(Kind, 0),
        Kind.PARAMETERS: report.master_nbytes,
        Kind.GRADIENTS: report.gradient_nbytes,
        Kind.OPTIMIZER: standing[Kind.OPTIMIZER],
        Kind.BUFFERS: standing[Kind.BUFFERS],
    }
    most = {**peak, Kind.GATHERED: report.gathered_nbytes, Kind.REDUCTION: report.reduction_nbytes}
    note = (
        "No batch, so no forward was run: the peak is that of the optimizer's step, activations are not counted, and "
        "nothing is timed."
    )
    return Plan(
        **common,
        samples=None,
        peak=peak,
        most=most,
        peak_part=Part.OPTIMIZER.value,
        saved_nbytes=None,
        wire=wire_of_layout(traced.root),
        largest_samples=None,
        time=None,
        links=None,
        notes=(*traced.notes, note),
        timeline=None,
    )


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
    """Where the line through the largest that fits and a neighbour meets ``limit``, between both bounds."""
    other = above if above is not None else max((number for number in known if number < fitting), default=fitting + 1)
    slope = (known[other] - known[fitting]) / (other - fitting) if other in known else 0.0
    if slope <= 0:
        return fitting * 2
    guess = fitting + int((limit - known[fitting]) / slope)
    # One more than a guess that fits exactly tells whether it is the last.
    guess = max(guess, fitting + 1)
    return guess if above is None else min(guess, above - 1)
