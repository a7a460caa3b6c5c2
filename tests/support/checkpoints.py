"""Checkpoints read by ``json`` and ``numpy`` alone, and changed by somebody who knows the format."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polyshard
import torch
from torch import nn


def alone(model: nn.Module | None = None) -> nn.Module:
    """``model``, or a small one, sharded over one rank."""
    config = polyshard.ShardConfig(collectives={"name": "fake", "world_size": 1}, strategy="no_shard")
    return polyshard.shard(nn.Linear(3, 2) if model is None else model, config)


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer state: ``model.<name>``, ``optimizer.state.<name>.<key>``."""
    manifest = json.loads((directory / "manifest.json").read_text())
    files = list(manifest["files"])
    return {name: _tensor(directory, files, told) for name, told in _told(manifest)}


def _told(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, told in manifest["model"].items():
        yield f"model.{name}", told
    for name, first in manifest["aliases"].items():
        yield f"model.{name}", manifest["model"][first]
    for name, states in (manifest["optimizer"] or {"state": {}})["state"].items():
        for key, value in states.items():
            if isinstance(value, dict) and "$tensor" in value:
                yield f"optimizer.state.{name}.{key}", value["$tensor"]


def _tensor(directory: Path, files: list[str], told: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, told["dtype"])
    whole = torch.full(told["shape"], 77, dtype=dtype) if dtype != torch.bool else torch.zeros(told["shape"]).bool()
    for number, (file, at) in enumerate(zip(told["files"], told["at"], strict=True)):
        row = slice(number * whole.ndim, (number + 1) * whole.ndim)
        offsets, sizes = told["offsets"][row], told["sizes"][row]
        raw = np.fromfile(directory / files[file], np.uint8, math.prod(sizes) * whole.element_size(), offset=at)
        part = torch.from_numpy(raw).view(dtype).view(sizes)
        whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = part
    return whole


def reseal(directory: Path, change: Callable[[dict[str, Any]], None] | bytes) -> None:
    """Change the manifest, or put other bytes in its place, and let ``COMMITTED`` tell of it."""
    path = directory / "manifest.json"
    if isinstance(change, bytes):
        content = change
    else:
        manifest = json.loads(path.read_bytes())
        change(manifest)
        content = written(manifest)
    path.write_bytes(content)

    def told(marker: dict[str, Any]) -> None:
        marker["files"]["manifest.json"] = len(content)
        marker["manifest"] = hashlib.sha256(content).hexdigest()

    remark(directory, told)


def remark(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change ``COMMITTED``, with the digest of itself."""
    path = directory / "COMMITTED"
    marker = json.loads(path.read_bytes())
    del marker["sha256"]
    change(marker)
    path.write_bytes(written({**marker, "sha256": hashlib.sha256(written(marker)).hexdigest()}))


def written(content: Any) -> bytes:
    """As polyshard writes it."""
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
