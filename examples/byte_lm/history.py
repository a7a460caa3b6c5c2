"""The numbers of a run, as they are shown, drawn and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class History:
    """Losses in nats a byte, averaged over ranks."""

    train: list[float] = field(default_factory=list)
    """Of each step's batch, before that step's update; the first entry is step 1's."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """After so many steps, on the held-out files."""

    def as_table(self) -> dict[str, Any]:
        """Plain lists, for JSON and checkpoints."""
        return {"train": list(self.train), "held_out": [list(point) for point in self.held_out]}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> History:
        return cls(list(table["train"]), [(int(step), float(loss)) for step, loss in table["held_out"]])
