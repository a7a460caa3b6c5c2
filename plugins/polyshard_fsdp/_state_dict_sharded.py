"""Pieces of parameters in state dicts: each rank's rows of every parameter, whole in its other dimensions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from polyshard.errors import StateError, StepAssertionError

from . import _torch_private
from ._common_utils import clean_tensor_name
from ._rows import cut_otherwise, gather_rows, own_rows, shape_of
from ._state import FSDPInstance
from ._state_dict_full import FullForm
from ._unit import FlatUnit
from .api import ShardedStateDictConfig, StateDictConfig

_LOGGER = logging.getLogger(__name__)


class ShardedForm(FullForm):
    """Each parameter as a ``ShardedTensor`` cut along its first dimension, or as a ``DTensor`` where the instance was
    given a device mesh. Both are copies.
    """

    def __init__(self, instance: FSDPInstance, config: StateDictConfig) -> None:
        super().__init__(instance, config)
        self._as_dtensor = isinstance(config, ShardedStateDictConfig) and config._use_dtensor
        if self._as_dtensor and instance._device_mesh is None:
            raise StateError(
                f"ShardedStateDictConfig(_use_dtensor=True) needs a device mesh, and '{instance._stage.name}' on rank "
                f"{instance.rank} has none. Construct FSDP with device_mesh."
            )

    def convert(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        mesh = self.instance._device_mesh if self._as_dtensor else None
        return own_rows(whole, self.instance, mesh, offload=self._offloads)

    def before_load(self, values: dict[str, Any], prefix: str) -> None:
        if self.unit is not None:
            self._assemble(values, prefix, self.unit)
        super().before_load(values, prefix)

    def _assemble(self, values: dict[str, Any], prefix: str, unit: FlatUnit) -> None:
        """Replace this unit's pieces by whole tensors, gathered all at once."""
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
        fitting: list[tuple[int, list[str], Any]] = []
        for index, keys, value in found:
            self._refuse_other(value, unit, keys[0])
            shape = shape_of(value)
            if shape == unit.layout.slots[index].shape:
                fitting.append((index, keys, value))
            else:
                # Torch's walk compares shapes first, and reports this one among all that do not fit.
                values.update(dict.fromkeys(keys, torch.empty(shape, device="meta")))
        wholes = self._gather(unit, [value for _, _, value in fitting])
        for (_, keys, _), whole in zip(fitting, wholes, strict=True):
            values.update(dict.fromkeys(keys, whole))

    def _gather(self, unit: FlatUnit, values: Sequence[Any]) -> list[torch.Tensor]:
        """Whole tensors, in the master's dtype, of which each rank has the rows that are its own."""
        shard = unit.grid.shard
        if shard is None or not values:
            return []
        return gather_rows(values, shard, unit.master.dtype, self.instance.compute_device)

    def _refuse_other(self, value: object, unit: FlatUnit, key: str) -> None:
        """Refuse what this form does not make, for as many ranks as there are."""
        where = f"'{clean_tensor_name(key)}' on rank {self.instance.rank}"
        ranks = unit.grid.shard_size
        if _torch_private.is_sharded_tensor(value):
            otherwise = cut_otherwise(value, ranks)
            if otherwise is not None:
                raise StateError(
                    f"{where} {otherwise}. Load it with the number of ranks that saved it, or through "
                    "torch.distributed.checkpoint."
                )
        elif not _is_cut_along_rows(value, ranks):
            expected = "DTensor cut along its rows" if self._as_dtensor else "ShardedTensor"
            raise StepAssertionError(
                f"Expected {expected}, got {type(value)} for {where}. Load it as the type of state dict that it was "
                "saved as."
            )


def _is_cut_along_rows(value: object, ranks: int) -> bool:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(value, DTensor):
        return False
    *outer, last = value.placements
    return last == Shard(0) and all(each.is_replicate() for each in outer) and value.device_mesh.size(-1) == ranks
