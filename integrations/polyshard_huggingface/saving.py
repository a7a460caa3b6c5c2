"""Writes the weights of a sharded model as a safetensors checkpoint, in the layout of ``save_pretrained``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polyshard
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from polyshard.checkpoint.storage.local import LocalAttempt, LocalStorage
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.inspect import ShardedModel, savable_model, saved_parameters
from polyshard.io.files import path_of, sync_directory, write_at
from polyshard.io.memory import SAFETENSORS_NAMES, pieces_of
from polyshard.io.progress import report_progress
from polyshard.state.exchange import (
    coordinates,
    from_first,
    notify_listeners,
    require_seen,
    speaks,
    together,
)
from torch import nn

from . import _private
from .conversion import Conversion, tensors_of
from .engines import as_saved, saved_as
from .files import INDEX, WEIGHTS, header_of
from .loading import Ranks, require_ranks

#: For ranks that have not one file system.
_ALONE = " Pass ranks='first' to write from rank 0 alone."
#: Files of this form are of a checkpoint in several files.
STALE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


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
    Units are gathered one after the other, as by ``polyshard.stream``; a rank has two at a time, and in host memory one
    tensor.

    Args:
        model: The outermost sharded module.
        folder: Made where missing.
        ranks: ``"all"`` where all ranks see one file system: they share the writing. ``"first"`` where they do not, and
            rank 0 writes.
        dtype: In which floating-point tensors are written; None for the dtype in which they are kept.
        max_shard_size: Bytes of tensors in one file, a number or text such as ``"5GB"``.
        convert: What ``load`` takes, which is done backwards here. None for what ``save_pretrained`` does where
            ``model`` is one of Transformers', and for the same names elsewhere.

    Raises:
        ConfigError: an argument cannot be, or a conversion fails.
        UnsupportedError: a conversion has no way back, or the ranks are pretended, so that nobody has the others'
            elements.
        StateError: inside a step, or ``model`` is not the outermost sharded module.
        RankMismatchError: another rank failed, or ranks see different file systems.
        PolyshardError, OSError: writing failed; nothing is left of it.
        Exception: a listener's, on its rank, once everything is written.
    """
    sharded = savable_model(model, "huggingface.save()")
    collectives, what = sharded.collectives, f"the export to {folder}"
    attempt: LocalAttempt | None = None
    with ExitStack() as stack:
        with together(collectives, f"Preparing {what}", {"ranks": ranks}):
            folder = path_of(folder, "folder")
            _refuse_settings(sharded, ranks, dtype)
            plan = _planned(sharded, convert, dtype, max_shard_size)
            if coordinates(collectives):
                stack.callback(
                    _leave_no_empty, [each for each in (folder, *folder.parents) if not os.path.exists(each)]
                )
                attempt = stack.enter_context(LocalStorage().attempt(folder, None))
                _begin(attempt.path, plan)
                _private.write_config(sharded.module, attempt.path, dtype)
        directory = folder / from_first(collectives, None if attempt is None else attempt.path.name)
        writes = ranks == "all" or coordinates(collectives)
        require_seen(collectives, directory, directory.is_dir() or not writes, _ALONE)
        files: dict[str, int] = {}
        with together(collectives, f"Opening {what}"):
            for name in plan.files if writes else ():
                files[name] = os.open(directory / name, os.O_RDWR)
                stack.callback(os.close, files[name])
        writers = collectives.world_size if ranks == "all" and speaks(collectives) else 1
        mine = {name for number, name in enumerate(plan.places) if number % writers == sharded.rank % writers}
        weights = as_saved(
            model, polyshard.stream(model, dtype=dtype, ranks="all" if ranks == "all" else [0]), convert=convert
        )
        done, total = 0, sum(size - len(header) for header, size in plan.files.values())
        with closing(weights), sharded.reporting_progress(model, f"Saving {folder}"):
            ends = False
            while not ends:
                with together(collectives, f"Writing {what}"):
                    names, tensors = next(weights, ([], None))
                    ends = tensors is None
                    for name, tensor in zip(names, tensors or (), strict=True):
                        file, at = plan.places[name]
                        for piece in pieces_of(tensor) if name in mine else ():
                            write_at(files[file], [piece], at, directory / file)
                            at += len(piece)
                        done += tensor.nbytes
                # Other ranks than those that write get no names.
                if names:
                    report_progress(done, total)
        with together(collectives, f"Writing {what}"):
            for descriptor in files.values():
                os.fsync(descriptor)
        with together(collectives, f"Committing {what}"):
            if attempt is not None:
                _commit(attempt.path, folder, plan.files)
    notify_listeners(collectives, f"{what}, which is written", partial(sharded.notify_saved, model, folder))


def require_saveable(model: nn.Module) -> None:
    """Raise where ``save`` with its defaults would refuse what ``model`` is, whatever the folder. Exchanges nothing.

    Raises ConfigError, UnsupportedError, StateError: as ``save``.
    """
    sharded = savable_model(model, "huggingface.save()")
    _planned(sharded, None, None, "5GB")


def _leave_no_empty(made: Iterable[Path]) -> None:
    """Remove folders that are empty again, where nothing was saved into them."""
    with suppress(OSError):
        for folder in made:
            folder.rmdir()


def _refuse_settings(sharded: ShardedModel, ranks: Ranks, dtype: torch.dtype | None) -> None:
    require_ranks(ranks)
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


@dataclass(frozen=True, slots=True)
class _Plan:
    files: dict[str, tuple[bytes, int]]
    """Of each file its header, and its size."""
    places: dict[str, tuple[str, int]]
    """For each tensor its file, and the byte there at which it begins."""
    index: str | None
    """The text of the index; None where one file holds all."""


def _planned(
    sharded: ShardedModel, convert: Conversion | None, dtype: torch.dtype | None, max_shard_size: int | str
) -> _Plan:
    module, held = sharded.module, tensors_of(sharded)
    _, outcomes = saved_as(module, held, convert)
    if not outcomes:
        raise ConfigError("The model has no tensors, so there is nothing to save.")
    written = {
        name: torch.empty(
            each.shape, dtype=dtype if dtype is not None and each.dtype.is_floating_point else each.dtype, device="meta"
        )
        for name, (each, _) in outcomes.items()
    }
    nameless = [f"'{name}' ({each.dtype})" for name, each in written.items() if each.dtype not in SAFETENSORS_NAMES]
    if nameless:
        raise UnsupportedError(f"Safetensors files cannot hold the dtypes of {', '.join(nameless)}.")
    try:
        split = split_torch_state_dict_into_shards(written, max_shard_size=max_shard_size)
        if isinstance(max_shard_size, int) and max_shard_size < 1:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"max_shard_size must be bytes above 0, a number or text such as '5GB', not {max_shard_size!r}."
        ) from error
    files, places = {}, {}
    for file, names in split.filename_to_tensors.items():
        header, starts, size = header_of({name: (written[name].dtype, tuple(written[name].shape)) for name in names})
        files[file] = header, size
        places.update({name: (file, start) for name, start in starts.items()})
    named = {name for name, _ in saved_parameters(module, every=True)}
    parameters = sum(each.shape.numel() for names, each in held.items() if names[0] in named)
    metadata = {"total_parameters": parameters, **split.metadata}
    index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n" if split.is_sharded else None
    return _Plan(files, places, text)


def _begin(directory: Path, plan: _Plan) -> None:
    """Make the files in their full size, with their headers: every rank then writes at its own places."""
    for name, (header, size) in plan.files.items():
        with (directory / name).open("wb") as stream:
            stream.write(header)
            stream.truncate(size)
    if plan.index is not None:
        (directory / INDEX).write_text(plan.index, encoding="utf-8")


def _commit(directory: Path, folder: Path, written: Collection[str]) -> None:
    """Move everything from ``directory`` into ``folder``.

    A process that is killed in between leaves weights that are whole or a folder without an index or
    ``model.safetensors``, which nothing takes for a checkpoint.
    """
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    last = WEIGHTS if WEIGHTS in written else INDEX
    if last == INDEX:
        (folder / WEIGHTS).unlink(missing_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    for path in sorted(directory.iterdir(), key=lambda path: path.name == last):
        path.replace(folder / path.name)
    for path in folder.iterdir():
        if STALE.fullmatch(path.name) and path.name not in written:
            path.unlink()
    sync_directory(folder)
