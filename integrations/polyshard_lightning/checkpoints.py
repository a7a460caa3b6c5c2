"""Checkpoints of the strategies: a directory that each rank writes its part of, or a file of whole tensors.

Lightning's file has an optimizer's state by number. ``polyshard.state`` puts it together and takes it apart by name:
the functions of ``whole`` here turn one into the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from polyshard.checkpoint.manifest import Manifest, Marker
from polyshard.checkpoint.storage import MARKER
from polyshard.errors import ConfigError
from polyshard.inspect import savable_model, saved_parameters
from polyshard.state import StateForm, StateOptions, set_optimizer_state_dict
from polyshard.state.sharded import names_by_group
from polyshard.state.state_dicts import present_optimizer_state_dict
from torch import nn
from torch.distributed.tensor import DTensor

_WHOLE = StateOptions(form=StateForm.FULL_ON_RANK_0)
_NAMES = ("params", "param_names")


def is_remote(path: str | Path) -> bool:
    """Whether ``path`` is no path of this host: only Lightning's own reading and writing of files takes it."""
    return "://" in str(path)


def is_folder(path: str | Path) -> bool:
    """Whether ``path`` is a complete directory of ``polyshard.checkpoint``."""
    return not is_remote(path) and (Path(path) / MARKER).is_file()


def require_file(path: str | Path) -> None:
    """Refuse a path of this host that is no file. Raises ConfigError: there is no file."""
    if is_remote(path):
        return
    path = Path(path)
    if not path.is_file():
        what = "a directory that is no complete checkpoint" if path.is_dir() else "not there"
        raise ConfigError(
            f"The checkpoint {path} is {what}. Give the path of a file, or of a directory with COMMITTED in it."
        )


def has_optimizers(path: str | Path) -> bool:
    return Manifest.read(Path(path), Marker.read(Path(path))).kind is not None


def whole_model_state(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` of the unsharded model, in host memory, on rank 0; empty on others. Every rank calls it.

    Entries that are not sharded, such as buffers, extra state and metrics, are rank 0's.
    """
    whole: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, DTensor):
            # Where parameters are offloaded, ranks speak beside them.
            shown: Any = value.detach().to(value.device_mesh.device_type)
            value = shown.full_tensor()
        if dist.get_rank() == 0:
            whole[name] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
    return whole


def whole_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` of the unsharded model, in host memory, on rank 0; empty on others.

    Every rank calls it. A flat parameter appears as the parameters that it stands for, in the model's order.

    Raises:
        ConfigError: as ``polyshard.state.get_optimizer_state_dict``.
    """
    whole = present_optimizer_state_dict(module, optimizer, _WHOLE)
    if not whole:
        return {}
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group, names in zip(whole["param_groups"], _names_by_group(module, optimizer), strict=True):
        numbers = range(number, number + len(names))
        number += len(names)
        own = zip(numbers, names, strict=True)
        state.update({index: whole["state"][name] for index, name in own if name in whole["state"]})
        groups.append({**_settings(group), "params": list(numbers)})
    return {"state": state, "param_groups": groups}


def load_whole_model_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Take this rank's part of whole tensors, by ``load_state_dict``: its hooks and what modules add see the file.

    Raises ConfigError: the state is of another model.
    """
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        reason = str(error).rstrip(" .")
        raise ConfigError(
            f"The checkpoint is not of a {type(module).__name__} as it is here: {reason}. Load it into the model "
            "that it was saved from."
        ) from error


def load_whole_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take this rank's part of what ``optimizer.state_dict()`` of the unsharded model is. Every rank calls it.

    Its parameters may be numbers or names.

    Raises:
        ConfigError: the state is of another model or optimizer; nothing was changed.
        RankMismatchError: another rank failed.
    """
    by_group = _names_by_group(module, optimizer)
    counts = [len(names) for names in by_group]
    saved = [list(group["params"]) for group in state["param_groups"]]
    if counts != [len(keys) for keys in saved]:
        raise ConfigError(
            f"The checkpoint's optimizer has groups of {[len(keys) for keys in saved]} parameters, and "
            f"{type(optimizer).__name__} of {counts} (rank {dist.get_rank()}). Make the optimizer as it was when it "
            "was saved."
        )
    name_of = {
        key: key if isinstance(key, str) else name
        for keys, names in zip(saved, by_group, strict=True)
        for key, name in zip(keys, names, strict=True)
    }
    by_name = {
        "state": {name_of[key]: own for key, own in state["state"].items()},
        "param_groups": [
            # Switches are on, off or None. Files of an earlier torch may lack some, as torch's own loading allows.
            {
                **{name: value for name, value in _settings(own).items() if value is None or isinstance(value, bool)},
                **_settings(group),
                "params": [name_of[key] for key in keys],
            }
            for own, group, keys in zip(optimizer.param_groups, state["param_groups"], saved, strict=True)
        ],
    }
    # As Lightning's files have it, what got no gradient has no state.
    set_optimizer_state_dict(module, optimizer, by_name, StateOptions(strict=False))


def _names_by_group(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters of each group, in the order of an optimizer of the unsharded model."""
    order = {name: index for index, (name, _) in enumerate(saved_parameters(module))}
    by_group = names_by_group(savable_model(module, "An optimizer's state dict"), optimizer.param_groups)
    for names, group in zip(by_group, optimizer.param_groups, strict=True):
        # Flat parameters: units need not be in the model's order.
        if len(names) != len(group["params"]):
            names.sort(key=order.__getitem__)
    return by_group


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NAMES}
