"""CUDA streams that are pretended: operations run at once on the CPU, and are checked for the order they would need.

Every stream knows which operations it is ordered behind (a vector clock), and all memory which stream took it and who
used it since. The rules are those of CUDA, of torch's caching allocator and of its autograd:

- what reads memory is ordered behind what wrote it, and what writes it behind the point at which it was taken;
- memory that was let go of may be taken again by the stream that took it, at once, and by no other;
- a node of a backward runs on the stream of its forward, and callbacks after it on the caller's, behind all leaves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from polyshard import _torch_private
from polyshard.interfaces import ReduceOp, Work
from polyshard.runtime.buffers import FlatBuffer
from polyshard.runtime.streams import CudaStreams
from polyshard_backends.fake import FakeCollectives

Clock = dict[int, int]
#: An operation: the stream, and how many it had before.
Stamp = tuple[int, int]


class RaceError(AssertionError):
    """Two operations that nothing orders use the same memory."""


class Event:
    """``torch.cuda.Event``."""

    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)

    def wait(self, stream: Stream) -> None:
        stream.follow(self.clock)


class Stream:
    """``torch.cuda.Stream``."""

    _numbers = count(1)

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream = next(self._numbers)
        self.clock: Clock = {}

    def follow(self, clock: Clock) -> None:
        for stream, operations in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), operations)

    def wait_stream(self, other: Stream) -> None:
        self.follow(other.clock)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def issue(self) -> Stamp:
        operations = self.clock[self.cuda_stream] = self.clock.get(self.cuda_stream, 0) + 1
        return self.cuda_stream, operations

    def behind(self, stamp: Stamp) -> bool:
        return self.clock.get(stamp[0], 0) >= stamp[1]


class Memory:
    """What one allocation was used for."""

    def __init__(self, what: str, taker: Stream) -> None:
        self.what = what
        self.taker = taker
        self.taken = taker.issue()
        self.writes: list[Stamp] = []
        self.reads: list[Stamp] = []


class PretendedDevice:
    """One device, its streams and its memory; to the engine it is ``torch.cuda``."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.main, self.side = Stream(), Stream()
        self.current = self.main
        # What the gradient of an input is ordered behind that ``Multiply`` passes on.
        self._passed_on: Clock = {}
        self._leaves: set[Stream] = set()
        self._buffers: dict[FlatBuffer, Memory] = {}
        self._gradients: dict[int, Memory] = {}
        self._let_go: list[Memory] = []
        self._before_backward: Clock = {}
        #: How many gradients had memory at once.
        self.most_gradients = 0

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def current_stream(self, device: int) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return False

    def take(self, what: str) -> Memory:
        """Memory from the current stream's pool."""
        stream = self.current
        mine = [memory for memory in self._let_go if memory.taker is stream]
        for memory in mine:
            if not all(map(stream.behind, memory.reads + memory.writes)):
                raise RaceError(f"{what} may be given the memory of {memory.what}, which is still in use")
            self._let_go.remove(memory)
        return Memory(what, stream)

    def let_go(self, memory: Memory) -> None:
        """Back to the pool it came from."""
        self._let_go.append(memory)

    def read(self, memory: Memory) -> None:
        if not all(map(self.current.behind, [memory.taken, *memory.writes])):
            raise RaceError(f"{memory.what} is read, and may not be written yet")
        memory.reads.append(self.current.issue())

    def write(self, memory: Memory) -> None:
        if not self.current.behind(memory.taken):
            raise RaceError(f"{memory.what} is written, and may be in use for what had its memory before")
        memory.writes.append(self.current.issue())

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """Of a tensor in a buffer of the engine, or of a gradient."""
        for buffer, memory in self._buffers.items():
            if buffer.holds(tensor):
                return memory
        return self._gradients.get(tensor.data_ptr())

    def attach(self, buffer: FlatBuffer) -> None:
        self._buffers[buffer] = self.take(f"a buffer of {buffer.nbytes} bytes")

    def release(self, buffer: FlatBuffer) -> None:
        memory = self._buffers.pop(buffer, None)
        if memory is not None:
            self.let_go(memory)

    def accumulate(self, leaf: torch.Tensor) -> None:
        """A gradient arrived in ``leaf``, by an operation of its own."""
        assert leaf.grad is not None
        memory = self.memory_of(leaf.grad)
        if memory is None:
            memory = self._gradients[leaf.grad.data_ptr()] = self.take("a gradient")
            weakref.finalize(leaf.grad, self._gradient_died, leaf.grad.data_ptr())
        self.most_gradients = max(self.most_gradients, len(self._gradients))
        self.write(memory)
        self._leaves.add(self.current)

    def _gradient_died(self, address: int) -> None:
        self.let_go(self._gradients.pop(address))

    def copy(self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Write ``places`` from ``sources``."""
        for source in sources:
            memory = self.memory_of(source)
            if memory is not None:
                self.read(memory)
        for place in places:
            memory = self.memory_of(place)
            if memory is not None:
                self.write(memory)

    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()`` on the main stream."""
        self._leaves.clear()
        self._before_backward = dict(self.main.clock)
        loss.backward()
        assert self.current is self.main

    def after_backward(self, callback: Callable[[], None]) -> None:
        """Call back as autograd does."""
        for stream in self._leaves:
            self.main.wait_stream(stream)
        self.current = self.main
        callback()

    def streams(self) -> CudaStreams:
        return CudaStreams(torch.device("cuda", 0), self)


class Gathering(FakeCollectives):
    """Says what gathers write and reductions read."""

    device_of_streams: PretendedDevice

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Any:
        memory = self.device_of_streams.memory_of(out)
        assert memory is not None
        self.device_of_streams.write(memory)
        return super().all_gather(out, shard)

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        # What several units' inputs were copied to comes and goes on the stream that reduces.
        memory = self.device_of_streams.memory_of(full)
        if memory is not None:
            self.device_of_streams.read(memory)
        return super().reduce_scatter(out, full, op=op, scratch=scratch)

    def partition(self, rank_lists: Sequence[Sequence[int]]) -> Gathering:
        part = super().partition(rank_lists)
        return Gathering(self._context, part.rank, part.world_size)


class Multiply(torch.autograd.Function):
    """``x`` times the sum of ``weight``, on the stream that is current."""

    @staticmethod
    def forward(ctx: Any, device: PretendedDevice, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.device, ctx.stream = device, device.current
        ctx.save_for_backward(x, weight)
        return x * Multiply._sum(device, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        device, (x, weight) = ctx.device, ctx.saved_tensors
        device.current = ctx.stream
        of_x = gradient * Multiply._sum(device, weight)
        device._passed_on = dict(ctx.stream.clock)
        return None, of_x, (gradient * x).sum().expand_as(weight).clone()

    @staticmethod
    def _sum(device: PretendedDevice, weight: torch.Tensor) -> torch.Tensor:
        memory = device.memory_of(weight)
        if memory is not None:
            device.read(memory)
        return weight.sum()


class Onto(torch.autograd.Function):
    """The identity. What comes after it in backward runs on ``stream``, behind what the gradient comes from."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: PretendedDevice, stream: Stream, of_loss: bool) -> torch.Tensor:
        """``of_loss``: the gradient comes straight from the loss, and else from a ``Multiply``."""
        ctx.device, ctx.stream, ctx.of_loss = device, stream, of_loss
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        device: PretendedDevice = ctx.device
        ctx.stream.follow(device._before_backward if ctx.of_loss else device._passed_on)
        device.current = ctx.stream
        return gradient, None, None, None


def pretend(monkeypatch: pytest.MonkeyPatch) -> PretendedDevice:
    """A device whose streams ``CudaStreams`` takes for CUDA's."""
    pretended = PretendedDevice()
    attach, release = FlatBuffer.attach, FlatBuffer.release
    copy, add = _torch_private.foreach_copy_, _torch_private.foreach_add_

    def attach_there(buffer: FlatBuffer) -> None:
        was = buffer.attached
        attach(buffer)
        if not was:
            pretended.attach(buffer)

    def release_there(buffer: FlatBuffer) -> None:
        pretended.release(buffer)
        release(buffer)

    def copy_there(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        pretended.copy(places, sources)
        copy(places, sources)

    def add_there(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        pretended.copy(places, sources)
        add(places, sources)

    queue = _torch_private.queue_after_backward
    for owner, name, value in (
        (FlatBuffer, "attach", attach_there),
        (FlatBuffer, "release", release_there),
        (_torch_private, "foreach_copy_", copy_there),
        (_torch_private, "foreach_add_", add_there),
        (
            _torch_private,
            "queue_after_backward",
            lambda call, given_up: queue(lambda: pretended.after_backward(call), given_up),
        ),
    ):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(Gathering, "device_of_streams", pretended, raising=False)
    return pretended
