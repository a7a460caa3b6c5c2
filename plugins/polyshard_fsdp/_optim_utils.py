"""Optimizer state dicts of FSDP instances, in the form that the state dict type says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from polyshard.errors import StateError
from torch import nn

from . import _state_dict_utils
from ._optim_gather import Form, gather_optim_state, home_of
from ._optim_load import shard_optim_state
from ._optim_names import ModelNames, is_keyed_by_name, keys_of
from .api import StateDictSettings, StateDictType


@torch.no_grad()
def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: Mapping[str, Any] | None, group: Any
) -> dict[str, Any]:
    """The state of ``optim`` under the names, and in the shapes, of the unwrapped model.

    Args:
        model: An FSDP instance, or a module with some inside. All ranks call this together.
        optim: An optimizer of its parameters.
        optim_state_dict: What to convert instead of ``optim.state_dict()``.
        group: The ranks that call this; None for the default group.

    Returns:
        With ``FULL_STATE_DICT``, whole tensors; with ``rank0_only``, on ranks other than 0, an empty dict. With the
        other two types a ``ShardedTensor`` for each, or a ``DTensor`` where the instances have a mesh; where nothing is
        cut, whole tensors too.

    Raises:
        StateError: (a ``RuntimeError``) ``LOCAL_STATE_DICT`` with a device mesh.
        ConfigError, OptimStateKeyError, RankMismatchError: state and parameters do not fit; before any of the state is
            sent.
    """
    names = ModelNames(model)
    settings = _settings(model, names)
    config = settings.optim_state_dict_config
    given: Mapping[str, Any] = optim.state_dict() if optim_state_dict is None else optim_state_dict
    form = Form(
        distributed=settings.state_dict_type is not StateDictType.FULL_STATE_DICT,
        offload=config.offload_to_cpu,
        rank0_only=getattr(config, "rank0_only", False),
    )
    return gather_optim_state(names, given, keys_of(optim, names, named=is_keyed_by_name(given)), group, form)


@torch.no_grad()
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any],
    is_named_optimizer: bool,
    load_directly: bool,
    group: Any,
) -> dict[str, Any]:
    """What ``optim_state_dict`` returned, as ``optim.load_state_dict`` takes it on this rank.

    The number of ranks, the sharding strategy and ``use_orig_params`` may be others than those of the model that was
    saved; so may be a model that was never sharded, once its state is keyed by names.

    Args:
        model: An FSDP instance, or a module with some inside. All ranks call this together.
        optim: An optimizer of its parameters.
        optim_state_dict: Keyed by names. With ``rank0_only`` in the settings, rank 0's is used and sent to the others.
        is_named_optimizer: ``optim`` keys its state by names, and wants an entry for every parameter.
        load_directly: Load it, too.
        group: The ranks that call this; None for the default group.

    Raises:
        ConfigError: (a ``ValueError``) without "state", or with state that does not fit the parameters.
        OptimStateKeyError: (a ``KeyError``) for other parameters.
    """
    names = ModelNames(model)
    settings = _settings(model, names)
    result = shard_optim_state(
        names,
        optim_state_dict,
        keys_of(optim, names, named=is_named_optimizer),
        home_of(group, names),
        rank0_only=getattr(settings.optim_state_dict_config, "rank0_only", False),
        optim=optim,
        named=is_named_optimizer,
    )
    if load_directly:
        optim.load_state_dict(result)
    return result


def _settings(model: nn.Module, names: ModelNames) -> StateDictSettings:
    settings = _state_dict_utils._get_state_dict_type(model)
    meshed = any(each.instance._device_mesh is not None for each in names.flattened)
    if meshed and settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise StateError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT. Please set "
            f"state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict (rank {names.rank})."
        )
    return settings
