"""Checkpoints read by ``json`` and ``numpy`` alone, as any program could."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer state: ``model.<name>``, ``optimizer.state.<name>.<key>``."""
    manifest = json.loads((directory / "manifest.json").read_text())
    return {name: _tensor(directory, told) for name, told in _told(manifest)}


def _told(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, told in manifest["model"].items():
        yield f"model.{name}", told
    for name, first in manifest["aliases"].items():
        yield f"model.{name}", manifest["model"][first]
    for name, states in (manifest["optimizer"] or {"state": {}})["state"].items():
        for key, value in states.items():
            if isinstance(value, dict) and "$tensor" in value:
                yield f"optimizer.state.{name}.{key}", value["$tensor"]


def _tensor(directory: Path, told: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, told["dtype"])
    whole = torch.full(told["shape"], 77, dtype=dtype) if dtype != torch.bool else torch.zeros(told["shape"]).bool()
    for offsets, sizes, file, at, nbytes in told["chunks"]:
        raw = np.fromfile(directory / file, np.uint8, nbytes, offset=at)
        part = torch.from_numpy(raw).view(dtype).view(sizes)
        whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = part
    return whole
