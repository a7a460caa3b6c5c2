"""The file that makes a directory a checkpoint, and what it tells about it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import StateError

#: Written last: a directory without it is a save that did not end.
MARKER = "COMMITTED"
#: Format 1 knew no identities and no sizes, and its optimizer state may be damaged.
FORMAT, _READ = 2, (1, 2)
_REMEDY = "Load the one that polyshard.checkpoint.latest(root) names."


@dataclass(frozen=True, slots=True)
class Marker:
    """What was known when a checkpoint was committed."""

    step: int
    world_size: int
    """Of the save."""
    complete: bool
    """Whether every rank's part is there; not so where one rank of a pretended world saved."""
    identity: str
    """No other save has it; format 1: the directory's name."""
    parent: str | None
    """Identity of the checkpoint of this folder that the model had saved or loaded last."""
    turn: int
    """Higher than that of every checkpoint that was in the folder at the commit; format 1: 0."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Size in bytes of each file of the directory."""
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        """Commit ``directory``. What it holds is on disk by then."""
        content = {**dataclasses.asdict(self), "torch": str(torch.__version__)}
        temporary = directory / f"{MARKER}.tmp"
        with temporary.open("w") as stream:
            json.dump(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(directory / MARKER)
        sync_directory(directory)

    @classmethod
    def read(cls, directory: Path) -> Marker:
        """The marker of ``directory``.

        Raises:
            StateError: there is none, it cannot be read, or it is of another format.
        """
        path = directory / MARKER
        if not path.is_file():
            raise StateError(
                f"{directory} is no complete checkpoint: it has no file '{MARKER}', so its save did not end or it is "
                f"another kind of directory. {_REMEDY}"
            )
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            number = content["format"]
            if number == 1:
                content.update(identity=directory.name, parent=None, turn=0, files={})
            if number not in _READ:
                raise StateError(
                    f"{directory} has format {number}, but this polyshard reads formats {_READ[0]} to {_READ[-1]}. "
                    "Load it with the version that wrote it."
                )
            names = {each.name for each in dataclasses.fields(cls)}
            return cls(**{name: value for name, value in content.items() if name in names})
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{directory} is damaged: '{MARKER}' cannot be read ({error}). {_REMEDY}") from error

    def require_files(self, directory: Path) -> None:
        """Raise StateError where a file is gone, or has another size than at the commit."""
        for name, size in self.files.items():
            path = directory / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                what = "is gone" if found is None else f"has {found:,} bytes, and had {size:,} when it was committed"
                raise StateError(f"{directory} is damaged: '{name}' {what}. {_REMEDY}")


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` as durable as the files."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
