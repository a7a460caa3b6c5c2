"""What brings a unit's gradients together in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from .. import _torch_private
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
