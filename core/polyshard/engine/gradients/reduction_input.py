"""What one unit's next reduction reads: its gradients as they come, and the memory that brings them together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import is_
from typing import NamedTuple

import torch

from ...interfaces import BufferRole
from .. import _torch_private
from ..planning.layout import FlatLayout
from ..planning.ranks import RankGrid
from ..transport.buffer import FlatBuffer


class Copies(NamedTuple):
    """Copies still to be run. Sources are held until the reduction of what they are copied to is retired."""

    zeroed: list[torch.Tensor]
    """Ranges without a gradient."""
    places: list[torch.Tensor]
    sources: list[torch.Tensor]
    """One gradient for each of ``places``."""
    spent: list[FlatBuffer]
    """Buffers that nothing reads any more once the reduction is retired."""

    def run(self) -> None:
        """Write all of it, by two launches at most."""
        if self.zeroed:
            _torch_private.foreach_zero_(self.zeroed)
        if self.sources:
            _torch_private.foreach_copy_(self.places, self.sources)

    def let_go(self) -> None:
        """Release what is spent."""
        for buffer in self.spent:
            buffer.release()


class ReductionInput:
    """``[padded_numel]`` elements in the dtype in which they travel, and where they come from.

    Gradients that a backward computed elsewhere are copied. Large linear layers *claim* their part of the memory
    beforehand, and write in place. Under ``no_sync`` all are added up, whole, in a private buffer.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, result_dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        #: In which they are added up, over microbatches and over ranks.
        self.result_dtype = result_dtype
        self.device = device
        self._buffer: FlatBuffer | None = None
        #: Which parameters' gradients are computed in place.
        self.claimed: set[int] = set()
        self._taken_at: object = None
        #: Of a backward that reduces, one a parameter or None; None before, and when they were collected.
        self.gradients: list[torch.Tensor | None] | None = None
        #: Where earlier backwards' gradients are added up; they wait while ``has_sum``.
        self.sum: FlatBuffer | None = None
        self.has_sum = False
        self._sum_missed: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.layout.padded_numel * self.dtype.itemsize

    @property
    def buffer(self) -> FlatBuffer:
        """The memory, of a unit that is sharded: made once, attached by ``attach`` until the reduction is retired."""
        if self._buffer is None:
            self._buffer = FlatBuffer.allocate(self.layout, self.dtype, self.device)
        return self._buffer

    @property
    def travels(self) -> bool:
        """Whether the last reduction still reads ``buffer``."""
        return self._buffer is not None and self._buffer.attached and not self.claimed

    @property
    def free(self) -> bool:
        """Whether the first gradient may be computed in place."""
        return not (self.has_sum or self.gradients is not None or self.buffer.attached)

    def attach(self, grid: RankGrid, here: object) -> None:
        """Give ``buffer`` memory, from the backend's allocator and the pool of the current stream, ``here``."""
        with (grid.shard or grid.world).allocation(BufferRole.REDUCE, self.buffer.nbytes):
            self.buffer.attach()
        self._taken_at = here

    def claim(self, index: int, here: object) -> torch.Tensor | None:
        """Where the gradient of parameter ``index`` may be written on the stream ``here``, as a new tensor.

        None where it is not the first of this backward, or is computed on another stream than the first that claimed.
        """
        if self.gradients is not None or index in self.claimed or here is not self._taken_at:
            return None
        self.claimed.add(index)
        return self.buffer.views[index].detach()

    def accumulate(self, gradients: list[torch.Tensor | None]) -> None:
        """Add ``gradients`` to those that wait."""
        if self.sum is None:
            self.sum = self.make_sum()
        self._sum_missed = self.missing(gradients)
        self.sum.attach()
        copies = copies_into(self.sum, gradients)
        if not self.has_sum:
            copies.run()
        elif copies.sources:
            _torch_private.foreach_add_(copies.places, copies.sources)
        self.has_sum = True

    def make_sum(self) -> FlatBuffer:
        """Memory to add up in."""
        return FlatBuffer.allocate(self.layout, self.result_dtype, self.device)

    def missing(self, gradients: list[torch.Tensor | None]) -> frozenset[int]:
        """Which parameters have none, here or among those that wait."""
        # Nearly always none is missing, which is found out at C speed.
        if not any(map(is_, gradients, repeat(None))):
            return frozenset()
        missed = frozenset(index for index, gradient in enumerate(gradients) if gradient is None)
        return missed & self._sum_missed if self.has_sum else missed

    def new_result(self, numel: int) -> torch.Tensor:
        """Memory for ``numel`` reduced elements.

        From the pool of the stream that computes: what one step uses for gradients, the next has for activations.
        """
        return torch.empty(numel, dtype=self.result_dtype, device=self.device)

    def collect(self, buffer: FlatBuffer) -> Copies:
        """What is still to be written into ``buffer``; these copies alone hold the gradients from now on."""
        gradients, self.gradients = self.gradients, None
        assert gradients is not None
        if self.has_sum:
            self.accumulate(gradients)
            assert self.sum is not None
            self.has_sum = False
            return Copies([], [buffer.flat], [self.sum.flat], [self.sum])
        copies = copies_into(buffer, gradients, some_in_place=bool(self.claimed))
        self.claimed.clear()
        return copies

    def keep_memory(self) -> None:
        """Leave alone what a reduction on its way reads; it goes with that."""
        self._buffer = None

    def discard(self) -> None:
        """Release the memory and forget a backward that failed; what earlier ones left waits on."""
        self.gradients = None
        self.claimed.clear()
        if self._buffer is not None:
            self._buffer.release()


def together(copies: Sequence[Copies]) -> Copies:
    """All of ``copies`` as one."""
    if len(copies) == 1:
        return copies[0]
    return Copies(*(list(chain.from_iterable(kind)) for kind in zip(*copies, strict=True)))


def copies_into(buffer: FlatBuffer, gradients: list[torch.Tensor | None], *, some_in_place: bool = False) -> Copies:
    """What ``buffer`` lacks of ``gradients``, one a view: None for zeros, and some perhaps computed there."""
    zeroed, present = list(buffer.gaps), [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(gradients) and not some_in_place:
        return Copies(zeroed, buffer.views, present, [])
    copies = Copies(zeroed, [], [], [])
    for view, gradient in zip(buffer.views, gradients, strict=True):
        if gradient is None:
            # A parameter that took no part: its range is zero, on this rank or on all.
            zeroed.append(view)
        elif not some_in_place or gradient.data_ptr() != view.data_ptr():
            copies.places.append(view)
            copies.sources.append(gradient)
    return copies
