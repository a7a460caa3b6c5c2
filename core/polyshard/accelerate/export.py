"""Whole models out of sharded ones, for files that know nothing of sharding."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from ..state import StateForm, StateOptions, get_model_state_dict


def whole_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of the sharded ``module`` as it was before sharding, in host memory of rank 0; empty elsewhere.

    Every rank calls it. Names that share a tensor share one here.
    """
    return get_model_state_dict(module, StateOptions(form=StateForm.FULL_ON_RANK_0))


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
