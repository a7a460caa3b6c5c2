"""Elements out of a checkpoint's files: only what was compared with its digest."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import CheckpointDamagedError
from ..state.boxes import Box, box_within
from ..state.held import chunks_of
from . import disk
from .digests import digest_of
from .encoding import Json
from .manifest import BLOCK, Manifest, StoredChunk, StoredTensor
from .memory import flat_bytes, view_of
from .threads import MOST, carried_out

#: Of one block, up to which each is read to its place by itself.
_MOST_PARTS = 64


@dataclass(slots=True)
class _Wanted:
    """Bytes ``low`` to ``high`` of a file, and where they go."""

    file: str
    low: int
    high: int
    part: torch.Tensor
    """What is to be filled."""
    strides: tuple[int, ...] | None
    """Of its elements among those bytes; None where they are the bytes, in order."""
    left: int = 0
    """Blocks that have not been read yet."""
    staged: torch.Tensor | None = None
    memory: memoryview | None = None

    def begin(self) -> None:
        """Have memory for the bytes: the target's own, where they lie there as in the file."""
        if self.strides is None and self.part.device.type == "cpu" and self.part.is_contiguous():
            self.memory = view_of(flat_bytes(self.part))
            return
        numel = (self.high - self.low) // self.part.element_size()
        self.staged = torch.empty(numel, dtype=self.part.dtype)
        self.memory = view_of(flat_bytes(self.staged))

    def end(self) -> None:
        """Fill the target."""
        if self.staged is not None:
            strides = self.strides
            held = (
                self.staged.view(self.part.shape)
                if strides is None
                else self.staged.as_strided(self.part.shape, strides)
            )
            self.part.copy_(held)
        self.staged = self.memory = None


#: A tensor or a stand-in for one, and what it is to be filled from.
Filling = tuple[torch.Tensor, StoredTensor]


def fill(manifest: Manifest, fillings: Iterable[Filling]) -> None:
    """Fill tensors in place. Each block of a file is read once, and only those are that have something of theirs.

    What lies in a target on the host as it lies in the file is read right there, and compared then: after an error
    targets may hold anything.

    Args:
        manifest: Of the directory.
        fillings: Targets have the shapes and dtypes of what they are filled from.

    Raises:
        CheckpointDamagedError: a file is gone, of another size, or holds something else than was written.
        OSError: reading failed.
    """
    wanted = sorted((each for one in fillings for each in _wanted(*one)), key=lambda each: (each.file, each.low))
    blocks: dict[tuple[str, int], list[_Wanted]] = {}
    for each in wanted:
        numbers = range(each.low // BLOCK, -(-each.high // BLOCK))
        each.left = len(numbers)
        for number in numbers:
            blocks.setdefault((each.file, number), []).append(each)
    # By file, then in its order: parts that began in one block end in those behind it.
    order = dict(sorted(blocks.items()))
    buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    for _ in range(min(MOST, len(order))):
        buffers.put(bytearray(BLOCK))
    with ExitStack() as stack, torch.no_grad():
        descriptors = {file: _opened(manifest, file, stack) for file in {file for file, _ in order}}
        results = carried_out(_calls(manifest, descriptors, order, buffers), len(order))
        for _, parts in zip(results, order.values(), strict=True):
            for each in parts:
                each.left -= 1
                if not each.left:
                    each.end()


def examine(manifest: Manifest, problems: Callable[[Exception], None]) -> None:
    """Read every file and compare it with its digests; tells of each block that differs, and each file that cannot be.

    Raises:
        OSError: reading failed.
    """
    buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    for _ in range(MOST):
        buffers.put(bytearray(BLOCK))
    for file, stored in sorted(manifest.files.items()):
        try:
            with disk.opened(manifest.directory, file, stored.size) as (descriptor, _):
                calls = (
                    partial(_differs, manifest, descriptor, file, index, buffers) for index in range(len(stored.blocks))
                )
                for index, differs in enumerate(carried_out(calls, len(stored.blocks))):
                    if differs:
                        problems(manifest.block_damaged(file, index))
        except CheckpointDamagedError as error:
            problems(error)


def _wanted(target: torch.Tensor, stored: StoredTensor) -> Iterator[_Wanted]:
    itemsize = stored.dtype.itemsize
    for have in chunks_of(target):
        for chunk in stored.chunks:
            common = chunk.box.overlap(have.box)
            if common is not None and common.numel:
                first, last, strides = _extent(chunk, common)
                part = box_within(have.view, have.box, common)
                dense = last + 1 - first == common.numel
                low = chunk.at + first * itemsize
                yield _Wanted(chunk.file, low, chunk.at + (last + 1) * itemsize, part, None if dense else strides)


def _extent(chunk: StoredChunk, common: Box) -> tuple[int, int, tuple[int, ...]]:
    """The first and the last element of ``common`` in the chunk, and the strides there."""
    strides: list[int] = []
    step = 1
    for size in reversed(chunk.box.sizes):
        strides.insert(0, step)
        step *= size
    starts = [offset - origin for offset, origin in zip(common.offsets, chunk.box.offsets, strict=True)]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(common.sizes, strides, strict=True))
    return first, last, tuple(strides)


def _opened(manifest: Manifest, file: str, stack: ExitStack) -> int:
    descriptor, _ = stack.enter_context(disk.opened(manifest.directory, file, manifest.files[file].size))
    return descriptor


def _calls(
    manifest: Manifest,
    descriptors: Mapping[str, int],
    blocks: Mapping[tuple[str, int], list[_Wanted]],
    buffers: queue.SimpleQueue[bytearray],
) -> Iterator[Callable[[], None]]:
    for (file, index), parts in blocks.items():
        for each in parts:
            if each.memory is None:
                each.begin()
        yield partial(_fetch, manifest, descriptors[file], file, index, parts, buffers)


def _fetch(
    manifest: Manifest,
    descriptor: int,
    file: str,
    index: int,
    parts: list[_Wanted],
    buffers: queue.SimpleQueue[bytearray],
) -> None:
    low = index * BLOCK
    high = min(low + BLOCK, manifest.files[file].size)
    buffer = buffers.get()
    try:
        memory = memoryview(buffer)[: high - low]
        pieces = _scattered(parts, low, high, memory)
        if _read(manifest, descriptor, file, index, pieces or [memory]):
            raise manifest.block_damaged(file, index)
        for each in parts if pieces is None else ():
            assert each.memory is not None
            start, stop = max(low, each.low), min(high, each.high)
            each.memory[start - each.low : stop - each.low] = memory[start - low : stop - low]
    finally:
        buffers.put(buffer)


def _scattered(parts: list[_Wanted], low: int, high: int, spare: memoryview) -> list[memoryview] | None:
    """Where the bytes of a block go, in order; those that nobody wants into ``spare``. None where a copy is better:
    for many small parts, and for bytes that several want.
    """
    if len(parts) > _MOST_PARTS:
        return None
    found: list[memoryview] = []
    done = low
    for each in parts:
        start, stop = max(low, each.low), min(high, each.high)
        if start < done:
            return None
        assert each.memory is not None
        found += (spare[done - low : start - low], each.memory[start - each.low : stop - each.low])
        done = stop
    return [*found, spare[done - low :]]


def _differs(manifest: Manifest, descriptor: int, file: str, index: int, buffers: queue.SimpleQueue[bytearray]) -> bool:
    buffer = buffers.get()
    try:
        size = min(BLOCK, manifest.files[file].size - index * BLOCK)
        return _read(manifest, descriptor, file, index, [memoryview(buffer)[:size]])
    finally:
        buffers.put(buffer)


def _read(manifest: Manifest, descriptor: int, file: str, index: int, pieces: list[memoryview]) -> bool:
    """Read a block into ``pieces``; returns whether it is another one than was written."""
    disk.read_at(descriptor, pieces, index * BLOCK, manifest.directory, file)
    return digest_of(pieces) != manifest.files[file].blocks[index]


def nested(manifest: Manifest, fillings: list[Filling]) -> Callable[[Json], torch.Tensor]:
    """For ``decode``: gives tensors, and notes in ``fillings`` what they are to be filled from."""

    def give(told: Json) -> torch.Tensor:
        stored = manifest.within(told)
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        fillings.append((tensor, stored))
        return tensor

    return give
