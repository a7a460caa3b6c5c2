"""Pieces of parameters in state dicts: each rank's rows of every parameter, whole in its other dimensions."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from polyshard.engine.planning.layout import contiguous_stride, product
from polyshard.errors import StateError, StepAssertionError
from torch.distributed.device_mesh import DeviceMesh

from . import _torch_private
from ._common_utils import clean_tensor_name
from ._state import FSDPInstance
from ._state_dict_full import FullForm
from ._unit import FlatUnit
from .api import ShardedStateDictConfig, StateDictConfig

_LOGGER = logging.getLogger(__name__)


def rows_of(total: int, ranks: int) -> list[tuple[int, int]]:
    """``(first, count)`` of each rank's rows out of ``total``: rounded up for the first ranks, none for the last."""
    most = -(-total // ranks)
    starts = [min(rank * most, total) for rank in range(ranks)]
    return [(start, min(most, total - start)) for start in starts]


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
        assert self.unit is not None
        grid = self.unit.grid
        rows = rows_of(whole.shape[0], grid.shard_size)
        first, count = rows[grid.shard_rank]
        own = whole.narrow(0, first, count)
        if self._as_dtensor:
            # Made of a tensor in host memory, it would move that to the mesh's device.
            own = own.to(self.instance.compute_device, copy=True).contiguous()
            made = _as_dtensor(own, self.instance._device_mesh, whole)
            return made.cpu() if self._offloads else made
        own = own.to("cpu" if self._offloads else self.instance.compute_device, copy=True).contiguous()
        rest = tuple(whole.shape[1:])
        # An empty parameter has one piece all the same: a sharded tensor cannot have none.
        pieces = [((start, *(0 for _ in rest)), (size, *rest)) for start, size in rows if size] or [
            (tuple(0 for _ in whole.shape), tuple(whole.shape))
        ]
        return _torch_private.make_sharded_tensor(own, tuple(whole.shape), pieces, self.instance.process_group)

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
            shape = _shape_of(value)
            if shape == unit.layout.slots[index].shape:
                fitting.append((index, keys, value))
            else:
                # Torch's walk compares shapes first, and reports this one among all that do not fit.
                values.update(dict.fromkeys(keys, torch.empty(shape, device="meta")))
        wholes = self._gather(unit, [(index, value) for index, _, value in fitting])
        for (_, keys, _), whole in zip(fitting, wholes, strict=True):
            values.update(dict.fromkeys(keys, whole))

    def _gather(self, unit: FlatUnit, pieces: Sequence[tuple[int, Any]]) -> list[torch.Tensor]:
        """Whole tensors, in the master's dtype, of which each rank has the rows that are its own."""
        shard = unit.grid.shard
        if shard is None or not pieces:
            return []
        shapes = [unit.layout.slots[index].shape for index, _ in pieces]
        # All ranks send as many elements as the first, so that parameters start at the same place in every rank's part.
        numels = [rows_of(shape[0], shard.world_size)[0][1] * product(shape[1:]) for shape in shapes]
        starts = list(itertools.accumulate(numels, initial=0))
        sent = starts[-1]
        with torch.inference_mode(False):
            gathered = torch.empty(
                sent * shard.world_size, dtype=unit.master.dtype, device=self.instance.compute_device
            )
        own = gathered.narrow(0, shard.rank * sent, sent)
        for start, (_, value) in zip(starts, pieces, strict=False):
            rows = _rows_in(value)
            if rows is not None:
                own.narrow(0, start, rows.numel()).copy_(rows.reshape(-1))
        shard.all_gather(gathered, own).wait()
        parts = gathered.view(shard.world_size, sent)
        return [
            parts.narrow(1, start, numel).reshape(-1).narrow(0, 0, product(shape)).view(shape)
            for start, numel, shape in zip(starts, numels, shapes, strict=False)
        ]

    def _refuse_other(self, value: object, unit: FlatUnit, key: str) -> None:
        """Refuse what this form does not make, for as many ranks as there are."""
        where = f"'{clean_tensor_name(key)}' on rank {self.instance.rank}"
        if _torch_private.is_sharded_tensor(value):
            pieces = [size[0] for size in _torch_private.piece_sizes(value)]
        elif _is_cut_along_rows(value, unit.grid.shard_size):
            return
        else:
            expected = "DTensor cut along its rows" if self._as_dtensor else "ShardedTensor"
            raise StepAssertionError(
                f"Expected {expected}, got {type(value)} for {where}. Load it as the type of state dict that it was "
                "saved as."
            )
        wanted = [count for _, count in rows_of(_torch_private.shape_of(value)[0], unit.grid.shard_size)]
        if [rows for rows in pieces if rows] != [rows for rows in wanted if rows]:
            raise StateError(
                f"{where} is cut into {pieces} rows, and {unit.grid.shard_size} ranks need {wanted}. Load it with the "
                "number of ranks that saved it, or through torch.distributed.checkpoint."
            )


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(_torch_private.shape_of(value) if _torch_private.is_sharded_tensor(value) else value.shape)


def _rows_in(value: Any) -> torch.Tensor | None:
    if not _torch_private.is_sharded_tensor(value):
        local: torch.Tensor = value.to_local()
        return local
    shards = _torch_private.shards_of(value)
    return shards[0] if shards else None


def _as_dtensor(own: torch.Tensor, mesh: DeviceMesh, whole: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    stride = contiguous_stride(whole.shape)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def _is_cut_along_rows(value: object, ranks: int) -> bool:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(value, DTensor):
        return False
    *outer, last = value.placements
    return last == Shard(0) and all(each.is_replicate() for each in outer) and value.device_mesh.size(-1) == ranks
