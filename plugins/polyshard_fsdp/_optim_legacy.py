"""The older functions for optimizer state dicts, which take their settings as arguments."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from polyshard.errors import ConfigAssertionError, ConfigError
from torch import nn

from ._common_utils import _get_param_to_fqns
from ._optim_gather import Form, gather_optim_state, home_of
from ._optim_load import shard_optim_state
from ._optim_names import Key, ModelNames, OptimStateKeyError, is_keyed_by_name, keys_of, keys_of_input

#: What an optimizer is constructed with.
OptimInput = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None


@torch.no_grad()
def full_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_input: OptimInput, rank0_only: bool, group: Any
) -> dict[str, Any]:
    """The whole state by parameter names, in host memory; on other ranks than 0 nothing, with ``rank0_only``."""
    _warn_replaced("full_optim_state_dict", "optim_state_dict")
    _warn_about_input(optim_input)
    given = optim.state_dict()
    names = ModelNames(model)
    keys = _keys(model, names, optim, optim_input, named=is_keyed_by_name(given))
    return gather_optim_state(names, given, keys, group, Form(distributed=False, offload=True, rank0_only=rank0_only))


@torch.no_grad()
def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any) -> dict[str, Any]:
    """The state by parameter names as distributed tensors, in host memory."""
    _warn_replaced("sharded_optim_state_dict", "optim_state_dict")
    given = optim.state_dict()
    names = ModelNames(model)
    keys = _keys(model, names, optim, None, named=is_keyed_by_name(given))
    return gather_optim_state(names, given, keys, group, Form(distributed=True, offload=True, rank0_only=False))


@torch.no_grad()
def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: OptimInput,
    optim: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """This rank's part of what ``full_optim_state_dict`` returned. Does not communicate."""
    _warn_replaced("shard_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_about_input(optim_input)
    return _shard(full_optim_state_dict, model, optim_input, optim)


@torch.no_grad()
def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """This rank's part of what ``sharded_optim_state_dict`` returned."""
    _warn_replaced("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return _shard(sharded_optim_state_dict, model, None, optim)


@torch.no_grad()
def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput,
    optim: torch.optim.Optimizer | None,
    group: Any,
) -> dict[str, Any]:
    """The same as ``shard_full_optim_state_dict``, where rank 0 alone has the whole state."""
    _warn_replaced("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_about_input(optim_input)
    return _shard(full_optim_state_dict, model, optim_input, optim, rank0_only=True, group=group)


@torch.no_grad()
def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    to_names: bool,
    model: nn.Module,
    optim_input: OptimInput,
    optim: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """``optim_state_dict`` keyed by parameter names, or by positions in the optimizer of ``model``.

    Args:
        optim_state_dict: By either; returned as it is where its keys are right already.
        to_names: By names; else by positions.
        model: Whose parameters the keys stand for. Usually one that is not sharded.
        optim_input: What its optimizer was constructed with; deprecated.
        optim: Its optimizer. Without both, one of ``model.parameters()``.

    Raises:
        ConfigError: (a ``ValueError``) some keys are names and others positions.
        OptimStateKeyError: (a ``KeyError``) a key that stands for no parameter of the optimizer.
    """
    _warn_about_input(optim_input)
    state = optim_state_dict["state"]
    kinds = {type(key) for key in state}
    if len(kinds) > 1 and kinds & {str, int}:
        raise ConfigError(
            f"Invalid parameter keys: {list(state)}. They must all be parameter names, or all be positions."
        )
    if not kinds - {str if to_names else int}:
        return optim_state_dict
    if optim_input is None and optim is not None:
        parameters: dict[Key, nn.Parameter] = dict(
            enumerate(parameter for group in optim.param_groups for parameter in group["params"])
        )
    else:
        parameters = keys_of_input(model, optim_input)
    names = {parameter: found[0] for parameter, found in _get_param_to_fqns(model).items()}
    wanted: dict[Key, Key] = {}
    for position, parameter in parameters.items():
        name = names.get(parameter)
        if name is None:
            raise OptimStateKeyError(
                f"Can't find parameter {position} of the optimizer, of shape {tuple(parameter.shape)}, from "
                f"{list(names.values())}. Pass the optimizer of this model."
            )
        wanted.update({position: name} if to_names else {name: position})

    def renamed(key: Key) -> Key:
        if key not in wanted:
            raise OptimStateKeyError(
                f"Can't find {key} from {list(wanted)}. Pass the optimizer that has this parameter."
            )
        return wanted[key]

    groups = []
    for group in optim_state_dict["param_groups"]:
        keys = [renamed(key) for key in group["params"]]
        settings = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
        # An optimizer matches parameters by their order alone.
        groups.append({**settings, "params": keys if to_names else sorted(keys)})
    return {"state": {renamed(key): value for key, value in state.items()}, "param_groups": groups}


def _shard(
    optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput,
    optim: torch.optim.Optimizer | None,
    *,
    rank0_only: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    names = ModelNames(model)
    keys = _keys(model, names, optim, optim_input, named=False)
    return shard_optim_state(
        names,
        optim_state_dict,
        keys,
        home_of(group, names) if rank0_only else None,
        rank0_only=rank0_only,
        optim=optim if optim_input is None else None,
        named=False,
    )


def _keys(
    model: nn.Module,
    names: ModelNames,
    optim: torch.optim.Optimizer | None,
    optim_input: OptimInput,
    *,
    named: bool,
) -> dict[Key, nn.Parameter]:
    if optim is not None and optim_input is None:
        return keys_of(optim, names, named=named)
    keys = keys_of_input(model, optim_input)
    for parameter in keys.values():
        names.names_of(parameter)
    return keys


def refuse_key_type(key_type: object) -> ConfigAssertionError:
    """The error for what is no ``OptimStateKeyType``."""
    return ConfigAssertionError(f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {key_type}.")


def _warn_about_input(optim_input: OptimInput) -> None:
    if optim_input is not None:
        _warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You may remove it from "
            "your code without changing its functionality."
        )


def _warn_replaced(current: str, replacement: str) -> None:
    _warn(
        f"``FullyShardedDataParallel.{current}``is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{replacement}``. ``FullyShardedDataParallel.{current}`` may be removed after "
        "PyTorch 2.2."
    )


def _warn(text: str) -> None:
    # Above this: its caller, the function, torch.no_grad, the static method; then the user's line.
    warnings.warn(text, FutureWarning, stacklevel=6)
