"""Writes several files, or none of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Make ``folder`` with ``files`` (text by path inside of it). It appears with all of them, or not at all.

    The folder that it lies in must be there. Raises ``OSError``: ``FileExistsError`` where ``folder`` is there.
    """
    if folder.exists():
        raise FileExistsError(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = Path(scratch, folder.name)
        for name, text in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        # One step, within one file system.
        made.rename(folder)


def write_all(added: Mapping[Path, str], changed: Mapping[Path, str]) -> None:
    """Write ``added``, none of which is there, then ``changed``, all of which are, in order.

    Raises ``OSError``, and then everything is as it was: ``FileExistsError`` for a file of ``added`` that is there.
    """
    made: list[Path] = []
    before = {path: path.read_bytes() for path in changed}
    try:
        for path, text in added.items():
            made += _make_folders(path.parent)
            with path.open("xb") as stream:
                made.append(path)
                stream.write(text.encode())
        for path, text in changed.items():
            _replace(path, text.encode())
    except BaseException:
        for path, content in before.items():
            if path.read_bytes() != content:
                _replace(path, content)
        for path in reversed(made):
            path.rmdir() if path.is_dir() else path.unlink()
        raise


def _make_folders(folder: Path) -> list[Path]:
    """Make ``folder`` and what is missing above it; returns those that were made, outermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _replace(path: Path, content: bytes) -> None:
    """Exchange what ``path`` holds; whoever reads it meanwhile finds the one or the other, whole."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
