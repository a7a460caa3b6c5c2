"""Whole parameters in state dicts, under the names that the model had before it was sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from polyshard.errors import StateError, StepAssertionError
from torch import nn

from ._common_utils import FLAT_PARAM, clean_tensor_name
from ._flat_param import FlatParamHandle
from ._state import FSDPInstance
from ._unit import FlatUnit
from ._unshard_param_utils import _refuse_busy, _Summoned
from .api import FullStateDictConfig, StateDictConfig


class Form(ABC):
    """One instance's part in one ``state_dict`` or ``load_state_dict``: what is done before and after torch's own walk.

    In ``values`` the instance's entries stand under ``prefix`` and their clean names, without what wrappers add.
    """

    def __init__(self, instance: FSDPInstance) -> None:
        self.instance = instance
        self.handle: FlatParamHandle | None = instance._handle
        self.unit: FlatUnit | None = instance._flat_unit
        parameters = instance._handle.parameters if instance._handle is not None else ()
        #: The names of each parameter of the unit, below the instance's prefix.
        self.names = [tuple(dict.fromkeys(map(clean_tensor_name, each.names))) for each in parameters]

    @abstractmethod
    def before_save(self) -> None:
        """Let torch's walk find what is needed."""

    @abstractmethod
    def after_save(self, values: dict[str, Any], prefix: str) -> None:
        """Replace what the walk found by what the caller asked for."""

    @abstractmethod
    def before_load(self, values: dict[str, Any], prefix: str) -> None:
        """Replace the caller's values by what torch's walk can copy."""

    @abstractmethod
    def after_load(self) -> None:
        """Keep what was copied."""

    @abstractmethod
    def abandon(self) -> None:
        """Leave the instance as it was before; nothing where that was done already."""


class FullForm(Form):
    """Whole parameters, as copies. During torch's walk the module has them whole, so that hooks of modules inside, and
    modules that save and load themselves, find what they would find without sharding.

    Buffers are in the dtype that they had when the instance was constructed; where that is the one that they have, they
    are the module's own, not copies.
    """

    def __init__(self, instance: FSDPInstance, config: StateDictConfig) -> None:
        super().__init__(instance)
        self._offloads = config.offload_to_cpu
        drops = isinstance(config, FullStateDictConfig) and config.rank0_only and instance.rank != 0
        #: Whether this rank returns values; else it takes part in the gathers alone.
        self._returns = not drops
        self._open: _Summoned | None = None

    def before_save(self) -> None:
        self._summon(self._returns)

    def after_save(self, values: dict[str, Any], prefix: str) -> None:
        try:
            for index, names in enumerate(self.names):
                keys = [prefix + name for name in names]
                if self._returns:
                    self._refuse_absent(values, keys[0], prefix)
                    saved = self.convert(index, values[keys[0]].detach())
                    values.update({key: saved for key in keys if key in values})
                else:
                    for key in keys:
                        values.pop(key, None)
            if not self._returns:
                values.pop(prefix + FLAT_PARAM, None)
            self._convert_buffers(values, prefix)
        finally:
            self.abandon()

    def before_load(self, values: dict[str, Any], prefix: str) -> None:
        self._summon(True)

    def after_load(self) -> None:
        try:
            if self._open is not None:
                self._open.write_back()
        finally:
            self.abandon()

    def abandon(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()
            self.instance._summoned = False

    def convert(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """What is saved of the unit's parameter ``index``, of which ``whole`` is the whole value."""
        return whole.to("cpu", copy=True) if self._offloads else whole.clone()

    def _summon(self, shows: bool) -> None:
        instance, unit = self.instance, self.unit
        if unit is None:
            return
        if instance._summoned:
            # Inside the user's own `summon_full_params`, which keeps or drops what is loaded.
            if shows and unit.whole_for_user is None:
                raise StateError(
                    f"The parameters of '{unit.name}' are not whole on rank {instance.rank}: this is inside "
                    "summon_full_params(rank0_only=True). Leave that context first."
                )
            return
        _refuse_busy(instance)
        unit.take_up_changes()
        self._open = _Summoned(unit, shows, False, False)
        instance._summoned = True

    def _refuse_absent(self, values: dict[str, Any], key: str, prefix: str) -> None:
        if key not in values:
            module_name, _, param_name = key[len(prefix) :].rpartition(".")
            raise StepAssertionError(
                f"FSDP assumes {key} is in the state_dict but the state_dict only has {values.keys()}. "
                f"prefix={prefix}, module_name={module_name}, param_name={param_name} rank={self.instance.rank}. "
                "A state dict hook of a module inside may have removed it: remove it from the result instead."
            )

    def _convert_buffers(self, values: dict[str, Any], prefix: str) -> None:
        instance = self.instance
        originals: dict[tuple[nn.Module, str], torch.dtype] = {}
        if instance.mixed_precision.buffer_dtype is not None:
            originals = {(holder, key): dtype for holder, key, dtype in instance._buffer_dtypes}
        for name, holder, attribute in self._buffers():
            key = prefix + name
            buffer = values.get(key)
            if not isinstance(buffer, torch.Tensor):
                continue
            if self._returns:
                dtype = originals.get((holder, attribute), buffer.dtype)
                values[key] = buffer.detach().to(dtype=dtype, device="cpu" if self._offloads else buffer.device)
            else:
                del values[key]

    def _buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        for module_name, holder in self.instance._stage.inner.named_modules(remove_duplicate=False):
            for attribute in holder._buffers:
                yield clean_tensor_name(f"{module_name}.{attribute}" if module_name else attribute), holder, attribute
