"""A recorded step: the operations it issues, which wait for which, and the memory alive at each moment.

[Note: how memory is known]
Tensors on the meta device have storages of a size and without memory. A ledger sees each one that an operation returns,
holds it weakly, and so knows when it began and ended; buffers that the engine resizes are looked at again before
each operation. Allocators round to blocks, which is counted. The order is that of the host, as a caching allocator on a
device has it: memory is given when the host asks and taken back when the last tensor on it is gone.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from polyshard.inspect import is_dtensor, local_of


class Stream(enum.Enum):
    """Where a device would run an operation."""

    COMPUTE = "compute"
    """The model's own operations, and the optimizer's."""
    GATHER = "gather"
    """Casts into gather buffers, and gathers."""
    REDUCE = "reduce"
    """Copies of gradients, and reductions."""


class Operation(enum.Enum):
    """A kind of collective, or of what is received from one rank."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    """Shards of ``hfsdp`` between groups."""
    RECEIVE = "receive"
    """Activations from the stage before, or their gradients from the one behind."""

    def received_nbytes(self, nbytes: int, ranks: int) -> int:
        """Of a whole buffer of ``nbytes``, the part that each rank receives: (N-1)/N of it, twice for an all-reduce.

        Of blocks all.
        """
        if self in (Operation.RECEIVE, Operation.ALL_TO_ALL):
            return nbytes
        part = nbytes * (ranks - 1) // ranks
        return 2 * part if self is Operation.ALL_REDUCE else part


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A group of ranks. Each communicator has one, so that they compare by identity."""

    members: Sequence[int]
    """Its ranks in the job, in ascending order."""
    over: tuple[str, ...] = ()
    """The dimensions of the mesh along which they lie; empty where there is no mesh."""

    @property
    def ranks(self) -> int:
        return len(self.members)

    def hosts(self, ranks_per_host: int) -> int:
        """Over how many hosts of ``ranks_per_host`` ranks it reaches."""
        return _hosts(self, ranks_per_host)


@functools.lru_cache
def _hosts(span: Span, ranks_per_host: int) -> int:
    # Asked for each transfer of a step.
    return len({rank // ranks_per_host for rank in span.members})


class Bound(enum.Enum):
    """The part of a device that bounds a kernel, beside its memory."""

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
    stream: Stream
    part: Part
    name: str
    bound: Bound
    flops: int
    """Multiplications and additions."""
    nbytes: int
    """Read and written, each operand once."""
    itemsize: int
    """Bytes of an element of the matrices that it multiplies, or of the widest operand."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One launch of one or several collectives of one kind."""

    stream: Stream
    part: Part
    operation: Operation
    nbytes: int
    """Bytes of the whole buffers: ``ranks`` slices each, or the operand of an all-reduce; of blocks, what is sent."""
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
    """``stream`` goes on once ``event`` is reached."""

    stream: Stream
    event: int


@dataclass(frozen=True, slots=True)
class Begin:
    part: Part


Issued = Kernel | Transfer | Signal | Wait | Begin


class StepRecorder:
    """Collects the operations of a step. One stream is the current one, as on a device."""

    def __init__(self) -> None:
        self.issued: list[Issued] = []
        self.stream = Stream.COMPUTE
        self.part = Part.FORWARD
        self._events = 0

    def begin(self, part: Part) -> None:
        self.part = part
        self.issued.append(Begin(part))

    def kernel(self, name: str, bound: Bound, flops: int, nbytes: int, itemsize: int) -> None:
        self.issued.append(Kernel(self.stream, self.part, name, bound, flops, nbytes, itemsize))

    def transfer(self, operation: Operation, nbytes: int, span: Span, members: int) -> None:
        """A launch of collectives on the current stream."""
        self.issued.append(Transfer(self.stream, self.part, operation, nbytes, span, members))

    def signal(self, stream: Stream) -> int:
        self._events += 1
        self.issued.append(Signal(stream, self._events))
        return self._events

    def wait(self, stream: Stream, event: int) -> None:
        self.issued.append(Wait(stream, event))

    def clear(self) -> None:
        """Forget the operations so far; events stay known."""
        self.issued.clear()


@dataclass(frozen=True, slots=True)
class RecordedStream:
    """Stands for a ``torch.cuda.Stream``."""

    recorder: StepRecorder
    cuda_stream: Stream

    def wait_stream(self, other: RecordedStream) -> None:
        self.recorder.wait(self.cuda_stream, self.recorder.signal(other.cuda_stream))


class RecordedEvent:
    """Stands for a ``torch.cuda.Event``."""

    def __init__(self) -> None:
        self._number = 0

    def record(self, stream: RecordedStream) -> None:
        self._number = stream.recorder.signal(stream.cuda_stream)

    def wait(self, stream: RecordedStream) -> None:
        stream.recorder.wait(stream.cuda_stream, self._number)


class RecordedCuda:
    """Stands for ``torch.cuda`` where the engine orders streams: operations on it are those of a step's recorder."""

    Event = RecordedEvent

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        # The engine makes its streams in this order.
        places = iter((Stream.GATHER, Stream.REDUCE))
        self.Stream = lambda device, priority: RecordedStream(recorder, next(places))

    def current_stream(self, device: int) -> RecordedStream:
        return RecordedStream(self._recorder, self._recorder.stream)

    def set_stream(self, stream: RecordedStream) -> None:
        self._recorder.stream = stream.cuda_stream

    def is_current_stream_capturing(self) -> bool:
        return False


#: The CUDA caching allocator gives multiples of so many bytes.
BLOCK_NBYTES = 512


class Kind(enum.Enum):
    """The use of memory."""

    PARAMETERS = "parameters"
    """Master shards, and parameters that are not sharded."""
    OPTIMIZER = "optimizer"
    """The optimizer's state, and temporaries of its step."""
    GRADIENTS = "gradients"
    """Gradient shards, from their reduction to ``zero_grad``."""
    GATHERED = "gathered"
    """Whole units in compute dtype."""
    REDUCTION = "reduction"
    """Inputs of reductions, what receives them, merged ones, and whole gradients that wait for further microbatches."""
    ACTIVATIONS = "activations"
    """Results of a forward: saved for the backward, or gone by its end."""
    TEMPORARIES = "temporaries"
    """Results of a backward: gradients before they are reduced, of activations, and activations computed anew."""
    BUFFERS = "buffers"
    """Buffers of the model, inputs, and the workspaces of libraries."""


@dataclass(slots=True)
class _Holding:
    kind: Kind
    nbytes: int


@dataclass(slots=True)
class _Held:
    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    holding: int


@dataclass(frozen=True, slots=True)
class Moment:
    position: int
    """How much was issued before it."""
    part: Part
    nbytes: Mapping[Kind, int]

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Every change of a step."""

    moments: tuple[Moment, ...]
    saved_nbytes: int
    """Activations at the end of the forward: what autograd saved, and the loss."""

    @property
    def peak(self) -> Moment:
        """The moment with most; the first of several."""
        return max(self.moments, key=lambda moment: moment.total)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if is_dtensor(tensor) else tensor


@dataclass(slots=True)
class Ledger:
    """Storages that are alive, and all that came and went since ``restart``."""

    recorder: StepRecorder
    _held: dict[int, _Held] = field(default_factory=dict)
    _resized: set[int] = field(default_factory=set)
    _holdings: list[_Holding] = field(default_factory=list)
    #: Which holding came or went, when, and in which part of the step.
    _changes: list[tuple[int, bool, int, Part]] = field(default_factory=list)
    _saved: int = 0

    def see(self, tensors: Iterable[torch.Tensor], kind: Kind | None = None) -> None:
        """Note the storages of ``tensors``; ``kind``: None for the one of the current stream and part."""
        for tensor in map(own_part, tensors):
            if not tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            held = self._held.get(id(storage))
            if held is None:
                self._come(storage, kind)
            elif kind is not None:
                self._holdings[held.holding].kind = kind

    def name(self, tensors: Iterable[torch.Tensor], kind: Kind) -> None:
        """Say what storages that are known are for; others are left alone."""
        self.see((each for each in map(own_part, tensors) if id(each.untyped_storage()) in self._held), kind)

    def look_again(self) -> None:
        """Note which of the buffers that are resized changed their sizes.

        Those that shrank first: what is given memory is written at once, and so whatever was freed since the last
        operation was freed before it.
        """
        grown = [held for held in map(self._held.__getitem__, self._resized) if not self._measure(held, grows=False)]
        for held in grown:
            self._measure(held, grows=True)

    def find_resized(self) -> None:
        """Learn which storages are resized: those that changed since they were seen."""
        for key, held in self._held.items():
            if self._measure(held, grows=False) or self._measure(held, grows=True):
                self._resized.add(key)

    def restart(self) -> None:
        """Forget storages that are gone; keep those that are alive."""
        self.look_again()
        self._changes = [(held.holding, True, 0, Part.FORWARD) for held in self._held.values()]

    def end_forward(self) -> None:
        """Note the activations that the forward leaves."""
        self.look_again()
        holdings = (self._holdings[held.holding] for held in self._held.values())
        self._saved = sum(holding.nbytes for holding in holdings if holding.kind is Kind.ACTIVATIONS)

    def timeline(self, standing: Mapping[Kind, int]) -> MemoryTimeline:
        """All changes since ``restart``; ``standing``: bytes that are there throughout, and no storage knows."""
        alive = {kind: standing.get(kind, 0) for kind in Kind}
        moments: list[Moment] = []
        for holding, begins, position, part in self._changes:
            it = self._holdings[holding]
            alive[it.kind] += it.nbytes if begins else -it.nbytes
            if moments and moments[-1].position == position == 0:
                moments.pop()
            moments.append(Moment(position, part, dict(alive)))
        return MemoryTimeline(tuple(moments) or (Moment(0, Part.FORWARD, alive),), self._saved)

    def _come(self, storage: torch.UntypedStorage, kind: Kind | None) -> None:
        key = id(storage)
        reference = weakref.ref(storage, lambda _: self._go(key))
        self._held[key] = _Held(reference, storage.nbytes(), self._open(storage.nbytes(), kind))

    def _go(self, key: int) -> None:
        held = self._held.pop(key, None)
        self._resized.discard(key)
        if held is not None:
            self._change(held.holding, begins=False)

    def _measure(self, held: _Held, *, grows: bool) -> bool:
        """Whether its size changed, upwards or downwards, and was noted."""
        storage = held.storage()
        if storage is None or storage.nbytes() == held.nbytes or (storage.nbytes() > held.nbytes) is not grows:
            return False
        kind = self._holdings[held.holding].kind
        self._change(held.holding, begins=False)
        held.nbytes = storage.nbytes()
        held.holding = self._open(held.nbytes, kind)
        return True

    def _open(self, nbytes: int, kind: Kind | None) -> int:
        blocks = -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        self._holdings.append(_Holding(self._kind() if kind is None else kind, blocks))
        self._change(len(self._holdings) - 1, begins=True)
        return len(self._holdings) - 1

    def _change(self, holding: int, begins: bool) -> None:
        self._changes.append((holding, begins, len(self.recorder.issued), self.recorder.part))

    def _kind(self) -> Kind:
        stream, part = self.recorder.stream, self.recorder.part
        if stream is Stream.GATHER:
            return Kind.GATHERED
        if stream is Stream.REDUCE:
            return Kind.REDUCTION
        return {Part.FORWARD: Kind.ACTIVATIONS, Part.BACKWARD: Kind.TEMPORARIES, Part.OPTIMIZER: Kind.OPTIMIZER}[part]
