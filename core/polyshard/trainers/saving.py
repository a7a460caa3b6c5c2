"""What cannot be saved, told before training where only the user knows whether it is to be."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ..checkpoint.contents import require_saveable
from ..errors import ConfigError, RankMismatchError, UnsupportedError


def warn_unsaveable(
    model: nn.Module, optimizer: torch.optim.Optimizer, call: str, rank: int, *, writes: bool = True
) -> None:
    """Warn, on one rank, where ``call`` would refuse ``optimizer`` once it has stepped. Every rank calls it.

    ``writes``: as for ``require_saveable``.
    """
    try:
        require_saveable(model, optimizer, "", writes=writes)
    except (ConfigError, RankMismatchError, UnsupportedError) as error:
        if rank == 0:
            warnings.warn(
                f"{call} will refuse {type(optimizer).__name__}, which can be trained with where nothing is saved but "
                f"the model. {error}",
                stacklevel=3,
            )
