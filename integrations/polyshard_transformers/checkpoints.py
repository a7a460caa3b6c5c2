"""A checkpoint's folder of ``Trainer``: the sharded state, and beside it the files that ``from_pretrained`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import polyshard_huggingface
from polyshard.checkpoint import latest
from polyshard.errors import ConfigError
from polyshard.inspect import idle_model
from polyshard.state import StateForm, StateOptions, get_model_state_dict
from polyshard.state.exchange import together
from polyshard_huggingface.saving import require_saveable
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

#: The folder of ``polyshard.checkpoint`` inside of a checkpoint's folder.
STATE = "polyshard"
SCHEDULER = "scheduler.pt"


def require_state(folder: Path) -> Path:
    """The committed sharded state in ``folder``.

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


def require_exportable(model: nn.Module, *, one_folder: bool) -> None:
    """Raise where ``export`` would refuse the model.

    Raises:
        ConfigError, UnsupportedError: as ``polyshard_huggingface.save``.
    """
    if one_folder and isinstance(model, PreTrainedModel):
        require_saveable(model)


def export(model: nn.Module, folder: Path, *, writes: bool, one_folder: bool) -> None:
    """Write weights and configuration of ``model`` into ``folder``; of an adapter's wrapper the adapter's.

    All ranks call it. Where all see one ``folder``, each writes what it holds of a model of Transformers. Else, and of
    what is wrapped, units are gathered one after the other for the ranks that write, which need host memory for the
    whole model. Parameters are written in their own dtypes.

    Args:
        model: The outermost sharded module.
        folder: Made where missing.
        writes: Whether this rank writes where each rank does not write its own.
        one_folder: Whether ``folder`` is the same on all ranks.
    """
    if one_folder and isinstance(model, PreTrainedModel):
        polyshard_huggingface.save(model, folder)
        return
    sharded = idle_model(model, "export()")
    # Several ranks may write, each on a machine of its own, and none knows which others do.
    state = get_model_state_dict(
        model, StateOptions(form=StateForm.FULL if not one_folder else StateForm.FULL_ON_RANK_0)
    )
    with together(sharded.collectives, f"Writing {type(model).__name__} to {folder}"):
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if not hasattr(model, "save_pretrained"):
            save_file(state, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
            return
        # Adapters look at the model, too: at state dicts of modules that are trained whole, and at the weights that
        # prompts are computed from.
        with sharded.whole_on_this_rank(state):
            cast("Any", model).save_pretrained(folder, state_dict=state)
