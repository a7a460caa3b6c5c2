"""``fully_shard`` and the functions beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import polyshard
import torch
from polyshard.errors import (
    ConfigAssertionError,
    ConfigError,
    ConfigTypeError,
)
from polyshard.extension import MODULE_STATE_ATTRIBUTE, parameters_to_shard, refuse_torch_sharded, root_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ._meshes import DataMesh, Placed, data_mesh, places_of, placings_of
from ._settings import config_for
from ._state import STATE_ATTRIBUTE, State, state_of, states_in, together
from ._torch_private import note_composed
from .fsdp_module import FSDPModule, class_of
from .policies import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

#: A module, or a list of modules.
M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])

_WHOLE = MixedPrecisionPolicy()
_HERE = OffloadPolicy()


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    mp_policy: MixedPrecisionPolicy = _WHOLE,
    offload_policy: OffloadPolicy | None = _HERE,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Shard what in ``module`` is not sharded yet, in place, over ``mesh``; returns ``module``, now an ``FSDPModule``.

    To be called from the inside out, before an optimizer is made: ``module.parameters()`` are new objects, ``DTensor``
    over this rank's part of each. Parameters on the meta device stay there until ``to_empty``, or
    ``load_state_dict(assign=True)``, gives them memory; other ranks may have values of them already.

    Args:
        module: A module, or a list of modules, which are one group: gathered when the first of them runs, released when
            each has run. Another sharded module contains all of them. Those inside others of the list count with these.
        mesh: One dimension to shard over, or two: (replicate, shard). All ranks where None. With ``dp_mesh_dims`` the
            whole mesh that parameters are ``DTensor`` on.
        reshard_after_forward: Whether parameters are released after forward. None: but for the outermost module's.
        shard_placement_fn: May answer ``Shard(n)`` for a parameter, whose dimension ``n`` the ranks divide, where not
            ``Shard(0)``; or torch's ``ShardPlacementResult``, with a mesh of its own.
        mp_policy: Dtypes.
        offload_policy: Where shards live between uses; None for where they compute.
        ignored_params: Parameters that stay as they are.
        dp_mesh_dims: Which dimensions of ``mesh`` parameters are sharded and replicated over; on these they are
            replicated before, or known as ``R`` to ``spmd_types``.

    Raises:
        ConfigError, UnsupportedError: an argument cannot be honoured.
        AlreadyShardedError: a module, or a parameter of it, is sharded already.
        ShardingError, RankMismatchError: as ``polyshard.fully_shard``.
    """
    modules = _modules(module)
    for each in modules:
        refuse_torch_sharded(each)
    # Inside of a context for the meta device, the ranks of a mesh would be computed there.
    with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
        _shard(
            modules,
            data_mesh(mesh, dp_mesh_dims),
            reshard_after_forward,
            shard_placement_fn,
            mp_policy,
            offload_policy,
            frozenset(ignored_params or ()),
        )
    return module


def _shard(
    modules: Sequence[nn.Module],
    over: DataMesh,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    ignored: frozenset[nn.Parameter],
) -> None:
    # What is wrong in a setting is found before anything is asked of parameters.
    settings = partial(config_for, over, reshard_after_forward, mp_policy, offload_policy)
    settings({})
    module = together(modules)
    for module_state in (state.module_state for state in states_in(module)):
        if module_state is not None and root_of(module_state).awaits_optimizer:
            root_of(module_state).settle()
    named = _unsharded_parameters(module, ignored)
    placings = placings_of(named.items(), shard_placement_fn, over)
    places = places_of(named, placings, over)
    placed = Placed(placings, mp_policy)
    state = State(tuple(modules), settings(named), ignored, placed, places)
    state.cut()
    for each in modules:
        each.__dict__[STATE_ATTRIBUTE] = state
        note_composed(each, state)
        kind: Any = type(each)
        each.__class__ = class_of(kind)


fully_shard.state = state_of  # type: ignore[attr-defined]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` see whole parameters, as ``forward`` does. Nothing for other modules.

    Raises:
        ConfigError: it has no such method.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ConfigError(f"{type(module)} does not have a method {method_name}. Name a method that computes.")
    if state.module_state is not None:
        polyshard.register_forward_method(module, method_name)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Nothing: models over the same ranks share communicators.

    Raises:
        ConfigError: some of ``modules`` are no ``FSDPModule``.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(f"Expects list of FSDPModules but got {module}. Give modules that are sharded.")


def _modules(module: object) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    found: list[nn.Module] = []
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ConfigTypeError(f"fully_shard expects a module or a list of modules, but got {each!r}.")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ConfigError(
                f"fully_shard does not support containers that do not implement forward: {each}. Shard the modules in "
                "it one by one."
            )
        if isinstance(each, FSDPModule) or each in found:
            raise ConfigAssertionError(
                "Each distinct composable distributed API can only be applied to a module once. This "
                f"{type(each).__name__} was given to fully_shard before."
            )
        found.append(each)
    if not found:
        raise ConfigError("fully_shard got an empty list. Give a module, or some.")
    inside = {inner for each in found for inner in each.modules() if inner is not each}
    return [each for each in found if each not in inside]


def _unsharded_parameters(module: nn.Module, ignored: frozenset[nn.Parameter]) -> dict[str, nn.Parameter]:
    """What ``fully_shard(module)`` is to shard, by the names that the engine has for it."""
    inside = {
        parameter
        for inner in module.modules()
        if MODULE_STATE_ATTRIBUTE in inner.__dict__ or state_of(inner) is not None
        for parameter in inner.parameters()
    }
    found = parameters_to_shard(module, ignored_parameters=ignored)
    return {name: parameter for parameter, name in found.items() if parameter not in inside}
