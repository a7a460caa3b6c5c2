"""Whole models out of sharded ones, for files that know nothing of sharding."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..composable import unsharded


def whole_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The state dict of the sharded ``module`` as it was before sharding, in host memory; every rank calls it.

    Names that share a tensor share one here. Nothing where not ``keep``, which is this rank's alone.
    """
    with unsharded(module):
        if not keep:
            return {}
        copies: dict[torch.Tensor, torch.Tensor] = {}
        state: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                if value not in copies:
                    copies[value] = value.detach().to("cpu", copy=True)
                value = copies[value]
            state[name] = value
        return state


def save_model(
    theirs: Callable[..., None],
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """Write the sharded ``model`` whole, in files of at most ``max_shard_size``; every rank calls it.

    ``theirs`` is Accelerate's, which writes what ``get_state_dict`` returns on the main process.
    """
    theirs(model, directory, max_shard_size=max_shard_size, safe_serialization=safe_serialization)
