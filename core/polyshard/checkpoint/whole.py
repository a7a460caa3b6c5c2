"""A checkpoint as whole tensors, for a model that is not sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..state.places import MODEL, OPTIMIZER
from .marker import Marker
from .stored import StoredSource


def read(directory: Path) -> dict[str, Any]:
    """All of a checkpoint in host memory, without ranks and without a model; nothing in it is executed.

    Returns:
        ``"model"``: tensors by name, a shared one under each of its names, for ``model.load_state_dict(state,
        strict=False)``: what is not persistent or frozen may have been left out. ``"optimizer"``, where one was saved:
        the form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, for
        ``set_optimizer_state_dict``. ``"extra"``: as it was given. Each tensor has memory of its own.

    Raises:
        StateError: it is no checkpoint, or is not committed.
        CheckpointDamagedError: it holds something else than was written.
        ConfigError: it is of one rank of a pretended world.
        OSError: reading failed.
    """
    directory = Path(directory)
    marker = Marker.read(directory)
    if not marker.complete:
        raise ConfigError(f"{directory} holds the part of one rank of a pretended world, which is no whole state.")
    source = StoredSource(marker.read_manifest(directory))
    paths = source.paths()
    values: dict[str, Any] = {}
    for key in paths:
        entry = source.entry(key)
        tensor = getattr(entry, "properties", None)
        values[key] = None if tensor is None else torch.empty(entry.size, dtype=tensor.dtype)  # type: ignore[union-attr]
    source.read(values)
    found: dict[str, Any] = {MODEL: {}}
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for key, path in paths.items():
        if path[0] == MODEL:
            found[MODEL][path[1]] = values[key]
        elif path[1] == "state":
            state.setdefault(path[2], {})[path[3]] = values[key]
        else:
            groups.setdefault(path[2], {})[path[3]] = values[key]
    if groups:
        found[OPTIMIZER] = {"state": state, "param_groups": [groups[index] for index in sorted(groups)]}
    return {**found, "extra": source.extra}
