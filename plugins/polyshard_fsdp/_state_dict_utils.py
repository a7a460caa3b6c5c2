"""State dicts of FSDP instances: hooks around torch's own walk over the modules."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from polyshard.errors import StateError
from torch import nn

from ._common_utils import FSDP_PREFIX, clean_tensor_name
from ._state import FSDPInstance
from ._state_dict_full import Form, FullForm
from ._state_dict_local import LocalForm
from ._state_dict_sharded import ShardedForm
from ._state_dict_type import _choose_kind_of_tensor, _get_state_dict_type, _set_state_dict_type, _state_dict_type
from .api import FullStateDictConfig, ShardingStrategy, StateDictType

__all__ = [
    "_get_state_dict_type",
    "_register_all_state_dict_hooks",
    "_set_state_dict_type",
    "_state_dict_type",
]


def _register_all_state_dict_hooks(instance: FSDPInstance) -> None:
    """Let the state dicts of ``instance``, a wrapper or the state of a module sharded in place, be of its kind."""
    hooks = instance._state_dict_walk = _Hooks(instance)
    module = instance._stage.module
    module.register_state_dict_pre_hook(hooks.before_save)  # type: ignore[no-untyped-call]
    # Torch marks what it is given, and a bound method cannot be marked.
    module.register_state_dict_post_hook(functools.partial(hooks.after_save))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(hooks.before_load)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(hooks.after_load)  # type: ignore[no-untyped-call]


class _Hooks:
    """One instance's hooks. The form is chosen before torch's walk, and the same one is used after it."""

    def __init__(self, instance: FSDPInstance) -> None:
        self._instance = instance
        #: What the wrapper's registration adds to the names inside; a module sharded in place adds nothing.
        self._added = FSDP_PREFIX if isinstance(instance, nn.Module) else ""
        self._form: Form | None = None
        self._errors: list[str] = []

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Before the module and those inside write their entries."""
        with self._leaving_on_failure(), torch.no_grad():
            self._begin("When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.")
            assert self._form is not None
            self._form.before_save()

    def after_save(self, module: nn.Module, values: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """When all entries are there, under their names with the wrapper's prefix."""
        form, self._form = self._form, None
        assert form is not None
        self._rename(values, prefix + self._added, prefix)
        with self._leaving_on_failure(), torch.no_grad():
            form.after_save(values, prefix)

    def before_load(
        self,
        module: nn.Module,
        values: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_messages: list[str],
    ) -> None:
        """Before the module and those inside look for their entries."""
        self._errors = error_messages
        with self._leaving_on_failure(), torch.no_grad():
            self._begin("When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict willbe returned.")
            assert self._form is not None
            self._form.before_load(values, prefix)
        self._rename(values, prefix, prefix + self._added)

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """When everything was copied, and before torch reports what did not fit."""
        form, self._form = self._form, None
        assert form is not None
        with self._leaving_on_failure(), torch.no_grad():
            form.after_load()
        for reported in (*incompatible_keys, self._errors):
            reported[:] = map(clean_tensor_name, reported)
        self._errors = []

    def abandon(self) -> None:
        """Leave a walk that will not go on."""
        form, self._form = self._form, None
        if form is not None:
            form.abandon()

    def _begin(self, warning: str) -> None:
        # A hook of a module inside may have raised last time, and then nothing was called after the walk.
        self.abandon()
        self._form = self._choose(warning)

    def _choose(self, warning: str) -> Form:
        instance = self._instance
        kind, config = instance._state_dict_type, instance._state_dict_config
        if instance.sharding_strategy is ShardingStrategy.NO_SHARD:
            if kind is not StateDictType.FULL_STATE_DICT:
                warnings.warn(warning, stacklevel=5)
                kind, config = StateDictType.FULL_STATE_DICT, FullStateDictConfig()
        elif instance._device_mesh is not None:
            if kind is StateDictType.LOCAL_STATE_DICT:
                raise StateError(
                    "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT. "
                    "Please set state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict. "
                    f"'{instance._stage.name or '(root)'}' on rank {instance.rank} has one."
                )
            _choose_kind_of_tensor(instance)
        if kind is StateDictType.FULL_STATE_DICT:
            return FullForm(instance, config)
        if kind is StateDictType.SHARDED_STATE_DICT:
            return ShardedForm(instance, config)
        return LocalForm(instance, config)

    @contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        """Where the instance refuses, those around it, in the midst of the same walk, leave it too."""
        try:
            yield
        except BaseException:
            self._instance._abandon_state_dicts()
            raise

    @staticmethod
    def _rename(values: dict[str, Any], old: str, new: str) -> None:
        if old != new:
            for key in [key for key in values if key.startswith(old)]:
                values[new + key[len(old) :]] = values.pop(key)
