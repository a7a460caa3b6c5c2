"""A checkpoint's directory as a source of values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ..state.places import MODEL, OPTIMIZER
from ..state.source import Source
from .documents import checked
from .encoding import Json, decode, tensor_told
from .manifest import NAME, Manifest, StoredTensor
from .reading import Filling, fill, nested

_Path = tuple[Any, ...]


class StoredSource(Source):
    """What ``save`` wrote, by path: ``("model", name)``, ``("optimizer", "state", name, key)``,
    ``("optimizer", "param_groups", index, setting)``.
    """

    def __init__(self, manifest: Manifest) -> None:
        """``manifest``: of the directory."""
        self._manifest = manifest
        self.complete = manifest.complete
        self._paths: dict[str, _Path] = {}
        self._stored: dict[str, StoredTensor | Json] = {}
        for name, stored in manifest.model.items():
            self._add((MODEL, name), stored)
        for name, first in manifest.aliases.items():
            self._add((MODEL, name), manifest.model[first])
        if manifest.optimizer is None:
            return
        for name, states in manifest.optimizer.state.items():
            for key, value in states.items():
                self._add((OPTIMIZER, "state", name, key), value)
        for index, group in enumerate(manifest.optimizer.groups):
            for setting, told in group.items():
                tensor = tensor_told(told)
                self._add((OPTIMIZER, "param_groups", index, setting), told if tensor is None else self._within(tensor))

    @property
    def described(self) -> str:
        return f"the checkpoint {self._manifest.directory}"

    def read(self, targets: dict[str, Any]) -> None:
        fillings: list[Filling] = []
        with checked(self._manifest.directory, NAME):
            for key, target in targets.items():
                stored = self._stored[key]
                if isinstance(stored, StoredTensor):
                    fillings.append((target, stored))
                else:
                    targets[key] = decode(stored, nested(self._manifest, fillings))
        fill(self._manifest, fillings)

    def entry(self, key: str) -> Any | None:
        stored = self._stored.get(key)
        if not isinstance(stored, StoredTensor):
            return None if key not in self._stored else BytesStorageMetadata()
        chunks = [
            ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes)) for chunk in stored.chunks
        ]
        return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)

    def paths(self, *prefix: str) -> dict[str, _Path]:
        return {key: path for key, path in self._paths.items() if path[: len(prefix)] == prefix}

    @cached_property
    def extra(self) -> Mapping[str, Any]:
        """The user's, and of rank 0."""
        found: Mapping[str, Any] = self._read(self._manifest.extra)
        return found

    @cached_property
    def precision(self) -> Mapping[str, Mapping[str, Any]]:
        """State of precision casters by name of a unit."""
        found: Mapping[str, Mapping[str, Any]] = self._read(self._manifest.precision)
        return found

    def _read(self, told: Json) -> Any:
        fillings: list[Filling] = []
        with checked(self._manifest.directory, NAME):
            found = decode(told, nested(self._manifest, fillings))
        fill(self._manifest, fillings)
        return found

    def _within(self, told: Json) -> StoredTensor:
        return self._manifest.within(told)

    def _add(self, path: _Path, stored: StoredTensor | Json) -> None:
        # No name has the sign between.
        key = "\0".join(map(str, path))
        self._paths[key] = path
        self._stored[key] = stored
