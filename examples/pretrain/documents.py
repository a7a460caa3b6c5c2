"""Local text: which files, and the documents in them."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polyshard.errors import ConfigError
from settings import Data

#: Characters that are tokenised at once, so that a file may be larger than memory.
_PIECE = 1 << 18


@dataclass(frozen=True)
class Files:
    """What ``[data]`` names, sorted; no file is in both."""

    train: tuple[Path, ...]
    held_out: tuple[Path, ...]

    @classmethod
    def find(cls, data: Data) -> Files:
        """Look for the files of ``data``, from the working directory. Raises ``ConfigError`` where a part is empty."""
        held_out = _matches("data.held_out", data.held_out)
        train = [path for path in _matches("data.files", data.files) if path not in set(held_out)]
        if not train:
            raise ConfigError("data.held_out takes all of data.files away. Leave some files to learn from.")
        return cls(tuple(train), tuple(held_out))

    @property
    def nbytes(self) -> int:
        """Of all files together."""
        return sum(path.stat().st_size for path in (*self.train, *self.held_out))

    def fingerprint(self, *more: object) -> str:
        """Changes with ``more``, and where a file came, went or was written since."""
        parts = [list(map(str, more))]
        for paths in (self.train, self.held_out):
            parts.append([f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in paths])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def documents(paths: Iterable[Path]) -> Iterator[Iterator[str]]:
    """Each document's pieces, whose texts follow each other.

    A document is a file, or a line of a ``.jsonl`` file, of whose object it is the member ``text``. Raises
    ``ConfigError`` where a file holds no text.
    """
    for path in paths:
        if path.suffix == ".jsonl":
            for number, line in enumerate(_lines(path), 1):
                if line.strip():
                    yield iter([_text_of(line, f"{path}, line {number}")])
        else:
            yield _pieces(_lines(path))


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    waiting: list[str] = []
    size = 0
    for line in lines:
        waiting.append(line)
        size += len(line)
        if size >= _PIECE:
            yield "".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield "".join(waiting)


def _lines(path: Path) -> Iterator[str]:
    try:
        # The same tokens on every system: line ends stay what they are.
        with path.open(encoding="utf-8", newline="") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text ({error.reason}). Leave it out of [data].") from error


def _text_of(line: str, where: str) -> str:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error}.") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{where} has no text. Give every line an object with "text".')
    return text


def _matches(name: str, patterns: Iterable[str]) -> list[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        matches = {Path(each) for each in glob.glob(pattern, recursive=True) if Path(each).is_file()}
        if not matches:
            raise ConfigError(f"{name}: no file matches {pattern!r} in {Path.cwd()}. Patterns start there, or with /.")
        found |= matches
    return sorted(found, key=Path.as_posix)
