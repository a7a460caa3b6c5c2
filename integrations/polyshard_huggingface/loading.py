"""Reads the weights of a safetensors checkpoint into the shards of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from polyshard.errors import ConfigError
from polyshard.inspect import ShardedModel, ShardedUnit, savable_model, send_from_first
from polyshard.io.boxes import Box, Chunk, box_within, slabs
from polyshard.io.files import path_of
from polyshard.io.progress import report_progress, reporting_progress
from polyshard.state.exchange import (
    coordinates,
    from_first,
    notify_listeners,
    require_same,
    require_seen,
    speaks,
    together,
)
from torch import nn

from . import _private
from .conversion import Conversion, Match, Part, listed, match, transfers_of
from .files import STAGED_NBYTES, OpenFiles, Saved, open_saved, read_all
from .tensors import ModelTensor, of_shard, refuse_hollow, tensors_of

#: For ranks that have not one file system.
_ALONE = " Pass ranks='first' to read on rank 0 for all."
_ALIKE = "Give all the same, or pass ranks='first' to read on rank 0 for all."
#: Which ranks have the files.
Ranks = Literal["all", "first"]


def load(
    model: nn.Module,
    path: Path | str,
    *,
    ranks: Ranks = "all",
    convert: Conversion | None = None,
    missing: Collection[str] = (),
    unexpected: Collection[str] = (),
) -> None:
    """Read a checkpoint of safetensors files into the sharded ``model``, in place.

    Every rank calls it, between steps. Each reads the elements that it keeps, and no others: straight into its shards,
    cast to their dtype, 16 MiB at a time in each of four threads. Tied tensors are read once, under whichever of their
    names the files have.

    Args:
        model: The outermost sharded module. Where it was built on the meta device, see ``to_be_loaded``.
        path: A folder as ``save_pretrained`` writes it, or one of its files.
        ranks: ``"all"`` where every rank sees the files. ``"first"`` where rank 0 alone does: it reads for all, and
            sends shard by shard of each unit.
        convert: From the files' tensors to the model's, by name: a function that gets stand-ins without values and
            puts them together by slices, ``torch.cat``, ``torch.stack``, ``chunk``, ``transpose`` and the like. It
            changes no dtype. None for what ``from_pretrained`` does where ``model`` is one of Transformers', and for
            the same names elsewhere.
        missing: Patterns (``"score.*"``) of names that the files may lack; what has one keeps its values.
        unexpected: Patterns of names that the files may have and the model lacks.

    Raises:
        ConfigError: there is no checkpoint, or it is not one of this model: all tensors that are missing, unexpected,
            of another shape or of a dtype that cannot be cast are named. Tied tensors differ in the files. What may be
            missing has no values. Nothing was changed.
        StateError: the files are damaged; inside a step; ``model`` is not the outermost sharded module.
        UnsupportedError: what is to be done to a tensor cannot be done in parts.
        RankMismatchError: another rank failed, or was given another checkpoint or other ``ranks``.
        OSError: reading failed; the model may hold parts of the checkpoint.
        Exception: a listener's, on its rank, once everything is loaded.
    """
    with closing(OpenFiles()) as files:
        load_through(files, model, path, ranks=ranks, convert=convert, missing=missing, unexpected=unexpected)


def load_through(
    files: OpenFiles,
    model: nn.Module,
    path: Path | str,
    *,
    ranks: Ranks = "all",
    convert: Conversion | None = None,
    missing: Collection[str] = (),
    unexpected: Collection[str] = (),
) -> None:
    """``load`` by ``files``."""
    sharded = savable_model(model, "huggingface.load()")
    module, collectives = sharded.module, sharded.collectives
    reads = ranks == "all" or coordinates(collectives)
    saved: Saved | None = None
    found: Match | None = None
    kept: set[str] = set()
    different: list[str] = []
    with together(collectives, f"Opening {path}", {"ranks": ranks}):
        path = path_of(path, "path")
        if ranks not in ("all", "first"):
            raise ConfigError(f"ranks must be 'all' or 'first', not {ranks!r}.")
        for name, given in (("missing", missing), ("unexpected", unexpected)):
            if isinstance(given, str):
                raise ConfigError(f"{name} must be several patterns, such as {name}=[{given!r}], not one text.")
    require_seen(collectives, path, os.path.exists(path) or not reads, _ALONE)
    with together(collectives, f"Opening {path}"):
        if reads:
            saved = open_saved(path)
    if saved is not None and ranks == "all":
        require_same(collectives, path, json.dumps(saved.identity()), _ALIKE)
    with together(collectives, f"Matching {path} with the model"):
        held = tensors_of(sharded)
        refuse_hollow(held, sharded.rank)
        if saved is not None:
            shapes = {name: each.shape for each in held for name in each.names}
            found = match(
                saved,
                held,
                convert or _private.from_files(module, shapes),
                missing=missing,
                unexpected=unexpected,
                ignored=_private.unwanted(module),
                model=type(module).__name__,
                rank=sharded.rank,
            )
            files.open(dict.fromkeys(each.file for each in saved.tensors.values()))
            different = _different_ties(found, saved, files, whole=ranks == "first")
            kept = {each.names[0] for each in found.kept}
            packed = (each for each in held if each.unit is not None and each.unit.packed)
            quantized = next((each for each in packed if each.names[0] in found.recipes), None)
            if quantized is not None:
                raise ConfigError(
                    f"'{quantized.names[0]}' is quantized, and {path} cannot be read into it once it is sharded (rank "
                    f"{sharded.rank}). Let from_pretrained read and quantize it, and shard the model then."
                )
    if ranks == "first":
        kept = from_first(collectives, kept)
    _refuse_together(sharded, path, _unset(held, kept), different)
    if ranks == "all":
        with together(collectives, f"Reading {path}"):
            assert saved is not None
            assert found is not None
            with sharded.reporting_progress(model, f"Loading {path}"):
                _read(held, found, saved, files)
    else:
        with sharded.reporting_progress(model, f"Loading {path}"):
            _read_for_all(sharded, held, kept, found, saved, files)
    notify_listeners(collectives, f"the load of {path}", partial(sharded.notify_loaded, model, path))


def _read(held: Iterable[ModelTensor], found: Match, saved: Saved, files: OpenFiles) -> None:
    read_all(
        (
            transfer
            for each in held
            if each.names[0] in found.recipes
            for transfer in transfers_of(each.chunks, found.recipes[each.names[0]], saved.tensors)
        ),
        files,
    )


def _read_for_all(
    sharded: ShardedModel,
    held: Iterable[ModelTensor],
    kept: Collection[str],
    found: Match | None,
    saved: Saved | None,
    files: OpenFiles,
) -> None:
    """Rank 0 reads, and sends to each rank what it keeps: one shard of one unit at a time. ``kept``: not sent."""
    collectives = sharded.collectives
    nbytes = dict.fromkeys((unit.name for unit in sharded.units), 0)
    for each in held:
        if each.unit is not None:
            nbytes[each.unit.name] += each.nbytes
    total = sum(nbytes.values())
    for unit, done in zip(sharded.units, accumulate(nbytes.values()), strict=True):
        if any(each.part is not None for each in unit.parameters):
            # Of other parts this rank knows no shards.
            for target in held:
                if target.unit == unit and target.names[0] not in kept:
                    _read_whole(sharded, unit, target, found, saved, files)
            report_progress(done, total)
            continue
        for shard_rank in range(unit.layout.world_size):
            shard = torch.zeros(unit.layout.shard_numel, dtype=unit.master.dtype, device=unit.device)
            with together(collectives, f"Reading unit '{unit.name}'"), reporting_progress(None):
                if found is not None and saved is not None:
                    _read(of_shard(unit, shard, shard_rank), found, saved, files)
            send_from_first([shard], collectives, shard.device)
            if shard_rank == unit.shard_rank:
                _take(unit, shard, kept)
        report_progress(done, total)
    with together(collectives, "Reading what is not sharded"), reporting_progress(None):
        others = [each for each in held if each.unit is None and each.names[0] not in kept]
        if found is not None and saved is not None:
            _read(others, found, saved, files)
    send_from_first([chunk.view for each in others for chunk in each.chunks], collectives, sharded.units[0].device)


def _read_whole(
    sharded: ShardedModel,
    unit: ShardedUnit,
    target: ModelTensor,
    found: Match | None,
    saved: Saved | None,
    files: OpenFiles,
) -> None:
    whole = torch.zeros(target.shape, dtype=target.dtype, device=unit.device)
    with together(sharded.collectives, f"Reading '{target.names[0]}'"), reporting_progress(None):
        if found is not None and saved is not None:
            _read([target.of(whole)], found, saved, files)
    send_from_first([whole], sharded.collectives, whole.device)
    with torch.no_grad():
        for chunk in target.chunks:
            chunk.view.copy_(box_within(whole, Box.whole(target.shape), chunk.box))


def _take(unit: ShardedUnit, shard: torch.Tensor, kept: Collection[str]) -> None:
    with torch.no_grad():
        for target, source in zip(of_shard(unit, unit.master), of_shard(unit, shard), strict=True):
            if target.names[0] not in kept:
                for to, given in zip(target.chunks, source.chunks, strict=True):
                    to.view.copy_(given.view)


def _unset(held: Iterable[ModelTensor], kept: Collection[str]) -> list[str]:
    """Which of ``kept`` have no values on this rank."""
    return [
        each.names[0]
        for each in held
        if each.names[0] in kept
        and any(chunk.view.is_floating_point() and bool(chunk.view.isnan().all()) for chunk in each.chunks)
    ]


def _different_ties(found: Match, saved: Saved, files: OpenFiles, *, whole: bool) -> list[str]:
    """Tied tensors that have several values in the files: looked for in this rank's elements, or in all."""
    different = []
    for held, name, parts, other, others in found.ties:
        boxes = [Box((0,) * len(held.shape), held.shape)] if whole else [chunk.box for chunk in held.chunks]
        most = STAGED_NBYTES // held.dtype.itemsize
        pieces = (box for outer in boxes for box in slabs(held.shape, outer, most, gaps=True))
        if any(not _equal(box, held.dtype, (parts, others), saved, files) for box in pieces):
            different.append(f"'{name}' and '{other}'")
    return different


def _equal(box: Box, dtype: torch.dtype, recipes: Iterable[Sequence[Part]], saved: Saved, files: OpenFiles) -> bool:
    values = []
    for recipe in recipes:
        values.append(torch.empty(box.sizes, dtype=dtype))
        read_all(transfers_of([Chunk(box, values[-1])], recipe, saved.tensors), files)
    return torch.equal(values[0], values[1])


def _refuse_together(sharded: ShardedModel, path: Path, unset: list[str], different: list[str]) -> None:
    """Raise on all ranks alike what any of them found in its elements."""
    everyone = [(unset, different)]
    if speaks(sharded.collectives):
        everyone = sharded.collectives.all_gather_object((unset, different))
    names = list(dict.fromkeys(name for each, _ in everyone for name in each))
    if names:
        raise ConfigError(
            f"{path} lacks {listed(names)}, which load() was told may be missing, but there are no values to keep "
            f"(rank {sharded.rank}). Name them in to_be_loaded(model, fresh=...) too, so that shard() initialises them."
        )
    pairs = list(dict.fromkeys(pair for _, each in everyone for pair in each))
    if pairs:
        raise ConfigError(
            f"The model ties {'; '.join(pairs)}, but {path} has different values for them (rank {sharded.rank}). Build "
            "the model without the tie (tie_word_embeddings=False in its configuration), or leave one of them out by "
            "a convert function."
        )
