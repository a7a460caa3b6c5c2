"""Elements out of a checkpoint's files, each block compared with its digest: for ``load``, ``read`` and ``verify``."""

from __future__ import annotations

import math
import operator
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch

from ..errors import CheckpointDamagedError, ConfigError, PolyshardError, StateError
from ..io.boxes import Box, box_within, row_major, span
from ..io.files import MOST, carried_out, damaged, digest_of
from ..io.memory import flat_bytes, memory_of_machine, view_of
from ..io.progress import report_progress
from ..state.sharded import MODEL, OPTIMIZER
from ..state.source import Entry, Source, chunks_of, in_lines
from .encoding import Json, checked, decode, tensor_entry
from .manifest import BLOCK, NAME, Manifest, Marker, StoredTensor
from .storage import InputFile, Place, place_of, storage_of

#: Of one block, up to which each is read to its place by itself.
_MOST_PARTS = 64
#: A tensor or a stand-in for one, and what it is to be filled from.
Filling = tuple[torch.Tensor, StoredTensor]
_Path = tuple[Any, ...]


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
    order = dict(sorted(blocks.items()))
    buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    for _ in range(min(MOST, len(order))):
        buffers.put(bytearray(BLOCK))
    with ExitStack() as stack, torch.no_grad():
        storage = storage_of(manifest.directory)
        inputs = {
            file: stack.enter_context(storage.opened(manifest.directory, file, manifest.files[file].size))
            for file in {file for file, _ in order}
        }
        results = carried_out(_calls(manifest, inputs, order, buffers), len(order))
        ends = list(accumulate(min(BLOCK, manifest.files[file].size - index * BLOCK) for file, index in order))
        for _, parts, done in zip(results, order.values(), ends, strict=True):
            for each in parts:
                each.left -= 1
                if not each.left:
                    each.end()
            report_progress(done, ends[-1])


def _wanted(names: Sequence[str], target: torch.Tensor, stored: StoredTensor) -> Iterator[_Wanted]:
    itemsize = stored.dtype.itemsize
    for have in chunks_of(target):
        for number, common in stored.overlapping(have.box):
            box, at = stored.box(number), int(stored.at[number])
            start = tuple(map(operator.sub, common.offsets, box.offsets))
            first, stop = span(box.sizes, Box(start, common.sizes))
            part = box_within(have.view, have.box, common)
            strides = None if stop - first == common.numel else row_major(box.sizes)
            file = names[stored.files[number]]
            yield _Wanted(file, at + first * itemsize, at + stop * itemsize, part, strides)


def _calls(
    manifest: Manifest,
    inputs: Mapping[str, InputFile],
    blocks: Mapping[tuple[str, int], list[_Wanted]],
    buffers: queue.SimpleQueue[bytearray],
) -> Iterator[Callable[[], None]]:
    for (file, index), parts in blocks.items():
        for each in parts:
            if each.memory is None:
                each.begin()
        yield partial(_fetch, manifest, inputs[file], file, index, parts, buffers)


def _fetch(
    manifest: Manifest,
    handle: InputFile,
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
        if _read(manifest, handle, file, index, pieces or [memory]):
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


def _differs(
    manifest: Manifest, handle: InputFile, file: str, index: int, buffers: queue.SimpleQueue[bytearray]
) -> bool:
    buffer = buffers.get()
    try:
        size = min(BLOCK, manifest.files[file].size - index * BLOCK)
        return _read(manifest, handle, file, index, [memoryview(buffer)[:size]])
    finally:
        buffers.put(buffer)


def _read(manifest: Manifest, handle: InputFile, file: str, index: int, pieces: list[memoryview]) -> bool:
    """Read a block into ``pieces``; returns whether it is another one than was written."""
    if not handle.read(pieces, index * BLOCK):
        raise damaged(manifest.directory, f"'{file}' ends within byte {index * BLOCK:,} and those behind it")
    return digest_of(pieces) != manifest.files[file].blocks[index]


def nested(manifest: Manifest, fillings: list[Filling]) -> Callable[[Json], torch.Tensor]:
    """For ``decode``: gives tensors, and notes in ``fillings`` what they are to be filled from."""

    def give(entry: Json) -> torch.Tensor:
        stored = manifest.within(entry)
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        fillings.append((tensor, stored))
        return tensor

    return give


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
    """What ``save`` wrote, by path: ``("model", name)``, ``("optimizer", "state", name, key)``,
    ``("optimizer", "param_groups", index, setting)``.
    """

    def __init__(self, manifest: Manifest) -> None:
        _require_memory(manifest, manifest.in_values)
        self._manifest = manifest
        self.label = f"the checkpoint {manifest.directory}"
        self.complete = manifest.complete
        self._paths: dict[str, _Path] = {}
        self._stored: dict[str, StoredTensor | Json] = {}
        for name, stored in manifest.model.items():
            self._add((MODEL, name), stored)
        for name, first in manifest.aliases.items():
            self._add((MODEL, name), manifest.model[first])
        if manifest.optimizer is None:
            return
        for name, states in manifest.optimizer.state.items():
            for key, value in states.items():
                self._add((OPTIMIZER, "state", name, key), value)
        for index, group in enumerate(manifest.optimizer.groups):
            for setting, entry in group.items():
                tensor = tensor_entry(entry)
                self._add(
                    (OPTIMIZER, "param_groups", index, setting), entry if tensor is None else manifest.within(tensor)
                )

    def read(self, targets: dict[str, Any]) -> None:
        fillings: list[Filling] = []
        with checked(self._manifest.directory, NAME):
            for key, target in targets.items():
                stored = self._stored[key]
                if isinstance(stored, StoredTensor):
                    fillings.append((target, stored))
                else:
                    targets[key] = decode(stored, nested(self._manifest, fillings))
        fill(self._manifest, fillings)

    def entry(self, key: str) -> Entry | None:
        stored = self._stored.get(key)
        if not isinstance(stored, StoredTensor):
            return None
        return Entry(stored.shape, stored.dtype, [Box.whole(stored.shape)] if stored.is_whole else stored.boxes())

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of what the model has, and the name under which it is saved."""
        return self._manifest.aliases

    @cached_property
    def extra(self) -> Mapping[str, Any]:
        """The user's, and of rank 0."""
        found: Mapping[str, Any] = self._read(self._manifest.extra)
        return found

    @cached_property
    def precision(self) -> Mapping[str, Mapping[str, Any]]:
        """State of precision casters by name of a unit."""
        found: Mapping[str, Mapping[str, Any]] = self._read(self._manifest.precision)
        return found

    def _read(self, entry: Json) -> Any:
        fillings: list[Filling] = []
        with checked(self._manifest.directory, NAME):
            found = decode(entry, nested(self._manifest, fillings))
        fill(self._manifest, fillings)
        return found

    def _add(self, path: _Path, stored: StoredTensor | Json) -> None:
        # No name has the sign between.
        key = "\0".join(map(str, path))
        self._paths[key] = path
        self._stored[key] = stored


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
    aliases = (manifest.model[first] for first in manifest.aliases.values())
    _require_memory(manifest, (*(stored for _, stored in manifest.tensors()), *aliases))
    with readable(directory):
        source = StoredSource(manifest)
        paths = source.paths()
        values: dict[str, Any] = {key: source.blank(key) for key in paths}
        source.read(values)
        extra = source.extra
    found: dict[str, Any] = {MODEL: {}}
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for key, path in paths.items():
        if path[0] == MODEL:
            found[MODEL][path[1]] = values[key]
        elif path[1] == "state":
            state.setdefault(path[2], {})[path[3]] = values[key]
        else:
            groups.setdefault(path[2], {})[path[3]] = values[key]
    if groups:
        found[OPTIMIZER] = {"state": state, "param_groups": [groups[index] for index in sorted(groups)]}
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
    buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    for _ in range(MOST):
        buffers.put(bytearray(BLOCK))
    for file, stored in sorted(manifest.files.items()):
        numbers = range(len(stored.blocks))
        try:
            with storage_of(directory).opened(directory, file, stored.size) as handle:
                calls = (partial(_differs, manifest, handle, file, index, buffers) for index in numbers)
                differing = carried_out(calls, len(numbers))
                found += [str(manifest.block_damaged(file, index)) for index, each in enumerate(differing) if each]
        except CheckpointDamagedError as error:
            found.append(str(error))
    if found:
        raise CheckpointDamagedError(in_lines(found))
