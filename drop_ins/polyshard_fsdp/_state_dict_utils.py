"""Model state dicts: hooks around torch's own walk over the modules, for each of the three types.

Also here: the type that instances are set to.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from polyshard.errors import StateError, StepAssertionError
from polyshard.extension import is_dtensor, local_of
from torch import nn
from typing_extensions import override

from . import _torch_private
from ._common_utils import FLAT_PARAM, FSDP_PREFIX, clean_tensor_name, warn
from ._flat_param import FlatParamHandle
from ._shard_utils import PartPlacement, gathered, is_cut_along_rows, own_rows, refuse_other_cut, shape_of
from ._state import FSDPInstance
from ._unit import FlatUnit
from ._unshard_param_utils import _refuse_busy, _Summoned
from .api import (
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)

_LOGGER = logging.getLogger(__name__)


def _choose_kind_of_tensor(instance: FSDPInstance) -> None:
    """Mark the settings of an instance with a device mesh, whose values are ``DTensor``."""
    if instance._device_mesh is None:
        return
    for config in (instance._state_dict_config, instance._optim_state_dict_config):
        if isinstance(config, (ShardedStateDictConfig, ShardedOptimStateDictConfig)):
            config._use_dtensor = True


def refuse_local(instance: FSDPInstance, kind: StateDictType) -> None:
    """Raise ``StateError`` (a ``RuntimeError``) for ``LOCAL_STATE_DICT`` of an instance with a device mesh."""
    if instance._device_mesh is not None and kind is StateDictType.LOCAL_STATE_DICT:
        raise StateError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT. Please set "
            f"state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict. {instance._where} has one."
        )


def _register_all_state_dict_hooks(instance: FSDPInstance) -> None:
    """Let the state dicts of ``instance`` be of its type."""
    hooks = instance._state_dict_walk = _Hooks(instance)
    module = instance._module_state.module
    module.register_state_dict_pre_hook(hooks.before_save)  # type: ignore[no-untyped-call]
    # Torch marks the hook, and a bound method cannot be marked.
    module.register_state_dict_post_hook(functools.partial(hooks.after_save))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(hooks.before_load)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(hooks.after_load)  # type: ignore[no-untyped-call]


class _Hooks:
    """One instance's hooks. The form is chosen before torch's walk, and the same one is used after it."""

    def __init__(self, instance: FSDPInstance) -> None:
        self._instance = instance
        self._form: FullForm | LocalForm | None = None
        self._errors: list[str] = []

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Before the module and those inside write their entries."""
        with self._leaving_on_failure(), torch.no_grad():
            self._begin().before_save()

    def after_save(self, module: nn.Module, values: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """When all entries are there, under their names with the wrapper's prefix."""
        form = self._end()
        self._rename(values, prefix + FSDP_PREFIX, prefix)
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
            self._begin().before_load(values, prefix)
        self._rename(values, prefix, prefix + FSDP_PREFIX)

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """When everything was copied, and before torch reports what did not fit."""
        form = self._end()
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

    def _begin(self) -> FullForm | LocalForm:
        # A hook of a module inside may have raised last time, and then nothing was called after the walk.
        self.abandon()
        instance = self._instance
        kind, config = instance._state_dict_type, instance._state_dict_config
        if instance.sharding_strategy is ShardingStrategy.NO_SHARD:
            if kind is not StateDictType.FULL_STATE_DICT:
                warn("When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.")
                kind, config = StateDictType.FULL_STATE_DICT, FullStateDictConfig()
        else:
            refuse_local(instance, kind)
            _choose_kind_of_tensor(instance)
        if kind is StateDictType.LOCAL_STATE_DICT:
            self._form = LocalForm(instance, config)
        else:
            self._form = (FullForm if kind is StateDictType.FULL_STATE_DICT else ShardedForm)(instance, config)
        return self._form

    def _end(self) -> FullForm | LocalForm:
        form, self._form = self._form, None
        assert form is not None
        return form

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
        for key in [key for key in values if key.startswith(old)]:
            values[new + key[len(old) :]] = values.pop(key)


class _Form:
    """One instance's part in one ``state_dict`` or ``load_state_dict``, before and after torch's own walk.

    In ``values`` the instance's entries stand under ``prefix`` and their clean names, without what wrappers add.
    """

    def __init__(self, instance: FSDPInstance, config: StateDictConfig) -> None:
        self.instance = instance
        self.unit: FlatUnit | None = instance._flat_unit
        self._offloads = config.offload_to_cpu
        parameters = instance._handle.parameters if instance._handle is not None else ()
        #: The names of each parameter of the unit, below the instance's prefix.
        self.names = [tuple(dict.fromkeys(map(clean_tensor_name, each.names))) for each in parameters]
        #: By index, the part of a parameter that is one by tensor parallelism.
        self.parts = {index: each.part for index, each in enumerate(parameters) if each.part is not None}


class FullForm(_Form):
    """Whole parameters, as copies. During torch's walk the module has them whole, so that hooks of modules inside, and
    modules that save and load themselves, find what they would find without sharding.

    Buffers are in the dtype that they had when the instance was constructed; where that is the one that they have, they
    are the module's own, not copies.
    """

    def __init__(self, instance: FSDPInstance, config: StateDictConfig) -> None:
        super().__init__(instance, config)
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
        for index, part in self.parts.items():
            for key in (prefix + name for name in self.names[index]):
                value = values.get(key)
                # Whole values of the unsharded model's, too: tensor parallelism alone would not take these.
                if isinstance(value, torch.Tensor) and not is_dtensor(value) and tuple(value.shape) == part.shape:
                    values[key] = part.as_leaf(part.cut(value.detach()).contiguous())

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
        unit.held.adopt_changes()
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
        originals = {} if instance.mixed_precision.buffer_dtype is None else instance._buffer_dtypes
        for module_name, holder in instance._module_state.inner.named_modules(remove_duplicate=False):
            for attribute in holder._buffers:
                key = prefix + clean_tensor_name(f"{module_name}.{attribute}" if module_name else attribute)
                buffer = values.get(key)
                if not isinstance(buffer, torch.Tensor):
                    continue
                if self._returns:
                    dtype = originals.get((holder, attribute), buffer.dtype)
                    values[key] = buffer.detach().to(dtype=dtype, device="cpu" if self._offloads else buffer.device)
                else:
                    del values[key]


class ShardedForm(FullForm):
    """Each parameter as a ``ShardedTensor`` cut along its first dimension, or as a ``DTensor`` where the instance was
    given a device mesh. Both are copies.
    """

    def __init__(self, instance: FSDPInstance, config: StateDictConfig) -> None:
        super().__init__(instance, config)
        self._as_dtensor = isinstance(config, ShardedStateDictConfig) and config._use_dtensor
        if self._as_dtensor and instance._device_mesh is None:
            raise StateError(
                f"ShardedStateDictConfig(_use_dtensor=True) needs a device mesh, and {instance._where} has none. "
                "Construct FSDP with device_mesh."
            )
        #: By index, where parameters are placed that are parts by tensor parallelism.
        self._placements = {
            index: PartPlacement.of(part, instance, self.names[index][0]) for index, part in self.parts.items()
        }

    @override
    def convert(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        if index in self._placements:
            return self._placements[index].own_rows(local_of(whole), offload=self._offloads)
        mesh = self.instance._device_mesh if self._as_dtensor else None
        return own_rows(whole, self.instance, mesh, offload=self._offloads)

    @override
    def before_load(self, values: dict[str, Any], prefix: str) -> None:
        if self.unit is not None:
            self._assemble(values, prefix, self.unit)
        super().before_load(values, prefix)

    def _assemble(self, values: dict[str, Any], prefix: str, unit: FlatUnit) -> None:
        """Replace this unit's pieces by whole tensors."""
        found: list[tuple[int, list[str], Any]] = []
        for index, names in enumerate(self.names):
            keys = [prefix + name for name in names if prefix + name in values]
            if keys:
                found.append((index, keys, values[keys[0]]))
            else:
                _LOGGER.warning(
                    "Did not find param with FQN %s, skipping it. The weight will not be filled if you expect it to "
                    "be.",
                    clean_tensor_name(prefix + names[0]),
                )
        for index, keys, value in found:
            self._refuse_other(value, unit, keys[0], self._placements.get(index))
        for index, keys, value in found:
            placement = self._placements.get(index)
            shape = shape_of(value)
            if placement is not None and shape == placement.part.shape:
                values.update(dict.fromkeys(keys, placement.own_part(value, unit.master.dtype)))
            elif shape != unit.layout.slots[index].shape:
                # Torch's walk compares shapes first, and reports this one among all that do not fit.
                values.update(dict.fromkeys(keys, torch.empty(shape, device="meta")))
            elif unit.ranks.owner is not None:
                values.update(dict.fromkeys(keys, gathered(value, self.instance)))

    def _refuse_other(self, value: Any, unit: FlatUnit, key: str, placement: PartPlacement | None) -> None:
        """Refuse a value of another type, or that other ranks cut."""
        name, ranks = clean_tensor_name(key), unit.ranks.shard_size
        if placement is not None:
            if not placement.holds(value):
                raise StepAssertionError(
                    f"Expected DTensor on {placement.mesh}, got {type(value)} for '{name}' on rank "
                    f"{self.instance.rank}. Load what SHARDED_STATE_DICT made of a model with the same meshes."
                )
        elif _torch_private.is_sharded_tensor(value):
            refuse_other_cut(value, ranks, f"'{name}'", self.instance.rank)
        elif not is_cut_along_rows(value, ranks):
            expected = "DTensor cut along its rows" if self._as_dtensor else "ShardedTensor"
            raise StepAssertionError(
                f"Expected {expected}, got {type(value)} for '{name}' on rank {self.instance.rank}. Load it as the "
                "type of state dict that it was saved as."
            )


class LocalForm(_Form):
    """The flat parameter as a ``ShardedTensor`` without the padding at its end.

    Nothing is sent and nothing is copied: values change with the parameters, unless they were moved to host memory.
    """

    def __init__(self, instance: FSDPInstance, config: StateDictConfig) -> None:
        super().__init__(instance, config)
        self._withdrawn: FlatParamHandle | None = None

    def before_save(self) -> None:
        self._take_up_changes()

    def after_save(self, values: dict[str, Any], prefix: str) -> None:
        unit = self.unit
        if unit is None:
            return
        for names in self.names:
            for name in names:
                values.pop(prefix + name, None)
        own = unit.master.detach().narrow(0, 0, self._own_numel(unit))
        shard_numel, total = unit.layout.shard_numel, unit.handle.unsharded_numel
        starts = range(0, total, shard_numel)
        values[prefix + FLAT_PARAM] = _torch_private.make_sharded_tensor(
            own.cpu() if self._offloads else own,
            (total,),
            [((start,), (min(shard_numel, total - start),)) for start in starts],
            self.instance.process_group,
        )

    def before_load(self, values: dict[str, Any], prefix: str) -> None:
        self._take_up_changes()
        unit = self.unit
        if unit is None:
            return
        key = prefix + FLAT_PARAM
        own = self._own_in(values.pop(key, None), unit, clean_tensor_name(key))
        unit.master.detach()[: own.numel()].copy_(own)
        # It is done, and torch's walk shall find nothing to do: it would look for the flat parameter below whatever
        # prefix a checkpoint wrapper adds.
        if unit.handle._use_orig_params:
            for names, parameter in zip(self.names, unit.handle.parameters, strict=True):
                for name in names:
                    values[prefix + name] = parameter.original.detach()
        else:
            unit.handle.deregister_flat_param()
            self._withdrawn = unit.handle

    def after_load(self) -> None:
        """Leave the instance as it was before."""
        withdrawn, self._withdrawn = self._withdrawn, None
        if withdrawn is not None:
            withdrawn.register_flat_param()

    abandon = after_load

    def _take_up_changes(self) -> None:
        instance = self.instance
        if self.unit is None:
            return
        if instance._summoned:
            raise StateError(
                f"The parameters of '{self.unit.name}' are whole on rank {instance.rank}, and LOCAL_STATE_DICT is made "
                "of shards. Leave summon_full_params first."
            )
        _refuse_busy(instance)
        self.unit.held.adopt_changes()

    def _own_numel(self, unit: FlatUnit) -> int:
        shard_numel = unit.layout.shard_numel
        left = unit.handle.unsharded_numel - unit.ranks.shard_rank * shard_numel
        return min(max(left, 0), shard_numel)

    def _own_in(self, value: object, unit: FlatUnit, key: str) -> torch.Tensor:
        where = f"'{key}' on rank {self.instance.rank}"
        if value is None:
            raise StepAssertionError(
                f"No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters: {where}. Load what "
                "LOCAL_STATE_DICT made of the same wrapping."
            )
        if not _torch_private.is_sharded_tensor(value):
            raise StepAssertionError(
                f"Tensors in local_state_dict should be ShardedTensor. {where} is {type(value)}. Load it as the type "
                "of state dict that it was saved as."
            )
        shards = _torch_private.shards_of(value)
        numel = self._own_numel(unit)
        if not numel:
            return unit.master.detach()[:0]
        if len(shards) != 1:
            raise StepAssertionError(
                f"load_local_state_dict assume one shard per ShardedTensor. {where} has {len(shards)}. Load it with "
                "the number of ranks that saved it."
            )
        if shards[0].numel() != numel:
            raise StepAssertionError(
                f"Local shard size = {numel} and the tensor in the state_dict is {shards[0].numel()}. {where}: load it "
                "with the wrapping and the number of ranks that saved it."
            )
        return shards[0]
