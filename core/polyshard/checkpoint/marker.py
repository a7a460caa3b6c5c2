"""The file that makes a directory a checkpoint, and what it tells about it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import StateError
from . import disk
from .documents import MalformedError, a_count, a_text, an_object, checked, parse, render
from .manifest import NAME, Manifest

#: Written last: a directory without it is a save that did not end.
MARKER = "COMMITTED"
#: Of markers and manifests; a checkpoint of another number is refused.
FORMAT = 3
_DIGEST = "sha256"
#: Bytes: a hundred for each rank's file, and there are not more ranks than half a million.
_MOST = 64 << 20


@dataclass(frozen=True, slots=True)
class Marker:
    """What was known when a checkpoint was committed."""

    step: int
    world_size: int
    """Of the save."""
    complete: bool
    """Whether every rank's part is there; not so where one rank of a pretended world saved."""
    identity: str
    """No other save has it."""
    parent: str | None
    """Identity of the checkpoint of this folder that the model had saved or loaded last."""
    turn: int
    """Higher than that of every checkpoint that was in the folder at the commit."""
    files: Mapping[str, int]
    """Size in bytes of each file of the directory."""
    finite: bool
    """Whether all parameters were finite."""
    manifest: str
    """The sha256 of ``manifest.json``."""
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        """Commit ``directory``. What it holds is on disk by then."""
        temporary = directory / f"{MARKER}.tmp"
        disk.write_whole(temporary, _render({**dataclasses.asdict(self), "torch": str(torch.__version__)}))
        with disk.naming(temporary):
            temporary.replace(directory / MARKER)
        disk.sync_directory(directory)

    @classmethod
    def read(cls, directory: Path) -> Marker:
        """The marker of ``directory``.

        Raises:
            StateError: there is none, or it is of another format.
            CheckpointDamagedError: it is not what was written.
            OSError: it cannot be read.
        """
        if not os.path.lexists(directory / MARKER):
            if not os.path.lexists(directory):
                raise StateError(
                    f"{directory} is no complete checkpoint: it does not exist on host {socket.gethostname()!r}. "
                    f"{disk.REMEDY}"
                )
            raise StateError(
                f"{directory} is no complete checkpoint: it has no file '{MARKER}', so its save did not end or it is "
                f"another kind of directory. {disk.REMEDY}"
            )
        raw = disk.read_whole(directory, MARKER, most=_MOST)
        with checked(directory, MARKER):
            content = an_object(parse(raw), "the marker")
            number = a_count(content["format"], "format")
            if number == FORMAT:
                if raw != _render({name: each for name, each in content.items() if name != _DIGEST}):
                    raise MalformedError("its own sha256 differs")
                return cls(**{name: check(content[name]) for name, check in _FIELDS.items()})
        raise StateError(
            f"{directory} has format {number}, but this polyshard reads format {FORMAT}. Load it with the version that "
            "wrote it."
        )

    def require_files(self, directory: Path) -> None:
        """Raise CheckpointDamagedError where a file is gone, or has another size than at the commit."""
        for name, size in self.files.items():
            with disk.opened(directory, name, size):
                pass

    def read_manifest(self, directory: Path) -> Manifest:
        """What the files hold.

        Raises:
            As ``Manifest.read``.
        """
        return Manifest.read(directory, self.files[NAME], self.manifest, self.files, complete=self.complete)


def _render(content: Mapping[str, Any]) -> bytes:
    return render({**content, _DIGEST: hashlib.sha256(render(content)).hexdigest()})


def _a_truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise MalformedError(f"{name} is neither true nor false")
    return value


def _sizes(value: Any) -> dict[str, int]:
    sizes = {name: a_count(each, "a size") for name, each in an_object(value, "files").items()}
    for name in sizes:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise MalformedError(f"it names a file {name!r}, which is none of the directory")
    return sizes


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "step": lambda value: a_count(value, "step"),
    "world_size": lambda value: a_count(value, "world_size"),
    "complete": partial(_a_truth, "complete"),
    "finite": partial(_a_truth, "finite"),
    "identity": lambda value: a_text(value, "identity"),
    "parent": lambda value: None if value is None else a_text(value, "parent"),
    "turn": lambda value: a_count(value, "turn"),
    "files": _sizes,
    "manifest": lambda value: a_text(value, "manifest"),
    "format": lambda value: a_count(value, "format"),
}
