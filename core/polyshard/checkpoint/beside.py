"""What a checkpoint holds beside tensors, in a file of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engine.step.root import Root
from ..interfaces import PrecisionCaster
from ..state.kind import Kind

_FILE = "extra.pt"


@dataclass(frozen=True, slots=True)
class Beside:
    """Small values, of rank 0."""

    extra: Mapping[str, Any]
    """The user's."""
    precision: Mapping[str, Mapping[str, Any]]
    """State of each precision caster, under the name of the first unit that it serves."""
    optimizer: Kind | None
    """The optimizer's class."""

    @classmethod
    def of(cls, owner: Root, extra: Mapping[str, Any] | None, optimizer: Kind | None) -> Beside:
        """What the model has now."""
        states = {name: dict(caster.state_dict()) for name, caster in _casters(owner).items()}
        return cls(dict(extra or {}), {name: state for name, state in states.items() if state}, optimizer)

    @classmethod
    def read(cls, directory: Path) -> Beside:
        """What is in ``directory``."""
        held = torch.load(directory / _FILE, map_location="cpu", weights_only=False)
        return cls(held["extra"], held["precision"], held.get("optimizer"))

    def write(self, directory: Path) -> None:
        """Write it, to be on disk when this returns."""
        with (directory / _FILE).open("wb") as stream:
            torch.save({"extra": self.extra, "precision": self.precision, "optimizer": self.optimizer}, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def restore_precision(self, owner: Root) -> None:
        """Give the casters of the model what they had."""
        for name, caster in _casters(owner).items():
            if name in self.precision:
                caster.load_state_dict(self.precision[name])


def _casters(owner: Root) -> dict[str, PrecisionCaster]:
    found: dict[int, tuple[str, PrecisionCaster]] = {}
    for unit in owner.units:
        found.setdefault(id(unit.caster), (unit.name, unit.caster))
    return dict(found.values())
