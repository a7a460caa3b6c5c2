"""A checkpoint's folder of ``Trainer``: the sharded state, and files that are written of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from polyshard.checkpoint import latest
from polyshard.errors import ConfigError
from polyshard.inspect import idle_model
from polyshard.state import StateForm, StateOptions, get_model_state_dict
from polyshard.state.exchange import together
from torch import nn

#: The folder of ``polyshard.checkpoint`` inside of a checkpoint's folder.
STATE = "polyshard"
SCHEDULER = "scheduler.pt"


def require_state(folder: Path) -> Path:
    """The committed sharded state in ``folder``. Raises ConfigError: there is none."""
    state = latest(folder / STATE)
    if state is None:
        raise ConfigError(
            f"{folder} has no state of PolyshardTrainer to resume from: {folder / STATE} holds no complete checkpoint. "
            "It was saved by another Trainer, with save_only_model=True, or by a run that ended while it saved. Name "
            "an earlier checkpoint, or start from its weights alone with from_pretrained()."
        )
    return state


def write_whole(model: nn.Module, folder: Path, write: Callable[[], None] | None, *, one_folder: bool) -> None:
    """Call ``write`` while ``model`` is whole, on ranks that give one. What it changes of the model is dropped.

    All ranks call it. Units are gathered one after the other for the ranks that write, which need host memory for the
    whole model. Parameters are in their own dtypes.

    Args:
        model: The outermost sharded module.
        folder: What is written.
        write: None on ranks that do not write.
        one_folder: Whether ``folder`` is the same on all ranks, and rank 0 writes it.
    """
    sharded = idle_model(model, "save_model()")
    # Several ranks may write, each on a machine of its own, and none knows which others do.
    state = get_model_state_dict(
        model, StateOptions(form=StateForm.FULL if not one_folder else StateForm.FULL_ON_RANK_0)
    )
    with together(sharded.collectives, f"Writing {type(model).__name__} to {folder}"):
        if write is None:
            return
        # Models of Sentence Transformers describe themselves by a forward, for which they move to a device.
        buffers = [(module, dict(module._buffers)) for module in model.modules()]
        try:
            with sharded.whole_on_this_rank(state):
                write()
        finally:
            for module, before in buffers:
                module._buffers.update(before)
