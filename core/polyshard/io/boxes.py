"""Axis-aligned boxes of tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor."""

    offsets: tuple[int, ...]
    """First index in each dimension."""
    sizes: tuple[int, ...]
    """Extent in each dimension."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What both have; None for nothing. All of a 0-dim tensor where neither has dimensions."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = [
            min(start + size, begin + extent)
            for start, size, begin, extent in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(stop - start for start, stop in zip(low, high, strict=True))
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    def narrowed(self, dim: int, begin: int, size: int) -> Box:
        """The part of it that ``Tensor.narrow(dim, begin, size)`` of its memory is."""
        offsets = (*self.offsets[:dim], self.offsets[dim] + begin, *self.offsets[dim + 1 :])
        return Box(offsets, (*self.sizes[:dim], size, *self.sizes[dim + 1 :]))

    def moved(self, offsets: Sequence[int]) -> Box:
        """The same box in a larger tensor, in which its own tensor begins at ``offsets``."""
        return Box(tuple(map(operator.add, self.offsets, offsets)), self.sizes)

    def minus(self, other: Box) -> Iterator[Box]:
        """What ``other`` lacks of it, as disjoint boxes: at most two for each dimension."""
        common = self.overlap(other)
        if common is None:
            yield self
            return
        left = self
        for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            before = start - left.offsets[dim]
            behind = left.sizes[dim] - before - size
            if before:
                yield left.narrowed(dim, 0, before)
            if behind:
                yield left.narrowed(dim, before + size, behind)
            left = left.narrowed(dim, before, size)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of the whole tensor, and this rank's memory for it."""

    box: Box
    view: torch.Tensor
    """Shape ``box.sizes``; a view: reading a checkpoint into it changes what it views."""


def _rows(box: Box) -> tuple[int, int]:
    """First and one past the last index of dimension 0; of a tensor without dimensions one row."""
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


def disjoint(boxes: Sequence[Box]) -> Iterator[tuple[int, Box]]:
    """Boxes that together have all elements of ``boxes``, each once: which one it is of, and itself."""
    taken: list[tuple[int, Box]] = []
    for number, box in sorted(enumerate(boxes), key=lambda each: each[1].offsets[:1]):
        # Those that end before its rows end before the rows of all that follow.
        taken = [(stop, each) for stop, each in taken if stop > _rows(box)[0]]
        left = [box]
        for _, other in taken:
            left = [part for each in left for part in each.minus(other)]
        for part in left:
            taken.append((_rows(part)[1], part))
            yield number, part


def box_within(view: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """``part`` of a whole tensor as a view of ``view``, which is the tensor's ``box``."""
    for dim, (start, size, origin) in enumerate(zip(part.offsets, part.sizes, box.offsets, strict=True)):
        view = view.narrow(dim, start - origin, size)
    return view


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """First and one past the last element of ``box`` in a row-major tensor of ``shape``."""
    strides = contiguous_stride(shape)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    return first, first + 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))


def overlapping(offsets: Numbers, sizes: Numbers, shape: Sequence[int]) -> bool:
    """Whether two boxes of a row-major tensor of ``shape`` have an element in common.

    ``offsets``, ``sizes``: shape ``[boxes, dimensions]``; each box has elements, within the tensor.
    """
    strides = np.array(contiguous_stride(shape), np.int64)
    starts, extents = offsets @ strides, 1 + (sizes - 1) @ strides
    if (extents == sizes.prod(axis=1)).all():
        order = np.argsort(starts)
        return bool((starts[order][1:] < (starts + extents)[order][:-1]).any())
    # Halved by planes between their first elements, and boxes that a plane meets with them.
    groups = [(offsets, offsets + sizes)]
    while groups:
        low, high = groups.pop()
        columns = [np.unique(column) for column in low.T]
        dim = max(range(len(shape)), key=lambda dim: len(columns[dim]))
        if len(columns[dim]) == 1:
            # All begin with one element.
            return True
        plane = columns[dim][len(columns[dim]) // 2]
        below, above = high.copy(), low.copy()
        below[:, dim], above[:, dim] = np.minimum(high[:, dim], plane), np.maximum(low[:, dim], plane)
        for begin, end in ((low, below), (above, high)):
            some = begin[:, dim] < end[:, dim]
            if some.sum() > 1:
                groups.append((begin[some], end[some]))
    return False
