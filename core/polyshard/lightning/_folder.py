"""Checkpoints of which each rank writes its part: one directory, which ``polyshard.checkpoint`` reads too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import checkpoint
from ..checkpoint.manifest import MARKER, Marker
from ..errors import ConfigError, UnsupportedError

Barrier = Callable[[], None]


def is_remote(path: str | Path) -> bool:
    """Whether Lightning's own reading and writing of files is asked for something that is no path of this host."""
    return "://" in str(path)


def is_folder(path: str | Path) -> bool:
    """Whether ``path`` is such a directory, complete."""
    return not is_remote(path) and (Path(path) / MARKER).is_file()


def save_folder(
    path: str | Path,
    step: int,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    extra: Mapping[str, Any],
    *,
    first: bool,
    barrier: Barrier,
) -> None:
    """Write ``path``, in the place of what it was before, once all is written. Every rank calls it.

    Args:
        path: The same on every rank, on one file system.
        step: Number of the optimizer step, not negative.
        module: The outermost sharded module.
        optimizers: Over its parameters.
        extra: Values that ``polyshard.checkpoint`` takes; rank 0's are kept.
        first: Whether this is rank 0.
        barrier: Waits for all ranks.

    Raises:
        UnsupportedError: ``path`` is no path of this host.
        PolyshardError, OSError: as ``polyshard.checkpoint.save``; what was there before stays.
    """
    if is_remote(path):
        raise UnsupportedError(
            f"A sharded checkpoint is a directory of a file system that all ranks see, and {path} is none. Give a "
            "path, or set state_dict_type='full'."
        )
    path = Path(path)
    unfinished = path.parent / f".{path.name}.unfinished"
    if first:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
    barrier()
    written = checkpoint.save(unfinished, step, module, list(optimizers) or None, extra=extra)
    if first:
        before = path.parent / f".{path.name}.before"
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(before, ignore_errors=True)
            path.rename(before)
        else:
            path.unlink(missing_ok=True)
        written.rename(path)
        shutil.rmtree(unfinished)
        shutil.rmtree(before, ignore_errors=True)
    barrier()


def load_folder(
    path: str | Path,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Mapping[str, Any]:
    """Read ``path`` into ``module`` and ``optimizers``; returns what ``extra`` was. Every rank calls it.

    Args:
        path: What ``save_folder`` wrote.
        module: The outermost sharded module.
        optimizers: Those that were saved, or none.

    Raises:
        ConfigError: it is of another model or other optimizers; nothing was changed.
        StateError, RankMismatchError: as ``polyshard.checkpoint.load``.
    """
    return checkpoint.load(Path(path), module, list(optimizers) or None)


def make_room(path: str | Path, *, first: bool, agreed: Callable[[bool], bool]) -> None:
    """Remove such a directory where a file is to be written. Every rank calls it, with rank 0's ``path``.

    Args:
        path: Of the file.
        first: Whether this is rank 0.
        agreed: Rank 0's answer, on every rank.

    Raises:
        ConfigError: there is a directory of something else.
    """
    if is_remote(path):
        return
    path = Path(path)
    if agreed(path.is_dir() and not is_folder(path)):
        raise ConfigError(
            f"{path} is a directory, and no checkpoint, where a file is to be written. Choose another path."
        )
    if first and path.is_dir():
        shutil.rmtree(path)


def require_file(path: str | Path) -> None:
    """Refuse what is neither a file nor elsewhere.

    Raises:
        ConfigError: there is no file.
    """
    if is_remote(path):
        return
    path = Path(path)
    if not path.is_file():
        what = "a directory that is no complete checkpoint" if path.is_dir() else "not there"
        raise ConfigError(
            f"The checkpoint {path} is {what}. Give the path of a file, or of a directory with COMMITTED in it."
        )


def has_optimizers(path: str | Path) -> bool:
    """Whether optimizers were saved with the model."""
    directory = Path(path)
    return Marker.read(directory).read_manifest(directory).optimizer is not None
