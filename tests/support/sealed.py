"""Checkpoints that somebody changed who knows the format: with digests that fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
