"""``compressed``: collectives whose averages of gradients travel in eight bits, for slow links."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from polyshard.errors import ConfigError, DeviceError
from polyshard.interfaces import (
    COMPLETED,
    Collectives,
    CollectivesCapabilities,
    CollectivesDecorator,
    Group,
    PluginContext,
    ReduceOp,
    Work,
)
from typing_extensions import override

from .block_codec import BlockCode, Number
from .precision import switch, whole_number

#: Where averages are accumulated, whatever dtype travels otherwise.
_ACCUMULATION = torch.float32


class Compressed(CollectivesDecorator):
    """Means of floating-point tensors travel as numbers of eight bits with a scale for each ``block`` elements.

    A rank sends each other rank the slice that this one keeps, encoded, and averages the slices that it receives in
    fp32: an exchange of blocks instead of a reduction, as in ZeRO++ (Wang et al., 2023, arXiv:2306.10209, section 3.3).
    Of n elements over N ranks, (N - 1) / N n (1 + 4 / block) bytes leave each, against 2 (N - 1) / N n in bf16. Tensors
    averaged in place, over replicas, are sent twice: to be averaged, and as the mean.

    Each element is off by half a step of its block's scale at most (``block_codec``), each time that it is sent, and
    no error is carried over to the next step. A block with an infinity or a NaN arrives as NaN, which gradient scalers
    notice. Sums, maxima, minima, integers, and tensors under ``min_numel`` travel as ``inner`` sends them.

    Args:
        context: makes the inner collectives.
        inner: collectives that send: a name, or a table of a name and options. They must exchange blocks.
        number: ``"int8"`` or ``"fp8"`` (e4m3).
        block: elements that share a scale, a multiple of 16.
        min_numel: elements of the smallest slice that is encoded; a smaller one costs a launch more than it saves.
        slices: whether reductions between the ranks that shard a unit are encoded.
        replicas: whether averages over replicas are: those of hybrid strategies cross the links between nodes.

    Raises:
        ConfigError: an option has a value that it cannot take, or the inner collectives do not exchange blocks.
    """

    api_version: ClassVar[int] = 1

    def __init__(
        self,
        context: PluginContext,
        inner: Any = "auto",
        *,
        number: str = "int8",
        block: int = 256,
        min_numel: int = 65536,
        slices: bool = True,
        replicas: bool = True,
    ) -> None:
        where = f"of collectives {context.name!r}"
        names = [each.value for each in Number]
        if number not in names:
            raise ConfigError(f"number {where} must be {' or '.join(map(repr, names))}, not {number!r}.")
        if whole_number(block, 16, f"block {where}") % 16:
            raise ConfigError(f"block {where} must be a multiple of 16 elements, not {block!r}.")
        self._min_numel = whole_number(min_numel, 0, f"min_numel {where}")
        self._slices, self._replicas = switch(slices, f"slices {where}"), switch(replicas, f"replicas {where}")
        if not (slices or replicas):
            raise ConfigError(f"collectives {context.name!r} encode neither slices nor replicas. Set one to True.")
        super().__init__(context.construct(Group.COLLECTIVES, inner))
        if not self.inner.capabilities.exchanges:
            raise ConfigError(
                f"The inner collectives {where} ({type(self.inner).__name__}) do not exchange blocks (all_to_all), by "
                "which encoded gradients travel. Name others."
            )
        if self.inner.capabilities.fixed_addresses:
            raise DeviceError(
                f"The inner collectives {where} ({type(self.inner).__name__}) send from memory of their own alone, and "
                "encoded gradients are elsewhere. Name others, nccl for example."
            )
        self._code = BlockCode(Number(number), block)
        self._capabilities = _capabilities_over(self.inner)

    @property
    @override
    def capabilities(self) -> CollectivesCapabilities:
        return self._capabilities

    @override
    def around(self, inner: Collectives) -> Collectives:
        part = copy.copy(self)
        part.inner, part._capabilities = inner, _capabilities_over(inner)
        return part

    @override
    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        *,
        op: ReduceOp,
        scratch: torch.Tensor | None = None,
    ) -> Work:
        if not (self._slices and self._encodes(out, op)):
            return self.inner.reduce_scatter(out, full, op=op, scratch=scratch)
        received, work = self._exchange(full.view(self.world_size, out.numel()))
        return _Then(work, lambda: out.copy_(self._mean(received, out.numel())))

    @override
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        slice_numel = -(-tensor.numel() // self.world_size)
        if not (self._replicas and slice_numel >= self._min_numel and self._encodes(tensor, op)):
            return self.inner.all_reduce(tensor, op=op)
        flat = tensor.view(-1)
        rows = flat.new_zeros(self.world_size * slice_numel)
        rows[: flat.numel()].copy_(flat)
        received, work = self._exchange(rows.view(self.world_size, slice_numel))

        def send_mean() -> None:
            mean = self._mean(received, slice_numel)
            own = torch.empty_like(received[0])
            self._code.encode(own, mean)
            averaged = torch.empty(self.world_size, slice_numel, dtype=tensor.dtype, device=flat.device)
            # Not by a gather: those have a communicator of their own, which another stream uses meanwhile. It is issued
            # in the order in which ranks wait, which is the same on all.
            means, work = self._swap(own.repeat(self.world_size, 1))
            work.wait()
            self._code.decode(means, averaged)
            flat.copy_(averaged.view(-1)[: flat.numel()])

        return _Then(work, send_mean)

    def _encodes(self, slice: torch.Tensor, op: ReduceOp) -> bool:
        return (
            op is ReduceOp.MEAN
            and slice.dtype.is_floating_point
            and slice.numel() >= max(1, self._min_numel)
            and self.world_size > 1
        )

    def _exchange(self, rows: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Send row k (``[slice]``) to rank k, encoded; what arrives is ``[world_size, bytes]``."""
        sent = torch.empty(self.world_size, self._code.nbytes(rows.size(1)), dtype=torch.uint8, device=rows.device)
        with torch.no_grad():
            for message, row in zip(sent, rows, strict=True):
                self._code.encode(message, row)
        return self._swap(sent)

    def _swap(self, sent: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Send row k of ``sent`` (``[world_size, bytes]``) to rank k; what arrives has the same shape."""
        received = torch.empty_like(sent)
        splits = [sent.size(1)] * self.world_size
        work = self.inner.all_to_all(received.view(-1), splits, sent.view(-1), splits)
        # The function holds ``sent`` until the operation has ended.
        return received, _Then(work, lambda: sent)

    def _mean(self, received: torch.Tensor, numel: int) -> torch.Tensor:
        """The mean of every rank's row, fp32: in the order of ranks, so that it is the same from run to run."""
        total = torch.zeros(1, numel, dtype=_ACCUMULATION, device=received.device)
        one = torch.empty_like(total)
        # Row by row: decoded together they would take four bytes for each element of the whole unit.
        for row in received:
            self._code.decode(row.unsqueeze(0), one)
            total.add_(one)
        return total[0].div_(self.world_size)


class _Then:
    """Waits for an operation, then calls ``finish``, once."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work: Work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        if self._finish is None:
            return
        self._work.wait()
        finish, self._finish, self._work = self._finish, None, COMPLETED
        with torch.no_grad():
            finish()


def _capabilities_over(inner: Collectives) -> CollectivesCapabilities:
    # What is encoded is accumulated in fp32. What is not may be refused by the inner ones.
    return replace(inner.capabilities, capturable=False, blends=True)
