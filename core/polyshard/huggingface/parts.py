"""Boxes of one tensor that are boxes of another one, and what of a file they touch. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..state.boxes import Box


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor whose elements are those of a box of the tensor ``source``, its dimensions in another order."""

    offsets: tuple[int, ...]
    """First index of the box in each dimension."""
    sizes: tuple[int, ...]
    """Extent in each dimension."""
    source: str
    """Name of the other tensor."""
    origin: tuple[int, ...]
    """First index of the box in each dimension of ``source``."""
    dims: tuple[int | None, ...]
    """For each dimension the one of ``source``; None where that has none, and the extent is 1."""

    @property
    def box(self) -> Box:
        """The box."""
        return Box(self.offsets, self.sizes)

    @property
    def source_box(self) -> Box:
        """The same elements in ``source``: extent 1 in dimensions that ``dims`` does not name."""
        sizes = [1] * len(self.origin)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            if dim is not None:
                sizes[dim] = size
        return Box(self.origin, tuple(sizes))

    def within(self, box: Box) -> Part | None:
        """What of it lies in ``box``; None for nothing."""
        offsets, sizes, origin = list(self.offsets), list(self.sizes), list(self.origin)
        for index, dim in enumerate(self.dims):
            low = max(self.offsets[index], box.offsets[index])
            high = min(self.offsets[index] + self.sizes[index], box.offsets[index] + box.sizes[index])
            if low >= high:
                return None
            offsets[index], sizes[index] = low, high - low
            if dim is not None:
                origin[dim] += low - self.offsets[index]
        return replace(self, offsets=tuple(offsets), sizes=tuple(sizes), origin=tuple(origin))

    def moved(self, dim: int, by: int) -> Part:
        """The same elements, further along in ``dim``."""
        return replace(self, offsets=(*self.offsets[:dim], self.offsets[dim] + by, *self.offsets[dim + 1 :]))

    def permuted(self, order: Sequence[int]) -> Part:
        """After ``Tensor.permute(order)``."""
        return replace(
            self,
            offsets=tuple(self.offsets[dim] for dim in order),
            sizes=tuple(self.sizes[dim] for dim in order),
            dims=tuple(self.dims[dim] for dim in order),
        )

    def without(self, dim: int) -> Part:
        """After ``Tensor.squeeze(dim)``, the extent there being 1."""
        return replace(
            self,
            offsets=self.offsets[:dim] + self.offsets[dim + 1 :],
            sizes=self.sizes[:dim] + self.sizes[dim + 1 :],
            dims=self.dims[:dim] + self.dims[dim + 1 :],
        )

    def widened(self, dim: int) -> Part:
        """After ``Tensor.unsqueeze(dim)``."""
        return replace(
            self,
            offsets=(*self.offsets[:dim], 0, *self.offsets[dim:]),
            sizes=(*self.sizes[:dim], 1, *self.sizes[dim:]),
            dims=(*self.dims[:dim], None, *self.dims[dim:]),
        )

    def turned(self, name: str) -> Part:
        """The same seen from ``source``: its box, and where that lies in the tensor, which is called ``name``."""
        back: list[int | None] = [None] * len(self.origin)
        for index, dim in enumerate(self.dims):
            if dim is not None:
                back[dim] = index
        box = self.source_box
        return Part(box.offsets, box.sizes, name, self.offsets, tuple(back))

    def as_source(self, view: torch.Tensor) -> torch.Tensor:
        """``view``, of shape ``sizes``, with the dimensions of ``source_box``: the same memory."""
        for index in reversed(range(len(self.dims))):
            if self.dims[index] is None:
                view = view.squeeze(index)
        kept = [dim for dim in self.dims if dim is not None]
        view = view.permute([kept.index(dim) for dim in sorted(kept)])
        for dim in range(len(self.origin)):
            if dim not in kept:
                view = view.unsqueeze(dim)
        return view


def whole(name: str, shape: Sequence[int]) -> Part:
    """All of a tensor that is all of ``name``."""
    offsets = (0,) * len(shape)
    return Part(offsets, tuple(shape), name, offsets, tuple(range(len(shape))))


def covered(parts: Sequence[Part]) -> int:
    """Number of elements of disjoint ``parts``."""
    return sum(part.box.numel for part in parts)


def span(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """First and one past the last element of ``box`` in a row-major tensor of ``shape``."""
    first = last = 0
    for extent, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        first = first * extent + offset
        last = last * extent + offset + size - 1
    return first, last + 1


def slabs(shape: Sequence[int], box: Box, most: int, *, gaps: bool) -> Iterator[Box]:
    """``box`` of a row-major tensor of ``shape`` in boxes whose elements lie within ``most`` of each other.

    ``gaps``: what lies between may be as much as their own; without, each is one contiguous run of at most ``most``.
    """
    first, stop = span(shape, box)
    extent = stop - first
    if extent <= most and (extent == box.numel or (gaps and extent <= 2 * box.numel)):
        yield box
        return
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if dim is None:
        yield box
        return
    half = box.sizes[dim] // 2
    for begin, size in ((0, half), (half, box.sizes[dim] - half)):
        offsets = (*box.offsets[:dim], box.offsets[dim] + begin, *box.offsets[dim + 1 :])
        yield from slabs(shape, Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :])), most, gaps=gaps)


def part_of(view: torch.Tensor, whole_box: Box, box: Box) -> torch.Tensor:
    """What of ``view``, which shows ``whole_box``, shows ``box``."""
    for dim, (outer, offset, size) in enumerate(zip(whole_box.offsets, box.offsets, box.sizes, strict=True)):
        view = view.narrow(dim, offset - outer, size)
    return view
