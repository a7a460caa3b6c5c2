"""Collectives between ranks that are threads of a ``ThreadedWorld``, for tests on CPU."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from polyshard.errors import CollectiveError, ConfigError, DeviceError, WorldSizeError
from polyshard.interfaces import Collectives, CollectivesCapabilities, PluginContext, ReduceOp, Work
from typing_extensions import override

from .tensors import (
    REDUCIBLE_DTYPES,
    check_blocks,
    check_contiguous,
    check_gather,
    check_slices,
    check_source,
    own_group,
)
from .threaded_world import Meeting, ThreadedWorld

__all__ = ["ThreadedCollectives", "ThreadedWorld"]

_CAPABILITIES = CollectivesCapabilities(
    devices=frozenset({"cpu"}),
    dtypes=REDUCIBLE_DTYPES,
    reduce_ops=frozenset(ReduceOp),
    widening=True,
    stream_ordered=False,
    capturable=False,
    fixed_addresses=False,
    can_communicate=True,
    announces=True,
    exchanges=True,
)


class _Request(NamedTuple):
    out: torch.Tensor
    source: torch.Tensor


def _all_gather(requests: Sequence[_Request]) -> None:
    with torch.no_grad():
        for request in requests:
            rows = request.out.view(len(requests), request.source.numel())
            for row, other in zip(rows, requests, strict=True):
                if row.data_ptr() != other.source.data_ptr():
                    row.copy_(other.source.view(-1))


def _broadcast(requests: Sequence[_Request], src: int) -> None:
    with torch.no_grad():
        for rank, request in enumerate(requests):
            if rank != src:
                request.out.copy_(requests[src].source)


def _reduce_scatter(requests: Sequence[_Request], op: ReduceOp) -> None:
    with torch.no_grad():
        for rank, request in enumerate(requests):
            shape = (len(requests), request.out.numel())
            pieces = [other.source.view(shape)[rank].to(request.out.dtype) for other in requests]
            _accumulate(request.out, pieces, op)


def _all_reduce(requests: Sequence[_Request], op: ReduceOp) -> None:
    with torch.no_grad():
        # Inputs and outputs are the same tensors: the result needs memory of its own.
        total = torch.empty_like(requests[0].out)
        _accumulate(total, [request.source for request in requests], op)
        for request in requests:
            request.out.copy_(total)


class _Exchange(NamedTuple):
    received: Sequence[torch.Tensor]
    sent: Sequence[torch.Tensor]


def _all_to_all(requests: Sequence[_Exchange]) -> None:
    blocks = [
        (source, sender.sent[target], target, receiver.received[source])
        for target, receiver in enumerate(requests)
        for source, sender in enumerate(requests)
    ]
    for source, sent, target, received in blocks:
        if sent.numel() != received.numel():
            raise CollectiveError(
                f"rank {source} of the group sends {sent.numel()} elements to rank {target}, which expects "
                f"{received.numel()}; out_splits of the one must be what in_splits of the other say"
            )
    with torch.no_grad():
        for _, sent, _, received in blocks:
            received.copy_(sent)


def _accumulate(out: torch.Tensor, pieces: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """Reduce in rank order, whatever the order of arrival, in ``out``'s dtype."""
    out.copy_(pieces[0])
    for piece in pieces[1:]:
        if op is ReduceOp.MAX:
            torch.maximum(out, piece, out=out)
        elif op is ReduceOp.MIN:
            torch.minimum(out, piece, out=out)
        else:
            out.add_(piece)
    if op is ReduceOp.MEAN:
        out.div_(len(pieces), rounding_mode=None if out.is_floating_point() else "trunc")


class _MeetingWork:
    """A collective that the other ranks may still have to issue."""

    __slots__ = ("_meeting", "_rank", "_timeout", "_world")

    def __init__(self, world: ThreadedWorld, meeting: Meeting, rank: int, timeout: float) -> None:
        self._world = world
        self._meeting = meeting
        self._rank = rank
        self._timeout = timeout

    def wait(self) -> None:
        self._world.await_end(self._meeting, self._rank, self._timeout)


class ThreadedCollectives(Collectives):
    """One rank of a ``ThreadedWorld``.

    This object, not the thread, knows its rank: autograd calls from a thread of its own. The last rank to issue an
    operation carries it out. Sums are taken in rank order, in ``out``'s dtype, and are the same from run to run.

    Args:
        context: its ``device`` must be the CPU; its ``timeout`` applies where it is shorter than the world's.
        world: the world to take part in.
        rank: this rank, in ``range(world.world_size)``.

    Raises:
        ConfigError: ``world`` is not a ``ThreadedWorld``.
        DeviceError: the context's device is not the CPU.
        WorldSizeError: ``rank`` is outside ``range(world.world_size)``.
    """

    api_version = 1
    capabilities = _CAPABILITIES

    def __init__(self, context: PluginContext, world: ThreadedWorld, rank: int) -> None:
        if not isinstance(world, ThreadedWorld):
            raise ConfigError(f"collectives {context.name!r}: world is {world!r}; give a ThreadedWorld")
        if context.device.type != "cpu":
            raise DeviceError(
                f"collectives {context.name!r} serves the CPU alone and was given {context.device}; move the model to "
                f"the CPU or choose another backend"
            )
        if not 0 <= rank < world.world_size:
            raise WorldSizeError(
                f"collectives {context.name!r}: rank {rank} does not exist in a threaded world of {world.world_size}; "
                f"give 0 to {world.world_size - 1}"
            )
        self._enter(context, world, tuple(range(world.world_size)), rank)

    @classmethod
    def make_world(cls, world_size: int, timeout: float) -> ThreadedWorld:
        """A ``ThreadedWorld``, for callers that know this class by its plugin's name alone."""
        return ThreadedWorld(world_size, timeout)

    def _enter(self, context: PluginContext, world: ThreadedWorld, group: tuple[int, ...], rank: int) -> None:
        self._context = context
        self._world = world
        self._group = group
        self._rank = rank
        self._timeout = min(world.timeout, context.timeout.total_seconds())

    @property
    @override
    def rank(self) -> int:
        return self._rank

    @property
    @override
    def world_size(self) -> int:
        return len(self._group)

    @property
    @override
    def device(self) -> torch.device:
        return self._context.device

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        check_gather(out, shard, self._rank, self.world_size)
        return self._issue("all_gather", _Request(_unversioned(out), shard), out, _all_gather)

    @override
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        check_slices("reduce_scatter", full, out, self._rank, self.world_size)
        request = _Request(_unversioned(out), full)
        return self._issue(f"reduce_scatter({op.name})", request, full, lambda all_: _reduce_scatter(all_, op))

    @override
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        check_contiguous("all_reduce", tensor, self._rank)
        request = _Request(_unversioned(tensor), tensor)
        return self._issue(f"all_reduce({op.name})", request, tensor, lambda all_: _all_reduce(all_, op))

    @override
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        check_source(src, self._rank, self.world_size)
        check_contiguous("broadcast", tensor, self._rank)
        request = _Request(_unversioned(tensor), tensor)
        return self._issue(f"broadcast(from {src})", request, tensor, lambda all_: _broadcast(all_, src))

    @override
    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        check_blocks(out, out_splits, input, in_splits, self._rank, self.world_size)
        request = _Exchange(_unversioned(out).split_with_sizes(out_splits), input.data.split_with_sizes(in_splits))
        # Without sizes: they differ between ranks.
        meeting = self._meet(f"all_to_all of {input.dtype} elements", request, _all_to_all)
        return _MeetingWork(self._world, meeting, self._group[self._rank], self._timeout)

    @override
    def announce(self, what: str) -> None:
        self._world.announce(self._group[self._rank], what)

    @override
    def all_gather_object(self, obj: Any) -> list[Any]:
        # Pickled as between processes: a rank must not get hold of another's objects.
        meeting = self._meet("all_gather_object", pickle.dumps(obj), list)
        everything = self._world.await_end(meeting, self._group[self._rank], self._timeout)
        return [pickle.loads(entry) for entry in everything]

    @override
    def barrier(self) -> None:
        meeting = self._meet("barrier", None, len)
        self._world.await_end(meeting, self._group[self._rank], self._timeout)

    @override
    def partition(self, rank_lists: Sequence[Sequence[int]]) -> ThreadedCollectives:
        members = own_group(rank_lists, self._rank, self.world_size)
        # Ranks with different lists fail here, and not in the first collective.
        meeting = self._meet(f"partition into {[list(ranks) for ranks in rank_lists]}", None, len)
        self._world.await_end(meeting, self._group[self._rank], self._timeout)
        part = object.__new__(type(self))
        group = tuple(self._group[member] for member in members)
        part._enter(self._context, self._world, group, members.index(self._rank))
        return part

    def _issue(self, operation: str, request: _Request, whole: torch.Tensor, perform: Any) -> Work:
        meeting = self._meet(f"{operation} of {whole.numel()} {whole.dtype} elements", request, perform)
        return _MeetingWork(self._world, meeting, self._group[self._rank], self._timeout)

    def _meet(self, signature: str, payload: Any, perform: Any) -> Meeting:
        return self._world.meet(self._group, self._group[self._rank], signature, payload, perform)


def _unversioned(tensor: torch.Tensor) -> torch.Tensor:
    # Another rank's thread writes the result, at any time. As with a network backend, that must not bump the version
    # that autograd saved.
    return tensor.data
