"""Elements out of a checkpoint's files, each block compared with its digest: for ``load``, ``read`` and ``verify``."""

from __future__ import annotations

import math
import operator
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from typing_extensions import override

from ..errors import CheckpointDamagedError, ConfigError, PolyshardError, StateError
from ..inspect import without_wrappers
from ..io.boxes import Box, box_within, contiguous_stride, span
from ..io.files import MOST, carried_out, digest_of
from ..io.memory import flat_bytes, memory_of_machine, view_of
from ..io.progress import report_progress
from ..state.sharded import MODEL, OPTIMIZER
from ..state.source import Entry, Source, chunks_of, in_lines
from .encoding import Json, checked, decode
from .manifest import BLOCK, NAME, Manifest, Marker, StoredTensor
from .storage import InputFile, Place, place_of, storage_of

#: Of one block, up to which each is read to its place by itself.
_MOST_PARTS = 64
#: A tensor or a stand-in for one, and what it is to be filled from.
Filling = tuple[torch.Tensor, StoredTensor]


@dataclass(slots=True)
class _Wanted:
    """Bytes ``low`` to ``high`` of a file, and where they go."""

    file: str
    low: int
    high: int
    part: torch.Tensor
    """The target."""
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
        if self.staged is not None:
            shape, strides = self.part.shape, self.strides
            self.part.copy_(self.staged.view(shape) if strides is None else self.staged.as_strided(shape, strides))
        self.staged = self.memory = None


def fill(manifest: Manifest, fillings: Iterable[Filling]) -> None:
    """Fill tensors in place, of the shapes and dtypes of their sources. Each block that is needed is read once.

    A target on the host whose elements lie as in the file is read into directly, and compared then: after an error
    targets may hold anything.

    Raises:
        CheckpointDamagedError: a file is gone, of another size, or holds something else than was written.
        OSError: reading failed.
    """
    names = list(manifest.files)
    wanted = sorted((each for one in fillings for each in _wanted(names, *one)), key=lambda each: (each.file, each.low))
    blocks: dict[tuple[str, int], list[_Wanted]] = {}
    for each in wanted:
        numbers = range(each.low // BLOCK, -(-each.high // BLOCK))
        each.left = len(numbers)
        for number in numbers:
            blocks.setdefault((each.file, number), []).append(each)
    # By file, then in its order: parts that began in one block end in those behind it.
    for error in _read(manifest, dict(sorted(blocks.items()))):
        if error is not None:
            raise error


def _read(
    manifest: Manifest, blocks: Mapping[tuple[str, int], Sequence[_Wanted]]
) -> Iterator[CheckpointDamagedError | None]:
    """Read blocks into the parts that want them; gives the error of each, or None. Raises as ``fill`` for files."""
    buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    for _ in range(min(MOST, len(blocks))):
        buffers.put(bytearray(BLOCK))
    with ExitStack() as stack, torch.no_grad():
        storage = storage_of(manifest.directory)
        inputs = {
            file: stack.enter_context(storage.opened(manifest.directory, file, manifest.files[file].size))
            for file in {file for file, _ in blocks}
        }

        def calls() -> Iterator[Callable[[], CheckpointDamagedError | None]]:
            for (file, index), parts in blocks.items():
                for each in parts:
                    if each.memory is None:
                        each.begin()
                yield partial(_fetch, manifest, inputs[file], file, index, parts, buffers)

        # Ended before the files are closed.
        results = stack.enter_context(closing(carried_out(calls(), len(blocks))))
        ends = list(accumulate(min(BLOCK, manifest.files[file].size - index * BLOCK) for file, index in blocks))
        for error, parts, done in zip(results, blocks.values(), ends, strict=True):
            for each in parts if error is None else ():
                each.left -= 1
                if not each.left:
                    each.end()
            report_progress(done, ends[-1])
            yield error


def _wanted(names: Sequence[str], target: torch.Tensor, stored: StoredTensor) -> Iterator[_Wanted]:
    itemsize = stored.dtype.itemsize
    for have in chunks_of(target):
        for number, common in stored.overlapping(have.box):
            box, at = stored.box(number), int(stored.at[number])
            start = tuple(map(operator.sub, common.offsets, box.offsets))
            first, stop = span(box.sizes, Box(start, common.sizes))
            part = box_within(have.view, have.box, common)
            strides = None if stop - first == common.numel else contiguous_stride(box.sizes)
            file = names[stored.files[number]]
            yield _Wanted(file, at + first * itemsize, at + stop * itemsize, part, strides)


def _fetch(
    manifest: Manifest,
    handle: InputFile,
    file: str,
    index: int,
    parts: Sequence[_Wanted],
    buffers: queue.SimpleQueue[bytearray],
) -> CheckpointDamagedError | None:
    low = index * BLOCK
    high = min(low + BLOCK, manifest.files[file].size)
    buffer = buffers.get()
    try:
        memory = memoryview(buffer)[: high - low]
        scattered = _scattered(parts, low, high, memory)
        pieces = scattered or [memory]
        handle.read(pieces, low)
        if digest_of(pieces) != manifest.files[file].blocks[index]:
            return manifest.block_damaged(file, index)
        for each in parts if scattered is None else ():
            assert each.memory is not None
            start, stop = max(low, each.low), min(high, each.high)
            each.memory[start - each.low : stop - each.low] = memory[start - low : stop - low]
    finally:
        buffers.put(buffer)
    return None


def _scattered(parts: Sequence[_Wanted], low: int, high: int, spare: memoryview) -> list[memoryview] | None:
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


@contextmanager
def readable(directory: Place, rank: int | None = None) -> Iterator[None]:
    """Name the checkpoint and the rank where torch, pickle and zip raise what does not."""
    try:
        yield
    except (PolyshardError, OSError):
        raise
    except Exception as error:
        where = "" if rank is None else f" on rank {rank}"
        raise StateError(
            f"{directory} is damaged: it cannot be read{where} ({type(error).__name__}: {error}). Load an older "
            "checkpoint."
        ) from error


def _require_memory(manifest: Manifest, tensors: Iterable[StoredTensor]) -> None:
    """Raise StateError where the machine cannot hold ``tensors``: a sparse file is as large as it says."""
    nbytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors)
    most = memory_of_machine()
    if nbytes > most:
        raise StateError(
            f"{manifest.directory} has {nbytes:,} bytes to be read into host memory at once, and this machine has "
            f"{most:,}. Read it on a larger one, or load an older checkpoint."
        )


class StoredSource(Source):
    """What ``save`` wrote, by the paths of its manifest."""

    def __init__(self, manifest: Manifest) -> None:
        _require_memory(manifest, manifest.within.values())
        self._manifest = manifest
        self.label = f"the checkpoint {manifest.directory}"
        self.complete = manifest.complete
        again = {(MODEL, name): manifest.stored[MODEL, first] for name, first in manifest.aliases.items()}
        # No name has the sign between.
        named = {"\0".join(map(str, path)): (path, each) for path, each in {**manifest.stored, **again}.items()}
        self._paths = {key: path for key, (path, _) in named.items()}
        self._stored = {key: each for key, (_, each) in named.items()}
        self.know({})

    @override
    def read(self, targets: dict[str, Any]) -> None:
        fillings: list[Filling] = []
        for key, target in targets.items():
            stored = self._stored[key]
            if isinstance(stored, StoredTensor):
                fillings.append((target, stored))
            else:
                targets[key] = self._decoded(stored, fillings)
        fill(self._manifest, fillings)
        for key in targets:
            path = self._paths[key]
            if path[:2] == (OPTIMIZER, "param_groups") and path[3] in ("params", "param_names"):
                targets[key] = list(map(self.named, targets[key]))

    @override
    def entry(self, key: str) -> Entry | None:
        stored = self._stored.get(key)
        if not isinstance(stored, StoredTensor):
            return None
        return Entry(stored.shape, stored.dtype, [Box.whole(stored.shape)] if stored.is_whole else stored.boxes())

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of what the model has, and the name under which it is saved."""
        return {self.named(name): self.named(first) for name, first in self._manifest.aliases.items()}

    @cached_property
    def extra(self) -> Mapping[str, Any]:
        """The user's, and of rank 0."""
        return self._read(self._manifest.extra)

    @cached_property
    def precision(self) -> Mapping[str, Mapping[str, Any]]:
        """State of precision plugins by name of a unit."""
        return {without_wrappers(name): state for name, state in self._read(self._manifest.precision).items()}

    def _read(self, entry: Json) -> Mapping[str, Any]:
        fillings: list[Filling] = []
        found: Mapping[str, Any] = self._decoded(entry, fillings)
        fill(self._manifest, fillings)
        return found

    def _decoded(self, entry: Json, fillings: list[Filling]) -> Any:
        """The value of ``entry``, with tensors that are filled by ``fillings``."""

        def give(told: Json) -> torch.Tensor:
            stored = self._manifest.within[id(told)]
            tensor = torch.empty(stored.shape, dtype=stored.dtype)
            fillings.append((tensor, stored))
            return tensor

        with checked(self._manifest.directory, NAME):
            return decode(entry, give)


def read(directory: Place) -> dict[str, Any]:
    """All of a checkpoint in host memory, without ranks and without a model; nothing in it is executed.

    Returns:
        ``"model"``: tensors by name, a shared one under each of its names, for ``model.load_state_dict(state,
        strict=False)``: what is not persistent or frozen may have been left out. ``"optimizer"``, where one was saved:
        the form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, for
        ``set_optimizer_state_dict``. ``"extra"``: as it was given. Each tensor has memory of its own.

    Raises:
        StateError: it is no checkpoint, is not committed, or is larger than the machine's memory.
        CheckpointDamagedError: it holds something else than was written.
        ConfigError: it is of one rank of a pretended world, or ``directory`` is no path.
        OSError: reading failed.
    """
    directory = place_of(directory, "directory")
    marker = Marker.read(directory)
    if not marker.complete:
        raise ConfigError(f"{directory} holds the part of one rank of a pretended world, which is no whole state.")
    marker.require_described(directory)
    manifest = Manifest.read(directory, marker)
    aliases = (manifest.stored[MODEL, first] for first in manifest.aliases.values())
    _require_memory(manifest, (*(stored for _, stored in manifest.tensors()), *aliases))
    with readable(directory):
        source = StoredSource(manifest)
        values: dict[str, Any] = {key: source.blank(key) for key in source.paths()}
        source.read(values)
        extra = source.extra
    found: dict[str, Any] = {MODEL: {}}
    for key, path in source.paths().items():
        inside = found
        for name in path[:-1]:
            inside = inside.setdefault(name, {})
        inside[path[-1]] = values[key]
    if OPTIMIZER in found:
        groups = found[OPTIMIZER].pop("param_groups")
        found[OPTIMIZER] = {"state": {}, **found[OPTIMIZER], "param_groups": [groups[each] for each in sorted(groups)]}
    return {**found, "extra": extra}


def verify(directory: Place) -> None:
    """Read all of a checkpoint and compare it with the digests that were taken when it was written.

    Any process may call it, without ranks and without a model; nothing in the checkpoint is executed.

    Args:
        directory: What ``save`` or ``latest`` returned.

    Raises:
        CheckpointDamagedError: a file is gone, or holds something else than was written: names files, and what lies in
            them.
        ConfigError: ``directory`` is no path.
        StateError: it is no checkpoint, or is not committed.
        OSError: reading failed.
    """
    directory = place_of(directory, "directory")
    marker = Marker.read(directory)
    manifest = Manifest.read(directory, marker)
    found: list[str] = []
    try:
        marker.require_described(directory)
    except CheckpointDamagedError as error:
        found.append(str(error))
    for file, stored in sorted(manifest.files.items()):
        blocks: dict[tuple[str, int], list[_Wanted]] = {(file, index): [] for index in range(len(stored.blocks))}
        try:
            found += [str(error) for error in _read(manifest, blocks) if error is not None]
        except CheckpointDamagedError as error:
            found.append(str(error))
    if found:
        raise CheckpointDamagedError(in_lines(found))
