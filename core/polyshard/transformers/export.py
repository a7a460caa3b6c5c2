"""A sharded model in the files that ``from_pretrained`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.utils import SAFE_WEIGHTS_NAME

from ..engine.surface.gathered import gather_whole
from ..engine.surface.state_dicts import state_dicts_of_pieces
from ..engine.transport.buffer import view_of
from ..state.resting import resting_root


def export(model: nn.Module, folder: Path, *, writes: bool) -> None:
    """Write weights and configuration of ``model`` into ``folder``; of an adapter's wrapper the adapter's.

    All ranks call it: units are gathered one after the other. ``writes``: whether this rank writes, for which it needs
    host memory for the whole model. Parameters are written in their own dtypes.
    """
    state = whole_state_dict(model, keep=writes)
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        cast("Any", model).save_pretrained(folder, state_dict=state)
    else:
        save_file(state, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def whole_state_dict(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """What ``model.state_dict()`` would hold if nothing were sharded, on the CPU, in the parameters' own dtypes.

    All ranks call it: units are gathered one after the other. ``keep``: whether this rank wants the values; elsewhere
    the result is empty. Tensors that are tied share memory.
    """
    root = resting_root(model, "save_model()")
    whole: dict[str, torch.Tensor] = {}
    for unit in root.units:
        flat = gather_whole(unit, unit.master)
        if keep:
            for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                value = view_of(flat, slot.shape, slot.stride, slot.offset).to("cpu", copy=True).contiguous()
                whole.update(dict.fromkeys(parameter.names, value))
    if not keep:
        return {}
    with state_dicts_of_pieces():
        pieces = model.state_dict()
    return {name: whole[name] if name in whole else piece.detach().cpu() for name, piece in pieces.items()}
