"""Flat shards in state dicts: each rank's part of each flat parameter, as it lies in memory."""

from __future__ import annotations

from typing import Any

import torch
from polyshard.errors import StateError, StepAssertionError

from . import _torch_private
from ._common_utils import FLAT_PARAM, clean_tensor_name
from ._flat_param import FlatParamHandle
from ._state import FSDPInstance
from ._state_dict_full import Form
from ._unit import FlatUnit
from ._unshard_param_utils import _refuse_busy
from .api import StateDictConfig


class LocalForm(Form):
    """The flat parameter as a ``ShardedTensor`` without the padding at its end.

    Nothing is sent and nothing is copied: values change with the parameters, unless they were moved to host memory.
    """

    def __init__(self, instance: FSDPInstance, config: StateDictConfig) -> None:
        super().__init__(instance)
        self._offloads = config.offload_to_cpu
        self._withdrawn: FlatParamHandle | None = None

    def before_save(self) -> None:
        self._settle()

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
        self._settle()
        unit = self.unit
        if unit is None:
            return
        key = prefix + FLAT_PARAM
        own = self._own_in(values.pop(key, None), unit, clean_tensor_name(key))
        unit.master.detach()[: own.numel()].copy_(own)
        # It is done, and torch's walk shall find nothing to do: it would look for the flat parameter below whatever
        # prefix a checkpoint wrapper adds.
        if unit.handle.use_orig_params:
            for names, parameter in zip(self.names, unit.handle.parameters, strict=True):
                for name in names:
                    values[prefix + name] = parameter.original.detach()
        else:
            unit.handle.deregister_flat_param()
            self._withdrawn = unit.handle

    def after_load(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        withdrawn, self._withdrawn = self._withdrawn, None
        if withdrawn is not None:
            withdrawn.register_flat_param()

    def _settle(self) -> None:
        instance = self.instance
        if self.unit is None:
            return
        if instance._summoned:
            raise StateError(
                f"The parameters of '{self.unit.name}' are whole on rank {instance.rank}, and LOCAL_STATE_DICT is made "
                "of shards. Leave summon_full_params first."
            )
        _refuse_busy(instance)
        self.unit.take_up_changes()

    def _own_numel(self, unit: FlatUnit) -> int:
        shard_numel = unit.layout.shard_numel
        left = unit.handle.unsharded_numel - unit.grid.shard_rank * shard_numel
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
