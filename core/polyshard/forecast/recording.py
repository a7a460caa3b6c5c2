"""What one step issues, in the order in which it issues it: kernels, transfers, and what waits for what."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .links import Operation, Span


class Stream(enum.Enum):
    """Where something runs; the streams of ``engine/transport/streams.py``."""

    COMPUTE = "compute"
    """The model's own operations, and the optimizer's."""
    GATHER = "gather"
    """Casts into gather buffers, and gathers."""
    REDUCE = "reduce"
    """Copies of gradients, and reductions."""


class Unit(enum.Enum):
    """Which part of a device bounds a kernel, beside its memory."""

    MATMUL = "matmul"
    """Tensor cores, in matrix products and convolutions."""
    ATTENTION = "attention"
    """Tensor cores, in fused attention, which reaches less of their rate."""
    NONE = "none"
    """Memory alone."""


class Part(enum.Enum):
    """Of a training step, in this order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch on a device."""

    stream: Stream
    part: Part
    name: str
    unit: Unit
    flops: int
    """Multiplications and additions."""
    nbytes: int
    """Read and written, each operand once."""
    itemsize: int
    """Bytes of an element of what it multiplies, or of the widest operand."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One launch of one or several collectives of one kind."""

    stream: Stream
    part: Part
    operation: Operation
    nbytes: int
    """Bytes of the whole buffers: ``ranks`` slices each, or what an all-reduce reduces."""
    span: Span
    members: int
    """How many collectives went in the launch."""

    @property
    def received_nbytes(self) -> int:
        """Bytes that reach this rank from others, and as many leave it, by a ring or straight."""
        return self.operation.received_nbytes(self.nbytes, self.span.ranks)


@dataclass(frozen=True, slots=True)
class Signal:
    """An event is recorded on ``stream``."""

    stream: Stream
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    """``stream`` goes on once ``event`` has come."""

    stream: Stream
    event: int


@dataclass(frozen=True, slots=True)
class Begin:
    """A part of the step begins."""

    part: Part


Issued = Kernel | Transfer | Signal | Wait | Begin


class Recorder:
    """Collects what is issued. One stream is the current one, as on a device."""

    def __init__(self) -> None:
        self.issued: list[Issued] = []
        self.stream = Stream.COMPUTE
        self.part = Part.FORWARD
        self._events = 0

    def begin(self, part: Part) -> None:
        """``part`` begins."""
        self.part = part
        self.issued.append(Begin(part))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Issue on ``stream`` inside."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def kernel(self, name: str, unit: Unit, flops: int, nbytes: int, itemsize: int) -> None:
        """A launch on the current stream."""
        self.issued.append(Kernel(self.stream, self.part, name, unit, flops, nbytes, itemsize))

    def transfer(self, operation: Operation, nbytes: int, span: Span, members: int) -> None:
        """A launch of collectives on the current stream."""
        self.issued.append(Transfer(self.stream, self.part, operation, nbytes, span, members))

    def signal(self, stream: Stream) -> int:
        """Record an event on ``stream``."""
        self._events += 1
        self.issued.append(Signal(stream, self._events))
        return self._events

    def wait(self, stream: Stream, event: int) -> None:
        """Let ``stream`` wait for ``event``."""
        self.issued.append(Wait(stream, event))

    def clear(self) -> None:
        """Forget what was issued; events stay known."""
        self.issued.clear()
