"""Writes the weights of a sharded model as a safetensors checkpoint, in the layout of ``save_pretrained``."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from polyshard.checkpoint.storage.local import LocalAttempt, LocalStorage
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.inspect import ShardedModel, savable_model
from polyshard.io.files import path_of, sync_directory
from polyshard.io.memory import SAFETENSORS_NAMES
from polyshard.io.progress import report_progress, reporting_progress
from polyshard.state.exchange import (
    coordinates,
    from_first,
    notify_listeners,
    require_seen,
    speaks,
    together,
)
from polyshard.state.streaming import whole_weights
from torch import nn

from . import _private
from .conversion import Conversion, Part, StandIn, converted, covered, listed, transfers_of
from .files import INDEX, WEIGHTS, OpenFiles, SavedTensor, castable, header_of, read_header, write_all
from .loading import Ranks
from .tensors import ModelTensor, refuse_hollow, shared_out, tensors_of

#: For ranks that have not one file system.
_ALONE = " Pass ranks='first' to write from rank 0 alone."
#: Files of this form are of a checkpoint in several files.
STALE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


def save(
    model: nn.Module,
    folder: Path | str,
    *,
    ranks: Ranks = "all",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    convert: Conversion | None = None,
) -> None:
    """Write the sharded ``model`` into ``folder`` so that ``from_pretrained(folder)`` reads it.

    Every rank calls it, between steps. The files are ``model.safetensors``, or several of at most ``max_shard_size``
    and their index, and for a model of Transformers its ``config.json`` and generation settings. They appear when all
    is written; until then ``folder`` is as it was. Weights of an earlier save in it are replaced, other files stay.

    Args:
        model: The outermost sharded module.
        folder: Made where missing.
        ranks: ``"all"`` where all ranks see one file system: each writes the elements that it holds, at their place in
            the files, 16 MiB at a time in each of four threads, and nothing is gathered. ``"first"`` where they do not:
            units are gathered one after the other, and rank 0 writes them, for which it needs memory for two.
        dtype: In which floating-point tensors are written; None for the dtype in which they are kept.
        max_shard_size: Bytes of tensors in one file, a number or text such as ``"5GB"``.
        convert: From the model's tensors to the files', as in ``load``. Of tied tensors it gets one. None for what
            ``save_pretrained`` does where ``model`` is one of Transformers', and for the same names elsewhere.

    Raises:
        ConfigError: an argument cannot be, or ``convert`` leaves out elements.
        UnsupportedError: what is to be done to a tensor cannot be done in parts, or the ranks are pretended, so that
            nobody has the others' elements.
        StateError: inside a step, or ``model`` is not the outermost sharded module.
        RankMismatchError: another rank failed, or ranks see different file systems.
        PolyshardError, OSError: writing failed; nothing is left of it.
        Exception: a listener's, on its rank, once everything is written.
    """
    save_through(
        OpenFiles(writes=True), model, folder, ranks=ranks, dtype=dtype, max_shard_size=max_shard_size, convert=convert
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    shards: Shards
    recipes: Mapping[str, Sequence[Part]]
    """For each tensor of the model, by its first name, where its elements go."""
    parameters: int


def save_through(
    files: OpenFiles,
    model: nn.Module,
    folder: Path | str,
    *,
    ranks: Ranks = "all",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    convert: Conversion | None = None,
) -> None:
    """``save`` by ``files``, which it closes."""
    sharded = savable_model(model, "huggingface.save()")
    collectives, what = sharded.collectives, f"the export to {folder}"
    attempt: LocalAttempt | None = None
    with ExitStack() as stack:
        stack.callback(files.close)
        with together(collectives, f"Preparing {what}"):
            folder = path_of(folder, "folder")
            _refuse_settings(sharded, ranks, dtype)
            held = tensors_of(sharded)
            refuse_hollow(held, sharded.rank)
            plan = _planned(sharded, held, convert, dtype, nbytes_of(max_shard_size))
            if coordinates(collectives):
                stack.callback(
                    _leave_no_empty, [each for each in (folder, *folder.parents) if not os.path.exists(each)]
                )
                attempt = stack.enter_context(LocalStorage().attempt(folder, None))
                _begin(sharded.module, attempt.path, plan, dtype)
        given = from_first(collectives, (ranks, None if attempt is None else attempt.path.name))
        with together(collectives, f"Opening {what}"):
            if given[0] != ranks:
                raise ConfigError(
                    f"save() was given ranks={given[0]!r} on rank 0 and {ranks!r} on rank {sharded.rank}."
                )
            directory = folder / given[1]
            writes = ranks == "all" or coordinates(collectives)
        require_seen(collectives, directory, directory.is_dir() or not writes, _ALONE)
        with together(collectives, f"Opening {what}"):
            placed: dict[str, SavedTensor] = {}
            for path in [directory / name for name in plan.shards.files] if writes else ():
                placed.update(read_header(path))
                files.open([path])
        if ranks == "all":
            with together(collectives, f"Writing {what}"), sharded.reporting_progress(model, f"Saving {folder}"):
                _write((shared_out(each) for each in held if each.unit is not None), plan, placed, files)
        else:
            by_name = {each.names[0]: each for each in held}
            done, total = 0, sum(each.nbytes for each in held)
            for names, wholes in whole_weights(sharded, (0,)):
                with together(collectives, f"Writing {what}"):
                    pairs = zip(names, wholes, strict=True)
                    with reporting_progress(None):
                        _write((by_name[name].of(whole) for name, whole in pairs), plan, placed, files)
                    done += sum(by_name[name].nbytes for name in names)
                    # Other ranks write nothing, and get no names.
                    with sharded.reporting_progress(model, f"Saving {folder}") if writes else reporting_progress(None):
                        report_progress(done, total)
        with together(collectives, f"Writing {what}"):
            if ranks == "all" and coordinates(collectives):
                _write((each for each in held if each.unit is None), plan, placed, files)
            if writes:
                files.sync()
        with together(collectives, f"Committing {what}"):
            if attempt is not None:
                _commit(attempt.path, folder, plan.shards)
    notify_listeners(collectives, f"{what}, which is written", partial(sharded.notify_saved, model, folder))


def require_saveable(model: nn.Module) -> None:
    """Raise where ``save`` with its defaults would refuse what ``model`` is, whatever the folder. Exchanges nothing.

    Raises ConfigError, UnsupportedError, StateError: as ``save``.
    """
    sharded = savable_model(model, "huggingface.save()")
    held = tensors_of(sharded)
    refuse_hollow(held, sharded.rank)
    _planned(sharded, held, None, None, nbytes_of("5GB"))


def _leave_no_empty(made: Iterable[Path]) -> None:
    """Remove folders that are empty again, where nothing was saved into them."""
    with suppress(OSError):
        for folder in made:
            folder.rmdir()


def _refuse_settings(sharded: ShardedModel, ranks: Ranks, dtype: torch.dtype | None) -> None:
    if ranks not in ("all", "first"):
        raise ConfigError(f"ranks must be 'all' or 'first', not {ranks!r}.")
    if dtype is not None and not (
        dtype.is_floating_point and SAFETENSORS_NAMES.get(dtype) and castable(torch.float32, dtype)
    ):
        raise ConfigError(f"dtype must be float64, float32, float16 or bfloat16, not {dtype}.")
    packed = next((unit for unit in sharded.units if unit.packed), None)
    if dtype is not None and packed is not None:
        raise ConfigError(
            f"save() would cast '{packed.parameters[0].name}' to {dtype} (rank {sharded.rank}), whose bytes are not "
            "numbers. Leave dtype out."
        )
    if sharded.collectives.world_size > 1 and not speaks(sharded.collectives):
        raise UnsupportedError(
            f"One rank of a pretended world of {sharded.collectives.world_size} has only its own elements (rank "
            f"{sharded.rank}), which are no checkpoint. Save from ranks that exist."
        )


def _planned(
    sharded: ShardedModel, held: Sequence[ModelTensor], convert: Conversion | None, dtype: torch.dtype | None, most: int
) -> _Plan:
    module = sharded.module
    kept, made = files_of(module, held, convert)
    recipes: dict[str, list[Part]] = {each.names[0]: [] for each in held}
    for name, tensor in made.items():
        for part in tensor.parts:
            recipes[kept[part.source].names[0]].append(part.turned(name))
    written = {
        name: (dtype if dtype is not None and each.dtype.is_floating_point else each.dtype, tuple(each.shape))
        for name, each in made.items()
    }
    nameless = [f"'{name}' ({each})" for name, (each, _) in written.items() if SAFETENSORS_NAMES.get(each) is None]
    if nameless:
        raise UnsupportedError(f"Safetensors files cannot hold the dtypes of {', '.join(nameless)}.")
    named = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    parameters = sum(each.numel for each in held if each.names[0] in named)
    return _Plan(divided(written, most), recipes, parameters)


def files_of(
    module: nn.Module, held: Sequence[ModelTensor], convert: Conversion | None
) -> tuple[dict[str, ModelTensor], dict[str, StandIn]]:
    """The tensors in ``held`` by the one name that each has for files, and what the files have, made of these.

    ``convert``: None for what the class of ``module`` does when it saves.

    Raises ConfigError, UnsupportedError: not all elements come into the files.
    """
    shapes = {name: each.shape for each in held for name in each.names}
    away, left_out = _private.tied_away(module), _private.left_out_of_files(module)
    kept = {next((name for name in each.names if name not in away), each.names[0]): each for each in held}
    # In the model's order: tensors that are computed with together are written together.
    order = [name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())]
    kept = {name: kept[name] for name in dict.fromkeys(order) if name in kept} | kept
    tensors = {name: (each.shape, each.dtype) for name, each in kept.items()}
    made = converted(convert or _private.to_files(module, shapes), tensors, "the model")
    if not made:
        raise ConfigError("The conversion returns no tensors, so there is nothing to save.")
    used = dict.fromkeys(kept, 0)
    for name, tensor in made.items():
        if covered(tensor.parts) != tensor.numel():
            raise UnsupportedError(f"The conversion leaves elements of '{name}' without values.")
        for part in tensor.parts:
            used[part.source] += part.box.numel
    lost = [name for name, each in kept.items() if used[name] < each.numel and not (convert is None and left_out(name))]
    if lost:
        raise ConfigError(
            f"The conversion leaves out {listed(lost)}, or parts of them. Put all of them into the files."
        )
    return kept, made


def _begin(module: nn.Module, directory: Path, plan: _Plan, dtype: torch.dtype | None) -> None:
    """Make the files in their full size, with their headers: every rank then writes at its own places."""
    for name, tensors in plan.shards.files.items():
        header = header_of(tensors)
        with (directory / name).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + sum(math.prod(shape) * dtype.itemsize for dtype, shape in tensors.values()))
    index = plan.shards.index(plan.parameters)
    if index is not None:
        (directory / INDEX).write_text(index, encoding="utf-8")
    kinds = [kind for tensors in plan.shards.files.values() for kind, _ in tensors.values() if kind.is_floating_point]
    _private.write_config(module, directory, dtype or (kinds[0] if kinds else torch.get_default_dtype()))


def _write(held: Iterable[ModelTensor], plan: _Plan, placed: Mapping[str, SavedTensor], files: OpenFiles) -> None:
    write_all(
        (transfer for each in held for transfer in transfers_of(each.chunks, plan.recipes[each.names[0]], placed)),
        files,
    )


def _commit(directory: Path, folder: Path, shards: Shards) -> None:
    """Move everything from ``directory`` into ``folder``.

    A process that is killed in between leaves weights that are whole or a folder without an index or
    ``model.safetensors``, which nothing takes for a checkpoint.
    """
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    last = WEIGHTS if WEIGHTS in shards.files else INDEX
    if last == INDEX:
        (folder / WEIGHTS).unlink(missing_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    for path in sorted(directory.iterdir(), key=lambda path: path.name == last):
        path.replace(folder / path.name)
    for path in folder.iterdir():
        if STALE.fullmatch(path.name) and path.name not in shards.files:
            path.unlink()
    sync_directory(folder)


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of a checkpoint to be written."""

    files: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]
    """For each file its tensors in order, with dtype and shape."""
    total_nbytes: int

    def index(self, parameters: int) -> str | None:
        """The text of the index; None where one file holds all. ``parameters``: their number of elements."""
        if list(self.files) == [WEIGHTS]:
            return None
        weight_map = {name: file for file, tensors in self.files.items() for name in tensors}
        metadata = {"total_parameters": parameters, "total_size": self.total_nbytes}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def divided(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], most: int) -> Shards:
    """``tensors`` in their order, in files of at most ``most`` bytes of tensors, or of one tensor that is larger."""
    groups: list[list[str]] = [[]]
    filled = total = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
        total += nbytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    # Wider elements first: each then begins at a multiple of its size.
    ordered = [sorted(group, key=lambda name: (-tensors[name][0].itemsize, name)) for group in groups]
    files = zip(names if len(groups) > 1 else [WEIGHTS], ordered, strict=True)
    return Shards({file: {name: tensors[name] for name in group} for file, group in files}, total)


def nbytes_of(size: int | str) -> int:
    """``size`` in bytes: a number, or text such as ``"5GB"`` or ``"512 MiB"``.

    Raises ConfigError: it is neither, or not positive.
    """
    found = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        found = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
    if found <= 0:
        raise ConfigError(f"max_shard_size must be bytes above 0, a number or text such as '5GB', not {size!r}.")
    return found
