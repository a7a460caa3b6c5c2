"""The text: source files of the Python standard library, as bytes, and batches that depend on the step alone."""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

#: Folders that are left out: what is not the library's own code, and tables that no one wrote by hand.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
#: One file in so many is held out.
HELD_OUT_ONE_IN = 10
#: Ends each file; no Python source holds it.
END_OF_FILE = b"\0"


def library_files(root: Path | None = None) -> list[Path]:
    """Paths, relative to ``root`` (the standard library where None) and sorted, of the ``.py`` files to learn from."""
    root = root or Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted((path for path in relative if SKIPPED_FOLDERS.isdisjoint(path.parts)), key=Path.as_posix)


def is_held_out(path: Path) -> bool:
    """Whether the file at ``path`` is kept from training. Follows from the path alone."""
    return zlib.crc32(path.as_posix().encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Corpus:
    """All text, in memory."""

    train: torch.Tensor
    """uint8 ``[bytes]``."""
    held_out: torch.Tensor
    """uint8 ``[bytes]``, from other files."""
    digest: str
    """Says whether two corpora are the same."""

    @classmethod
    def read(cls, root: Path | None = None) -> Corpus:
        """Read the files of ``library_files(root)``. Raises ``FileNotFoundError`` where a part would be empty."""
        root = root or Path(sysconfig.get_path("stdlib"))
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        for path in library_files(root):
            parts[is_held_out(path)].append((root / path).read_bytes() + END_OF_FILE)
        if not all(parts.values()):
            raise FileNotFoundError(f"{root} holds too few .py files to learn from. Install Python with its library.")
        train, held_out = b"".join(parts[False]), b"".join(parts[True])
        return cls(
            torch.frombuffer(bytearray(train), dtype=torch.uint8),
            torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
            hashlib.sha256(train + held_out).hexdigest(),
        )


@dataclass(frozen=True)
class Batches:
    """Sequences drawn from a text. What is drawn at a step follows from ``seed``, the step and ``batch`` alone."""

    text: torch.Tensor
    """uint8 ``[bytes]``."""
    context: int
    """Bytes that go into the model."""
    batch: int
    """Sequences of all ranks together."""
    seed: int

    def whole(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of all ranks: int64 ``[batch, context]`` each, the targets one byte further."""
        return self.part(step, rank=0, world_size=1)

    def part(self, step: int, *, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``rank`` of ``world_size`` computes of ``whole(step)``: consecutive rows, evenly spread over ranks."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.context, (self.batch,), generator=generator)
        mine = starts[self.batch * rank // world_size : self.batch * (rank + 1) // world_size]
        rows = self.text[mine[:, None] + torch.arange(self.context + 1)].long()
        return rows[:, :-1], rows[:, 1:]
