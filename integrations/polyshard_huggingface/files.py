"""Safetensors files: the tensors in them by name and place, and bytes between them and the memory of a rank."""

from __future__ import annotations

import json
import math
import os
import queue
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from polyshard.checkpoint.encoding import MalformedError, a_shape, a_text, an_object, parse
from polyshard.errors import ConfigError, PolyshardError, StateError
from polyshard.io.boxes import Box, box_within, row_major, slabs, span
from polyshard.io.files import MOST, carried_out, naming, read_at, write_at
from polyshard.io.memory import SAFETENSORS_DTYPES, SAFETENSORS_NAMES, flat_bytes, view_of
from polyshard.io.progress import report_progress
from polyshard.state.source import listed
from safetensors import SafetensorError, safe_open

#: What Transformers calls them.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Headers are padded to a multiple of this, so that tensors lie where their dtype needs it.
_ALIGNMENT = 8
#: Bytes of an index that is read: what the library allows the header of a file.
_LONGEST_INDEX = 100_000_000


#: Among these a value keeps its meaning when it is cast.
_CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def castable(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of ``saved`` may be read as ``wanted``."""
    return saved == wanted or (saved in _CASTABLE and wanted in _CASTABLE)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a file: row-major, without gaps."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Where its first byte lies in the file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Saved:
    """The tensors of a checkpoint, by name."""

    path: Path
    tensors: Mapping[str, SavedTensor]

    def identity(self) -> list[Any]:
        """Equal for ranks that were given the same checkpoint, whatever its folder is called there."""
        return [[each.name, str(each.dtype), each.shape, each.file.name, each.offset] for each in self.tensors.values()]


def open_saved(path: Path) -> Saved:
    """Read the headers of the checkpoint at ``path``: a folder, one ``.safetensors`` file, or an index of several.

    Raises:
        ConfigError: there is no such checkpoint.
        StateError: a file of it is gone, too short, or no safetensors file.
    """
    if path.is_dir():
        for name in (WEIGHTS, INDEX):
            if (path / name).is_file():
                return open_saved(path / name)
        alone = sorted(path.glob("*.safetensors"))
        if len(alone) == 1:
            return open_saved(alone[0])
        raise ConfigError(
            f"{path} holds neither '{WEIGHTS}' nor '{INDEX}'"
            + (f", but {len(alone)} other .safetensors files: give one of them" if alone else "")
            + ". Pass the folder that save_pretrained wrote, or one of its files."
        )
    if not path.is_file():
        raise ConfigError(
            f"There is no checkpoint at {path}. Pass a folder on this machine that save_pretrained wrote, or one of "
            "its files; a name on the Hub is downloaded by huggingface_hub.snapshot_download first."
        )
    if path.suffix == ".safetensors":
        return Saved(path, read_header(path))
    return Saved(path, _read_index(path))


def _read_index(path: Path) -> dict[str, SavedTensor]:
    try:
        size = path.stat().st_size
        if size > _LONGEST_INDEX:
            raise MalformedError(f"it has {size:,} bytes")
        weight_map = an_object(an_object(parse(path.read_bytes()), "it")["weight_map"], "weight_map")
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(a_text(file, f"the file of {name!r}"), []).append(name)
    except (MalformedError, KeyError) as error:
        raise StateError(f"{path} is no index of safetensors files ({type(error).__name__}: {error}).") from error
    outside = [file for file in files if os.path.isabs(file) or ".." in Path(file).parts]
    if outside:
        raise StateError(
            f"{path} names files outside of its folder: {listed(outside)}. Take the checkpoint from where you trust "
            "it, or put the files and the index into one folder."
        )
    absent = [file for file in files if not os.path.isfile(path.parent / file)]
    if absent:
        raise StateError(f"{path} names files that are not there: {listed(absent)}. Copy the whole checkpoint.")
    found: dict[str, SavedTensor] = {}
    for file, names in files.items():
        held = read_header(path.parent / file)
        lacking = [name for name in names if name not in held]
        if lacking:
            raise StateError(
                f"{path} says that {file} holds {listed(lacking)}, which it does not: the files are of "
                "several checkpoints. Copy the whole checkpoint again."
            )
        found.update({name: tensor for name, tensor in held.items() if weight_map.get(name, file) == file})
    return found


def read_header(path: Path) -> dict[str, SavedTensor]:
    """The tensors in the safetensors file ``path``, by name. Raises StateError: it is none, or is damaged.

    The library reads it. It refuses bytes that are of no tensor, or of two: so they lie one behind another, to the end.
    """
    try:
        with naming(path), safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            told = {name: (each.get_dtype(), a_shape(each.get_shape(), repr(name))) for name, each in slices.items()}
        with path.open("rb") as stream:
            # Of two entries with one name and the same bytes the library takes the last.
            parse(stream.read(int.from_bytes(stream.read(8), "little")))
    except (SafetensorError, MalformedError) as error:
        raise StateError(
            f"{path} is damaged, was cut off, or is no safetensors file: {error}. Copy it again."
        ) from error
    found: dict[str, SavedTensor] = {}
    end = 0
    for name, (kind, shape) in told.items():
        dtype = SAFETENSORS_DTYPES.get(kind)
        if dtype is None:
            raise StateError(f"'{name}' in {path} has the dtype {kind}, which this torch does not have.")
        found[name] = SavedTensor(name, dtype, shape, path, end)
        end += found[name].nbytes
    begin = path.stat().st_size - end
    return {name: replace(each, offset=begin + each.offset) for name, each in found.items()}


def header_of(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """The beginning of a file of ``tensors`` in this order.

    Not by the library, which writes whole tensors of one process. Wider dtypes must come first, so that each tensor
    begins at a multiple of its element's size.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_NAMES.get(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


#: Bytes on their way in one thread: enough that a disk answers at its full rate.
STAGED_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of a tensor in a file, and the memory that gets or gives its elements."""

    tensor: SavedTensor
    box: Box
    view: torch.Tensor
    """Shape ``box.sizes``."""


class OpenFiles:
    """Files of this machine, opened once each, which several threads read or write at once. To be closed."""

    def __init__(self, *, writes: bool = False) -> None:
        self._flags = os.O_RDWR if writes else os.O_RDONLY
        self._descriptors: dict[Path, int] = {}

    def open(self, files: Iterable[Path]) -> None:
        """Open ``files``: before threads ask for them."""
        for file in files:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, self._flags)

    def read(self, file: Path, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of ``file`` from ``offset`` on."""
        if not read_at(self._descriptors[file], [memory], offset, file):
            raise StateError(f"{file} ended before byte {offset + len(memory):,} while it was read. Copy it again.")

    def write(self, file: Path, offset: int, memory: memoryview) -> None:
        """Put the bytes of ``memory`` into ``file``, which has its size already, from ``offset`` on."""
        write_at(self._descriptors[file], [memory], offset, file)

    def sync(self) -> None:
        """Make all writes durable."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def read_all(transfers: Iterable[Transfer], files: OpenFiles) -> None:
    """Fill the views of ``transfers``, cast to their dtypes. On the host at most four times 16 MiB are on their way."""
    tasks = _tasks(transfers, gaps=True)
    # As they lie in the files: ranges that follow each other are read ahead by the system.
    tasks.sort(key=lambda task: (task.tensor.file, task.tensor.offset, span(task.tensor.shape, task.box)))

    def read(task: Transfer, staging: torch.Tensor) -> None:
        tensor, view = task.tensor, task.view
        first, stop = span(tensor.shape, task.box)
        begin, nbytes = tensor.offset + first * tensor.dtype.itemsize, (stop - first) * tensor.dtype.itemsize
        if _is_as_in_file(task) and stop - first == task.box.numel:
            files.read(tensor.file, begin, view_of(flat_bytes(view)))
            return
        staged = staging.narrow(0, 0, nbytes)
        files.read(tensor.file, begin, view_of(staged))
        # Cast where the elements stay: half of the bytes travel where the file has half of the width.
        elements = staged.view(tensor.dtype).to(view.device)
        view.copy_(elements.as_strided(task.box.sizes, row_major(tensor.shape)))

    _in_threads(tasks, read)


def write_all(transfers: Iterable[Transfer], files: OpenFiles) -> None:
    """Write the views of ``transfers`` to their files, cast to the dtypes there."""

    def write(task: Transfer, staging: torch.Tensor) -> None:
        tensor, view = task.tensor, task.view
        first, _ = span(tensor.shape, task.box)
        begin = tensor.offset + first * tensor.dtype.itemsize
        if _is_as_in_file(task):
            files.write(tensor.file, begin, view_of(flat_bytes(view)))
            return
        staged = staging.narrow(0, 0, task.box.numel * tensor.dtype.itemsize)
        # Cast where the elements are: less travels where the file is narrower, and the host needs no copy of its own.
        elements = view if view.device.type == "cpu" else view.to(tensor.dtype)
        staged.view(tensor.dtype).view(task.box.sizes).copy_(elements)
        files.write(tensor.file, begin, view_of(staged))

    _in_threads(_tasks(transfers, gaps=False), write)


def _tasks(transfers: Iterable[Transfer], *, gaps: bool) -> list[Transfer]:
    """``transfers`` in parts of at most ``STAGED_NBYTES`` of the file."""
    return [
        Transfer(each.tensor, box, box_within(each.view, each.box, box))
        for each in transfers
        for box in slabs(each.tensor.shape, each.box, STAGED_NBYTES // each.tensor.dtype.itemsize, gaps=gaps)
        if box.numel
    ]


def _is_as_in_file(task: Transfer) -> bool:
    view = task.view
    return view.device.type == "cpu" and view.dtype == task.tensor.dtype and view.is_contiguous()


def _in_threads(tasks: Sequence[Transfer], work: Callable[[Transfer, torch.Tensor], None]) -> None:
    if not tasks:
        return
    device = next((task.view.device for task in tasks if task.view.device.type == "cuda"), None)
    stream = None if device is None else torch.cuda.current_stream(device)
    spans = ((task.tensor.dtype.itemsize, *span(task.tensor.shape, task.box)) for task in tasks)
    most = max((stop - first) * itemsize for itemsize, first, stop in spans)
    stages: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for _ in range(min(MOST, len(tasks))):
        stages.put(torch.empty(most, dtype=torch.uint8, pin_memory=device is not None))

    def run(task: Transfer) -> None:
        staging = stages.get()
        try:
            # Ordered with what the caller computes before and after.
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                work(task, staging)
        finally:
            stages.put(staging)

    try:
        ends = list(accumulate(task.box.numel * task.tensor.dtype.itemsize for task in tasks))
        results = carried_out((partial(run, task) for task in tasks), len(tasks), threads=MOST)
        for _, done in zip(results, ends, strict=True):
            report_progress(done, ends[-1])
    except (PolyshardError, OSError):
        raise
    except Exception as error:
        raise PolyshardError(
            f"Moving values between files and the model failed: {type(error).__name__}: {error}"
        ) from error
