"""The sharded state in a checkpoint's folder of ``Trainer``, beside the files that ``from_pretrained`` reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from ..checkpoint import latest, load, save
from ..errors import ConfigError

#: The folder of ``polyshard.checkpoint`` inside of a checkpoint's folder.
STATE = "polyshard"
SCHEDULER = "scheduler.pt"


def save_state(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *, coordinates: bool, frozen: bool
) -> None:
    """Write ``model`` and ``optimizer``, each rank its own part, into ``folder``. All ranks call it.

    ``coordinates``: true on one rank, which removes what an earlier run left of the same step: ``Trainer`` writes over
    its other files, too. ``frozen``: whether parameters that need no gradient are written.
    """
    if coordinates:
        # No rank writes before this one has come to the save.
        shutil.rmtree(folder / STATE, ignore_errors=True)
    save(folder / STATE, step, model, optimizer, frozen=frozen)


def require_state(folder: Path) -> Path:
    """Where in ``folder`` the committed state lies.

    Raises:
        ConfigError: there is none.
    """
    state = latest(folder / STATE)
    if state is None:
        raise ConfigError(
            f"{folder} has no state of PolyshardTrainer to resume from: {folder / STATE} holds no complete checkpoint. "
            "It was saved by another Trainer, with save_only_model=True, or by a run that ended while it saved. Name "
            "an earlier checkpoint, or start from its weights alone with from_pretrained()."
        )
    return state


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, frozen: bool) -> None:
    """Read ``model``, and ``optimizer`` where one is given, from ``folder``. All ranks call it.

    ``frozen``: whether parameters that need no gradient must be there; without, ``model`` may have them already.

    Raises:
        ConfigError: ``folder`` has no state, or that of another model or optimizer.
    """
    load(require_state(folder), model, optimizer, frozen=frozen)
