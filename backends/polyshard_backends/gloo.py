"""Collectives between processes on CPU, over torch.distributed's gloo."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import RankMismatchError, different_calls
from polyshard.interfaces import CollectivesCapabilities, ReduceOp, Work
from typing_extensions import override

from .process_group import ProcessGroupCollectives
from .tensors import (
    GROUP_DTYPES,
    as_bytes,
    carried_blocks,
    check_blocks,
    check_contiguous,
    check_gather,
    check_slices,
    receive_buffer,
    reduce_rows,
    torch_op,
)

_CAPABILITIES = CollectivesCapabilities(
    devices=frozenset({"cpu"}),
    dtypes=GROUP_DTYPES,
    reduce_ops=frozenset(ReduceOp),
    widening=True,
    stream_ordered=False,
    capturable=False,
    fixed_addresses=False,
    can_communicate=True,
    announces=True,
    exchanges=True,
)

#: Marks the length of an object: ranks that diverged may send it against the checksum of an announcement.
_OBJECT = 1 << 62
#: Bytes of an announcement that are shown where ranks differ.
_TEXT_NBYTES = 1024


class _GlooWork:
    """An operation in flight, and the local work that follows it."""

    __slots__ = ("_collectives", "_finish", "_operation", "_timeout", "_work")

    def __init__(
        self,
        work: Any,
        operation: str,
        collectives: GlooCollectives,
        timeout: timedelta,
        finish: Callable[[], None] | None,
    ) -> None:
        self._work = work
        self._operation = operation
        self._collectives = collectives
        self._timeout = timeout
        self._finish = finish

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise self._collectives.failed(error, self._operation) from error
        self._work = None
        if self._finish is not None:
            self._finish()
            self._finish = None


class GlooCollectives(ProcessGroupCollectives):
    """Ranks that are processes, with tensors in host memory.

    One group serves gathers, reductions and exchanges: gloo tells operations apart by number and works on two at a
    time, so that they overlap without a second set of connections. ``reduce_scatter`` sends each rank its slice in the
    communication dtype and sums on arrival, in ``out``'s dtype, which gives the same bits from run to run.

    Args:
        context: its ``process_group``, or the default group, says which processes take part. Where that group uses
            another transport for the CPU, a gloo group over the same ranks is made at the first operation. Its
            ``timeout`` limits every wait.

    Raises:
        StateError: ``torch.distributed`` is not initialised.
        DeviceError: the context's device is not the CPU.
        WorldSizeError: this process is not in the group.
    """

    api_version = 1
    capabilities = _CAPABILITIES

    transport = "gloo"
    device_type = "cpu"
    separate_reductions = False

    @override
    def announce(self, what: str) -> None:
        mine = zlib.crc32(what.encode())
        if any(each != mine for each in self._heads(mine)):
            raise self._refusal(what)

    @override
    def _exchanged(self, mine: bytes) -> list[bytes]:
        heads = self._heads(_OBJECT | len(mine))
        if not all(each & _OBJECT for each in heads):
            raise self._refusal("exchange of an object")
        lengths = [each ^ _OBJECT for each in heads]
        return [row[:length] for row, length in zip(self._rows(mine, max(lengths)), lengths, strict=True)]

    def _heads(self, mine: int) -> list[int]:
        """Every rank's number: the checksum of its announcement, or the length of its object."""
        everyone = torch.empty(self._world_size, dtype=torch.int64)
        self.all_gather(everyone, torch.tensor([mine])).wait()
        return [int(each) for each in everyone.tolist()]

    def _refusal(self, what: str) -> RankMismatchError:
        """The error on every rank, where some are about to issue something else than ``what``."""
        # All ranks have seen the difference, and exchange their texts now.
        rows = self._rows(what.encode()[:_TEXT_NBYTES], _TEXT_NBYTES)
        return different_calls(self._rank, [row.rstrip(b"\0").decode(errors="replace") for row in rows])

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        check_gather(out, shard, self._rank, self._world_size)
        return self._issue("all_gather", self._all_gather, as_bytes(out), as_bytes(shard))

    @override
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        check_slices("reduce_scatter", full, out, self._rank, self._world_size)
        received = receive_buffer(full, scratch)
        rows = received.view(self._world_size, out.numel())

        def finish() -> None:
            with torch.no_grad():
                reduce_rows(out, rows, op)

        return self._issue("reduce_scatter", dist.all_to_all_single, as_bytes(received), as_bytes(full), finish=finish)

    @override
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        check_contiguous("all_reduce", tensor, self._rank)
        # Summed in fp32: fp16 overflows in a sum that its mean would fit.
        narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        with torch.no_grad():
            total = tensor.to(torch.float32) if narrow else tensor
        summed = ReduceOp.SUM if op is ReduceOp.MEAN else op

        def finish() -> None:
            with torch.no_grad():
                if op is ReduceOp.MEAN:
                    total.div_(self._world_size, rounding_mode=None if total.is_floating_point() else "trunc")
                if narrow:
                    tensor.copy_(total)

        return self._issue("all_reduce", dist.all_reduce, total, op=torch_op(summed), finish=finish)

    @override
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        source = self._root_of(src)
        check_contiguous("broadcast", tensor, self._rank)
        return self._issue("broadcast", dist.broadcast, as_bytes(tensor), src=source)

    @override
    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        check_blocks(out, out_splits, input, in_splits, self._rank, self._world_size)
        received, received_splits = carried_blocks(out, out_splits)
        sent, sent_splits = carried_blocks(input, in_splits)
        return self._issue(
            "all_to_all",
            dist.all_to_all_single,
            received,
            sent,
            output_split_sizes=received_splits,
            input_split_sizes=sent_splits,
        )

    @override
    def barrier(self) -> None:
        self._issue("barrier", dist.barrier).wait()

    def _issue(
        self,
        operation: str,
        function: Callable[..., Any],
        *tensors: torch.Tensor,
        finish: Callable[[], None] | None = None,
        **options: Any,
    ) -> Work:
        group = self.gather_group()
        try:
            work = function(*tensors, group=group, async_op=True, **options)
        except RuntimeError as error:
            raise self.failed(error, operation) from error
        return _GlooWork(work, operation, self, self._context.timeout, finish)
