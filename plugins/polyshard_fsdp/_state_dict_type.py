"""Which kind of state dict the FSDP instances in a module make."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from polyshard.errors import ConfigAssertionError, ConfigTypeError, StateError
from torch import nn

from ._state import FSDPInstance
from ._torch_settings import own
from ._traversal_utils import _get_fsdp_states
from .api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)


@dataclass(frozen=True)
class _ConfigClasses:
    model: type[StateDictConfig]
    optimizer: type[OptimStateDictConfig]


_CLASSES = {
    StateDictType.FULL_STATE_DICT: _ConfigClasses(FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: _ConfigClasses(LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: _ConfigClasses(ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def _set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Set the kind for every instance in ``module``; returns the settings before.

    Raises:
        StateError: (a ``RuntimeError``) a config of another kind.
        ConfigAssertionError: (an ``AssertionError``) the instances differ in the settings that they have.
    """
    _warn_of_deprecation()
    return _change(module, state_dict_type, state_dict_config, optim_state_dict_config)


def _state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> AbstractContextManager[None]:
    """``_set_state_dict_type`` for the time of a context."""
    _warn_of_deprecation()
    return _changed(module, state_dict_type, state_dict_config, optim_state_dict_config)


def _get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """The settings that all instances in ``module`` share; the default ones where there is no instance.

    They say that values are ``DTensor`` where the instances were given a device mesh.

    Raises:
        ConfigAssertionError: (an ``AssertionError``) they differ.
    """
    instances: list[FSDPInstance] = _get_fsdp_states(module)
    for each in instances:
        _choose_kind_of_tensor(each)
    settings = _settings_of(instances)
    for each in instances:
        theirs = _settings_of([each])
        if theirs != settings:
            raise ConfigAssertionError(
                f"All FSDP modules must have the same state dict settings.Got {theirs} and {settings}. '{_where(each)} "
                "is the first that differs. Set them on the outermost module."
            )
    return settings


@contextmanager
def _changed(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> Iterator[None]:
    before = _change(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        _assign(_get_fsdp_states(module), before)


def _change(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    kind = own(state_dict_type, StateDictType, "state_dict_type")
    if kind is None:
        raise ConfigTypeError("`state_dict_type` should be a StateDictType but got None. Pass one of its members.")
    classes = _CLASSES[kind]
    model_config = own(state_dict_config, StateDictConfig, "state_dict_config")
    optim_config = own(optim_state_dict_config, OptimStateDictConfig, "optim_state_dict_config")
    chosen = StateDictSettings(
        kind,
        classes.model() if model_config is None else model_config,
        classes.optimizer() if optim_config is None else optim_config,
    )
    instances: list[FSDPInstance] = _get_fsdp_states(module)
    where = f"in {type(module).__name__}, for {kind}"
    if type(chosen.state_dict_config) is not classes.model:
        raise StateError(
            f"Expected state_dict_config of type {classes.model} but got {type(state_dict_config)} {where}. Pass a "
            f"{classes.model.__name__}, or none."
        )
    if type(chosen.optim_state_dict_config) is not classes.optimizer:
        raise StateError(
            f"Expected optim_state_dict_config of type {classes.optimizer} but got {type(optim_state_dict_config)} "
            f"{where}. Pass a {classes.optimizer.__name__}, or none."
        )
    before = _settings_of(instances)
    for each in instances:
        _refuse_differing(each, before)
    _assign(instances, chosen)
    return before


def _refuse_differing(instance: FSDPInstance, settings: StateDictSettings) -> None:
    advice = f"'{_where(instance)} is the first that differs. Set it on the outermost module."
    if instance._state_dict_type is not settings.state_dict_type:
        raise ConfigAssertionError(f"All FSDP modules should have the same state_dict_type. {advice}")
    if not isinstance(instance._state_dict_config, type(settings.state_dict_config)):
        raise ConfigAssertionError(f"All FSDP modules must have the same type of state_dict_config. {advice}")
    if not isinstance(instance._optim_state_dict_config, type(settings.optim_state_dict_config)):
        raise ConfigAssertionError(f"All FSDP modules must have the same type of optim_state_dict_config. {advice}")


def _where(instance: FSDPInstance) -> str:
    return f"{type(instance._stage.inner).__name__}' (rank {instance.rank})"


def _choose_kind_of_tensor(instance: FSDPInstance) -> None:
    """Mark the settings of an instance with a device mesh, whose values are ``DTensor``."""
    if instance._device_mesh is None:
        return
    for config in (instance._state_dict_config, instance._optim_state_dict_config):
        if isinstance(config, (ShardedStateDictConfig, ShardedOptimStateDictConfig)):
            config._use_dtensor = True


def _settings_of(instances: Sequence[FSDPInstance]) -> StateDictSettings:
    if not instances:
        return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
    first = instances[0]
    return StateDictSettings(first._state_dict_type, first._state_dict_config, first._optim_state_dict_config)


def _assign(instances: Sequence[FSDPInstance], settings: StateDictSettings) -> None:
    for each in instances:
        each._state_dict_type = settings.state_dict_type
        each._state_dict_config = settings.state_dict_config
        each._optim_state_dict_config = settings.optim_state_dict_config


def _warn_of_deprecation() -> None:
    warnings.warn(
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated. Please use APIs, get_state_dict() "
        "and set_state_dict(), which can support different parallelisms, FSDP1, FSDP2, DDP. Of those, polyshard_fsdp "
        "supports the ones for models alone; optimizers need this one.",
        FutureWarning,
        stacklevel=4,
    )
