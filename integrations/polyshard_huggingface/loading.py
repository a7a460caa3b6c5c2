"""Reads the weights of a safetensors checkpoint into the shards of a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

import polyshard
import torch
from polyshard.errors import ConfigError
from polyshard.inspect import ShardedModel, savable_model, send_from_first
from polyshard.io.files import path_of
from polyshard.io.progress import report_progress
from polyshard.state.exchange import (
    coordinates,
    from_first,
    notify_listeners,
    require_same,
    require_seen,
    together,
)
from polyshard.state.source import chunks_of, listed
from torch import nn

from . import _private
from .conversion import Conversion, Held, Outcomes, Step, foreseen, tensors_of
from .files import Read, identity_of, open_saved, reading

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

    Every rank calls it, between steps. Each reads the elements that it keeps, straight into its shards, cast to their
    dtype; of tensors that a conversion puts together, all elements, one tensor at a time. Files are mapped into memory.
    Tied tensors are read once, under whichever of their names the files have.

    Args:
        model: The outermost sharded module. Where it was built on the meta device, see ``to_be_loaded``.
        path: A folder as ``save_pretrained`` writes it, or one of its files.
        ranks: ``"all"`` where every rank sees the files. ``"first"`` where rank 0 alone does: it reads for all, and
            sends one whole tensor after the other.
        convert: How the files' tensors become the model's: ``WeightRenaming`` and ``WeightConverter`` of
            ``transformers.core_model_loading``. None for what ``from_pretrained`` does where ``model`` is one of
            Transformers', and for the same names elsewhere.
        missing: Patterns (``"score.*"``) of names that the files may lack; what has one keeps its values.
        unexpected: Patterns of names that the files may have and the model lacks.

    Raises:
        ConfigError: there is no checkpoint, or it is not one of this model: tensors are missing, unexpected, of another
            shape or of a dtype that cannot be cast; a conversion fails; tied tensors differ in the files; what may be
            missing has no values. Nothing was changed.
        StateError: the files are damaged; inside a step; ``model`` is not the outermost sharded module.
        UnsupportedError: this version of Transformers says nothing of conversions.
        RankMismatchError: another rank failed, or was given another checkpoint or other ``ranks``.
        OSError: opening a file failed; the model may hold parts of the checkpoint.
        Exception: a listener's, on its rank, once everything is loaded.
    """
    sharded = savable_model(model, "huggingface.load()")
    module, collectives = sharded.module, sharded.collectives
    reads = ranks == "all" or coordinates(collectives)
    with together(collectives, f"Opening {path}", {"ranks": ranks}):
        path = path_of(path, "path")
        require_ranks(ranks)
        for name, given in (("missing", missing), ("unexpected", unexpected)):
            if isinstance(given, str):
                raise ConfigError(f"{name} must be several patterns, such as {name}=[{given!r}], not one text.")
    require_seen(collectives, path, os.path.exists(path) or not reads, _ALONE)
    with together(collectives, f"Opening {path}"):
        saved = open_saved(path) if reads else None
    if saved is not None and ranks == "all":
        require_same(collectives, path, identity_of(saved), _ALIKE)
    values: Iterator[torch.Tensor] | None = None
    expected: dict[str, torch.Tensor] = {}
    kept: set[str] = set()
    with ExitStack() as stack:
        with together(collectives, f"Matching {path} with the model"):
            held = tensors_of(sharded)
            if saved is not None:
                known = [name for names in held for name in names]
                outcomes = foreseen(_private.steps_of(module, saved, convert, known), saved)
                chosen = _match(sharded, path, outcomes, held, missing, unexpected)
                read = stack.enter_context(reading(saved))
                _refuse_different_ties(sharded, path, outcomes, held, read)
                kept = {names[0] for names in held} - set(chosen.values())
                # Neighbours in the files and in the model: those of one step.
                expected = {name: each for name, (each, _) in outcomes.items() if name in chosen}
                values = _values({name: outcomes[name][1] for name in expected}, read)
        if ranks == "first":
            kept, expected = from_first(collectives, (kept, expected))
        with together(collectives, f"Matching {path} with the model"):
            _refuse_unset(held, kept, path, sharded.rank)
        with sharded.reporting_progress(model, f"Loading {path}"):
            polyshard.load_stream(model, _pairs(sharded, expected, values, sends=ranks == "first"), strict=False)
    notify_listeners(collectives, f"the load of {path}", partial(sharded.notify_loaded, model, path))


def require_ranks(ranks: object) -> None:
    """Raise ConfigError unless ``ranks`` is one of ``Ranks``."""
    if ranks not in ("all", "first"):
        raise ConfigError(f"ranks must be 'all' or 'first', not {ranks!r}.")


def _match(
    sharded: ShardedModel,
    path: Path,
    outcomes: Outcomes,
    held: Held,
    missing: Collection[str],
    unexpected: Collection[str],
) -> dict[str, str]:
    """The names in ``outcomes`` that are taken, each with the first name of the model's tensor.

    Raises ConfigError: the files and the model do not fit; in which ways, how often, and the first names of each.
    """
    lost, strange = "missing from the files", "in the files and not in the model"
    misfits: dict[str, list[str]] = {lost: [], strange: []}
    chosen: dict[str, str] = {}
    surplus = set(outcomes)
    packed = {each.name for unit in sharded.units if unit.packed for each in unit.parameters}
    for names, wanted in held.items():
        present = [name for name in names if name in outcomes]
        surplus.difference_update(present)
        if present:
            chosen[present[0]] = names[0]
            if names[0] in packed:
                raise ConfigError(
                    f"'{names[0]}' is quantized, and {path} cannot be read into it once it is sharded (rank "
                    f"{sharded.rank}). Let from_pretrained read and quantize it, and shard the model then."
                )
        elif not _any_matches(names, missing):
            misfits[lost].append(names[0])
        for name in present:
            made, _ = outcomes[name]
            if made.shape != wanted.shape:
                what = f"of shape {tuple(made.shape)} in the files and {tuple(wanted.shape)} in the model"
                misfits.setdefault(what, []).append(name)
            elif not _castable(made.dtype, wanted.dtype):
                what = f"of {made.dtype} in the files and {wanted.dtype} in the model, which cannot be cast"
                misfits.setdefault(what, []).append(name)
    surplus -= _private.unwanted(sharded.module, surplus)
    for name in (name for name in outcomes if name in surplus):
        sources = outcomes[name][1].sources
        misfits[strange] += [] if _any_matches((name, *sources), unexpected) else sources
    rows = [f"  {len(names)} {what}: {listed(names)}" for what, names in misfits.items() if names]
    if rows:
        raise ConfigError(
            f"{path} is not a checkpoint of this {type(sharded.module).__name__} (rank {sharded.rank}); nothing was "
            "changed:\n" + "\n".join(rows) + "\nGive the checkpoint of this model, or tell load() what may be missing "
            "(missing=), what to leave out (unexpected=), or how the files' tensors become the model's (convert=)."
        )
    return chosen


def _castable(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a value keeps its meaning."""
    return saved == wanted or all(each.is_floating_point and each.itemsize > 1 for each in (saved, wanted))


def _any_matches(names: Iterable[str], patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _values(steps: Mapping[str, Step], read: Read) -> Iterator[torch.Tensor]:
    """What ``steps`` make of the files, one name after the other."""
    made: dict[str, torch.Tensor] = {}
    for name, step in steps.items():
        if name not in made:
            made = step.run([read(source) for source in step.sources])
        yield made.pop(name)


def _pairs(
    sharded: ShardedModel,
    expected: Mapping[str, torch.Tensor],
    values: Iterator[torch.Tensor] | None,
    *,
    sends: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole tensors, on every rank. ``values``: None where rank 0 ``sends`` them."""
    collectives, device = sharded.collectives, sharded.collectives.device
    sizes = [each.nbytes for each in expected.values()]
    for (name, each), done in zip(expected.items(), accumulate(sizes), strict=True):
        with together(collectives, f"Reading '{name}'") if sends else nullcontext():
            tensor = torch.empty_like(each, device=device) if values is None else next(values)
            tensor = tensor.to(device) if sends else tensor
        if sends:
            send_from_first([tensor], collectives, device)
        yield name, tensor
        report_progress(done, sum(sizes))


def _refuse_unset(held: Held, kept: Collection[str], path: Path, rank: int) -> None:
    unset = [
        names[0]
        for names, value in held.items()
        if names[0] in kept
        and value.dtype.is_floating_point
        and any(bool(chunk.view.isnan().all()) for chunk in chunks_of(value))
    ]
    if unset:
        raise ConfigError(
            f"{path} lacks {listed(unset)}, which load() was told may be missing, but there are no values to keep "
            f"(rank {rank}). Name them in to_be_loaded(model, fresh=...) too, so that shard() initialises them."
        )


def _refuse_different_ties(sharded: ShardedModel, path: Path, outcomes: Outcomes, held: Held, read: Read) -> None:
    """Raise ConfigError where tied tensors have several values in the files: before ranks write, one by one."""
    for every, value in held.items():
        names = [name for name in every if name in outcomes]
        for other in names[1:]:
            pair = (next(_values({name: outcomes[name][1]}, read)).to(value.dtype) for name in (names[0], other))
            if not torch.equal(*pair):
                raise ConfigError(
                    f"The model ties '{names[0]}' and '{other}', but {path} has different values for them (rank "
                    f"{sharded.rank}). Build the model without the tie (tie_word_embeddings=False in its "
                    "configuration), or leave one of them out of the files."
                )
