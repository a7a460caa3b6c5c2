"""Bytes between files and the memory of a rank, a bounded number of them at a time."""

from __future__ import annotations

import math
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..errors import PolyshardError, StateError
from ..state.boxes import Box
from ..state.sharded import Chunk
from .files import SavedTensor
from .parts import Part, part_of, slabs, span

#: Bytes on their way in one thread: enough that a disk answers at its full rate.
STAGED_NBYTES = 16 * 2**20
#: Requests that a fast local disk wants at once.
THREADS = 4


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of a tensor in a file, and the memory that gets or gives its elements."""

    tensor: SavedTensor
    box: Box
    view: torch.Tensor
    """Shape ``box.sizes``."""


def transfers_of(
    chunks: Iterable[Chunk], parts: Sequence[Part], tensors: Mapping[str, SavedTensor]
) -> Iterator[Transfer]:
    """What moves for ``chunks`` of a tensor that is put together of ``parts`` of ``tensors``."""
    for chunk in chunks:
        for part in parts:
            inside = part.within(chunk.box)
            if inside is not None:
                view = inside.as_source(part_of(chunk.view, chunk.box, inside.box))
                yield Transfer(tensors[inside.source], inside.source_box, view)


class Reader(Protocol):
    """Reads files. Called by several threads at once."""

    def read(self, file: Path, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of ``file`` from ``offset`` on."""


class Writer(Protocol):
    """Writes to files that have their size already. Called by several threads at once."""

    def write(self, file: Path, offset: int, memory: memoryview) -> None:
        """Put the bytes of ``memory`` into ``file`` from ``offset`` on."""


class OpenFiles:
    """Files of this machine, opened once each. A ``Reader`` and a ``Writer``; to be closed."""

    def __init__(self, *, writes: bool = False) -> None:
        self._flags = os.O_RDWR if writes else os.O_RDONLY
        self._writes = writes
        self._descriptors: dict[Path, int] = {}

    def open(self, files: Iterable[Path]) -> None:
        """Open ``files``: before threads ask for them."""
        for file in files:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, self._flags)

    def read(self, file: Path, offset: int, memory: memoryview) -> None:
        """See ``Reader``."""
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptors[file], [memory[done:]], offset + done)
            if not count:
                raise StateError(f"{file} ended at byte {offset + done:,} while it was read. Copy it again.")
            done += count

    def write(self, file: Path, offset: int, memory: memoryview) -> None:
        """See ``Writer``."""
        done = 0
        while done < len(memory):
            done += os.pwritev(self._descriptors[file], [memory[done:]], offset + done)

    def sync(self) -> None:
        """Make what was written durable."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def close(self) -> None:
        """Close all."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def read_all(transfers: Iterable[Transfer], reader: Reader) -> None:
    """Fill the views of ``transfers``, cast to their dtypes. On the host at most four times 16 MiB are on their way."""
    tasks = [
        (each, box)
        for each in transfers
        for box in slabs(each.tensor.shape, each.box, STAGED_NBYTES // each.tensor.dtype.itemsize, gaps=True)
        if box.numel
    ]
    # As they lie in the files: ranges that follow each other are read ahead by the system.
    tasks.sort(key=lambda task: (task[0].tensor.file, task[0].tensor.offset, span(task[0].tensor.shape, task[1])))

    def read(task: tuple[Transfer, Box], staging: torch.Tensor) -> None:
        transfer, box = task
        tensor, view = transfer.tensor, part_of(transfer.view, transfer.box, box)
        first, stop = span(tensor.shape, box)
        begin, nbytes = tensor.offset + first * tensor.dtype.itemsize, (stop - first) * tensor.dtype.itemsize
        direct = view.device.type == "cpu" and view.dtype == tensor.dtype and view.is_contiguous()
        if direct and stop - first == box.numel:
            reader.read(tensor.file, begin, memory_of(view))
            return
        staged = staging.narrow(0, 0, nbytes)
        reader.read(tensor.file, begin, memory_of(staged))
        # Cast where the elements stay: half of the bytes travel where the file has half of the width.
        elements = staged.view(tensor.dtype).to(view.device)
        view.copy_(elements.as_strided(box.sizes, _row_major(tensor.shape)))

    _in_threads(tasks, read, (transfer.view.device for transfer, _ in tasks))


def write_all(transfers: Iterable[Transfer], writer: Writer) -> None:
    """Write the views of ``transfers`` to their files, cast to the dtypes there."""
    tasks = [
        (each, box)
        for each in transfers
        for box in slabs(each.tensor.shape, each.box, STAGED_NBYTES // each.tensor.dtype.itemsize, gaps=False)
        if box.numel
    ]

    def write(task: tuple[Transfer, Box], staging: torch.Tensor) -> None:
        transfer, box = task
        tensor, view = transfer.tensor, part_of(transfer.view, transfer.box, box)
        first, _ = span(tensor.shape, box)
        begin = tensor.offset + first * tensor.dtype.itemsize
        if view.device.type == "cpu" and view.dtype == tensor.dtype and view.is_contiguous():
            writer.write(tensor.file, begin, memory_of(view))
            return
        staged = staging.narrow(0, 0, box.numel * tensor.dtype.itemsize)
        # Cast where the elements are: less travels where the file is narrower, and the host needs no copy of its own.
        elements = view if view.device.type == "cpu" else view.to(tensor.dtype)
        staged.view(tensor.dtype).view(box.sizes).copy_(elements)
        writer.write(tensor.file, begin, memory_of(staged))

    _in_threads(tasks, write, (transfer.view.device for transfer, _ in tasks))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    # A dimension of extent 1 may have any stride, which view(-1) would keep where there is one element.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _in_threads(
    tasks: Sequence[tuple[Transfer, Box]],
    work: Callable[[tuple[Transfer, Box], torch.Tensor], None],
    devices: Iterable[torch.device],
) -> None:
    if not tasks:
        return
    device = next((device for device in devices if device.type == "cuda"), None)
    stream = None if device is None else torch.cuda.current_stream(device)
    most = max(_staged(task) for task in tasks)
    stages: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    threads = min(THREADS, len(tasks))
    for _ in range(threads):
        stages.put(torch.empty(most, dtype=torch.uint8, pin_memory=device is not None))

    def run(task: tuple[Transfer, Box]) -> None:
        staging = stages.get()
        try:
            # Ordered with what the caller computes before and after.
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                work(task, staging)
        finally:
            stages.put(staging)

    with ThreadPoolExecutor(threads, thread_name_prefix="polyshard-files") as pool:
        waiting = [pool.submit(run, task) for task in tasks]
        done, left = wait(waiting, return_when=FIRST_EXCEPTION)
        for future in left:
            future.cancel()
        for future in done:
            error = future.exception()
            if error is not None:
                raise _explained(error)


def _staged(task: tuple[Transfer, Box]) -> int:
    transfer, box = task
    first, stop = span(transfer.tensor.shape, box)
    return (stop - first) * transfer.tensor.dtype.itemsize


def _explained(error: BaseException) -> BaseException:
    if isinstance(error, (PolyshardError, OSError)):
        return error
    wrapped = PolyshardError(f"Moving values between files and the model failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
