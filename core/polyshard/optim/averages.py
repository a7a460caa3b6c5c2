"""Averages of a sharded model's weights over its training: each rank keeps those of its own elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from ..errors import ConfigError, StateError
from ..inspect import ShardedModel, is_dtensor, local_of, outermost_model

#: Which part of the average stays at an update, from the number of updates before it.
Decay = Callable[[int], float]


class AveragedWeights:
    """A moving average of what ``model`` trains, to be evaluated and saved in its place.

    What ``torch.optim.swa_utils.AveragedModel`` is for a model that is not sharded: the first update takes the weights
    as they are, each further one leaves ``decay`` of the average and adds ``1 - decay`` of the weights. With a number
    it is an exponential moving average; ``lambda updates: updates / (updates + 1)`` weighs all updates alike.

    It takes the memory of one more shard, nothing is sent, and an update is one launch where all is of one dtype.
    Weights of fewer than 32 bits are averaged in fp32. Parameters that are frozen, and buffers, are the model's own.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or is inside of a step or ``unsharded``.
        ConfigError: ``decay`` is not within [0, 1].
        UnsupportedError: ``FullyShardedDataParallel`` of ``polyshard_fsdp`` wrapped the model.
    """

    #: Updates so far. To be set behind loading an average from a checkpoint.
    updates: int

    def __init__(self, model: nn.Module, decay: float | Decay) -> None:
        sharded = _between_steps(model, "AveragedWeights()")
        sharded.refuse_cut_rows("AveragedWeights()")
        if not callable(decay):
            _require_part(decay, sharded)
        self.updates = 0
        self._model = model
        self._decay = decay
        managed = {parameter for unit in sharded.units for parameter in unit.tensors}
        self._units = [unit for unit in sharded.units if unit.trained]
        self._outside = [each for each in model.parameters() if each.requires_grad and each not in managed]
        with torch.no_grad():
            self._averages = [_wide(each).clone() for each in self._weights()]

    def update(self) -> None:
        """Average the weights as they are now: behind each step of the optimizer, on every rank.

        Raises:
            StateError: inside of a step, ``unsharded`` or ``applied``, or a frozen unit is trained now.
            ConfigError: ``decay`` answered something outside of [0, 1].
        """
        sharded = _between_steps(self._model, "AveragedWeights.update()")
        known = set(self._units)
        thawed = next((unit for unit in sharded.units if unit.trained and unit not in known), None)
        if thawed is not None:
            raise StateError(
                f"Unit '{thawed.name}' is trained, and was frozen when AveragedWeights was made (rank "
                f"{sharded.rank}): there is no average of it. Make it again once the unit is trained."
            )
        decay = 0.0
        if self.updates:
            decay = self._decay(self.updates) if callable(self._decay) else self._decay
            _require_part(decay, sharded)
        together: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        with torch.no_grad():
            for average, weights in zip(self._averages, self._weights(), strict=True):
                if not self.updates:
                    average.copy_(weights)
                elif average.dtype != weights.dtype:
                    # By itself: the wide copy of one unit is there at a time.
                    average.lerp_(_wide(weights), 1.0 - decay)
                else:
                    averages, same = together.setdefault((average.device, average.dtype), ([], []))
                    averages.append(average)
                    same.append(weights)
            for averages, same in together.values():
                _torch_private.foreach_lerp_(averages, same, 1.0 - decay)
        self.updates += 1

    @contextmanager
    def applied(self, *, writeback: bool = False) -> Iterator[None]:
        """Inside, the model's weights are the average: forwards, ``unsharded``, ``checkpoint.save`` take it for them.

        Takes the memory of another shard. Writes to the weights inside are dropped on leaving, unless ``writeback``:
        then they are the average from now on, as after ``checkpoint.load`` inside. Every rank enters and leaves.

        Raises StateError: inside of a step, ``unsharded`` or itself. Inside, a backward that adds to gradients and an
        optimizer's step raise it.
        """
        sharded = _between_steps(self._model, "AveragedWeights.applied()")
        with torch.no_grad():
            trained = [weights.clone() for weights in self._weights()]
        with sharded.replacing_values("AveragedWeights.applied()", "averages"):
            try:
                sharded.copy_into_masters(self._averages, self._weights())
                yield
                if writeback:
                    sharded.adopt_changes()
                    with torch.no_grad():
                        for average, weights in zip(self._averages, self._weights(), strict=True):
                            average.copy_(weights)
            finally:
                try:
                    # A tensor that replaced a parameter inside is restored like other changes.
                    sharded.adopt_changes()
                finally:
                    sharded.copy_into_masters(trained, self._weights())

    def state_dict(self) -> dict[str, Any]:
        """This rank's averages and the number of updates, for the same rank of the same model: shards, without names.

        Checkpoints for any ranks are saved inside of ``applied``.
        """
        return {"updates": self.updates, "averages": list(self._averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what ``state_dict`` gave on this rank, or the same one of another job.

        Raises ConfigError: it is of another model, or of other ranks. Nothing was changed.
        """
        given = state_dict["averages"]
        if [each.shape for each in given] != [each.shape for each in self._averages]:
            raise ConfigError(
                "AveragedWeights.load_state_dict() was given averages of other shapes: of another model, or of a rank "
                "that holds other parts of it. Save inside of applied() for other ranks."
            )
        self.updates = state_dict["updates"]
        for average, value in zip(self._averages, given, strict=True):
            average.copy_(value)

    def _weights(self) -> list[torch.Tensor]:
        outside = [local_of(each) if is_dtensor(each) else each for each in self._outside]
        return [unit.master for unit in self._units] + [each.detach() for each in outside]


def _wide(weights: torch.Tensor) -> torch.Tensor:
    """In a dtype that holds a thousandth more of a weight: bf16 would stand still."""
    narrow = weights.is_floating_point() and weights.dtype.itemsize < torch.float32.itemsize
    return weights.float() if narrow else weights


def _require_part(decay: object, sharded: ShardedModel) -> None:
    if not isinstance(decay, (int, float)) or not (math.isfinite(decay) and 0.0 <= decay <= 1.0):
        raise ConfigError(
            f"decay of AveragedWeights is {decay!r} (rank {sharded.rank}): it is the part of the average that an "
            "update leaves. Give a number from 0 to 1, such as 0.999, or a function of the number of updates that does."
        )


def _between_steps(model: nn.Module, call: str) -> ShardedModel:
    sharded = outermost_model(model, call)
    sharded.refuse_inside_step(call)
    sharded.refuse_replaced_values(call)
    sharded.adopt_changes()
    return sharded
