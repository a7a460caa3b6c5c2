"""Checkpoints of the strategies: a directory that each rank writes its part of, or a file of whole tensors.

Lightning's file has an optimizer's state by number. ``polyshard.state`` puts it together and takes it apart by name:
the functions of ``whole`` here turn one into the other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from polyshard import checkpoint
from polyshard.checkpoint.manifest import Manifest, Marker
from polyshard.checkpoint.storage import MARKER
from polyshard.errors import ConfigError, UnsupportedError
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


def save_folder(
    path: str | Path,
    step: int,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    extra: Mapping[str, Any],
    *,
    first: bool,
    barrier: Callable[[], None],
) -> None:
    """Write ``path``, in the place of what it was before, once all is written. Every rank calls it.

    Args:
        path: The same on every rank, on one file system.
        step: Number of the optimizer step, not negative.
        module: The outermost sharded module.
        optimizers: Over its parameters.
        extra: Values that ``polyshard.checkpoint`` takes; rank 0's are kept.
        first: Whether this is rank 0.
        barrier: Waits for all ranks.

    Raises:
        UnsupportedError: ``path`` is no path of this host.
        ConfigError: a directory of something else is there; on every rank.
        PolyshardError, OSError: as ``polyshard.checkpoint.save``; the directory from before stays.
    """
    if is_remote(path):
        raise UnsupportedError(
            f"A sharded checkpoint is a directory of a file system that all ranks see, and {path} is none. Give a "
            "path, or set state_dict_type='full'."
        )
    path = Path(path)
    if path.is_dir() and not path.is_symlink() and not is_folder(path) and any(path.iterdir()):
        raise ConfigError(
            f"{path} is a directory, and no checkpoint, where one is to be written. Choose another path, or empty it."
        )
    unfinished = path.parent / f".{path.name}.unfinished"
    if first:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
    barrier()
    written = checkpoint.save(unfinished, step, module, list(optimizers) or None, extra=extra)
    if first:
        before = path.parent / f".{path.name}.before"
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(before, ignore_errors=True)
            path.rename(before)
        else:
            path.unlink(missing_ok=True)
        written.rename(path)
        shutil.rmtree(unfinished)
        shutil.rmtree(before, ignore_errors=True)
    barrier()


def make_room(path: str | Path, *, first: bool, agreed: Callable[[bool], bool]) -> None:
    """Remove a checkpoint's directory where a file is to be written. Every rank calls it, with rank 0's ``path``.

    ``first``: whether this is rank 0. ``agreed``: returns rank 0's answer on every rank.

    Raises ConfigError: there is a directory of something else.
    """
    if is_remote(path):
        return
    path = Path(path)
    if agreed(path.is_dir() and not is_folder(path)):
        raise ConfigError(
            f"{path} is a directory, and no checkpoint, where a file is to be written. Choose another path."
        )
    if first and path.is_dir():
        shutil.rmtree(path)


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
