"""Averages of a sharded model's weights over its training: each rank keeps those of its own elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .. import _torch_private
from ..api import outermost_root
from ..errors import ConfigError, StateError
from ..functions.torch_functions import borrowing
from ..runtime.root import Root
from ..runtime.step import Phase
from ..runtime.unit import Unit

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
    """

    #: Updates so far. To be set behind loading an average from a checkpoint.
    updates: int

    def __init__(self, model: nn.Module, decay: float | Decay) -> None:
        root = _resting(model, "AveragedWeights()")
        if not callable(decay):
            _require_part(decay, root)
        self.updates = 0
        self._model = model
        self._decay = decay
        managed = {original for unit in root.units for original in unit.originals.tensors}
        root.take_up_changes()
        self._units = [unit for unit in root.units if unit.trainable]
        self._outside = [each for each in model.parameters() if each.requires_grad and each not in managed]
        with torch.no_grad():
            self._averages = [_wide(each).clone() for each in self._weights()]

    def update(self) -> None:
        """Take up the weights as they are now: behind each step of the optimizer, on every rank.

        Raises:
            StateError: inside of a step, ``unsharded`` or ``applied``, or what was frozen is trained.
            ConfigError: ``decay`` answered something outside of [0, 1].
        """
        root = _resting(self._model, "AveragedWeights.update()")
        root.take_up_changes()
        self._refuse_thawed(root)
        decay = 0.0
        if self.updates:
            decay = self._decay(self.updates) if callable(self._decay) else self._decay
            _require_part(decay, root)
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

        Takes the memory of another shard. What is written to the weights inside is dropped on leaving, unless
        ``writeback``: then it is the average from now on, as after ``checkpoint.load`` inside. Every rank enters and
        leaves.

        Raises:
            StateError: inside of a step, ``unsharded`` or itself. Inside, a backward that adds to gradients and an
                optimizer's step raise it.
        """
        root = _resting(self._model, "AveragedWeights.applied()")
        root.take_up_changes()
        with torch.no_grad():
            trained = [weights.clone() for weights in self._weights()]
        with borrowing(root):
            try:
                self._change(root, self._averages)
                yield
                if writeback:
                    root.take_up_changes()
                    _write(self._weights(), self._averages)
            finally:
                try:
                    # What came in the place of a parameter goes the way of other changes.
                    root.take_up_changes()
                finally:
                    self._change(root, trained)

    def _change(self, root: Root, values: list[torch.Tensor]) -> None:
        # A gather that no forward waited for may still read, and the host writes what is parked beside the device.
        root.streams.drain()
        if root.streams.here() is not None and any(unit.parks for unit in root.units):
            torch.cuda.synchronize(root.collectives.device)
        _write(values, self._weights())

    def _weights(self) -> list[torch.Tensor]:
        return [unit.master for unit in self._units] + [each.detach() for each in self._outside]

    def _refuse_thawed(self, root: Root) -> None:
        held = set[Unit](self._units)
        for unit in root.units:
            if unit.trainable and unit not in held:
                raise StateError(
                    f"Unit '{unit.name}' is trained, and was frozen when AveragedWeights was made (rank {root.rank}): "
                    "there is no average of it. Make it again once the unit is trained."
                )


def _write(values: list[torch.Tensor], places: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for value, place in zip(values, places, strict=True):
            place.copy_(value)


def _wide(weights: torch.Tensor) -> torch.Tensor:
    """In a dtype that holds a thousandth more of a weight: bf16 would stand still."""
    narrow = weights.is_floating_point() and weights.dtype.itemsize < torch.float32.itemsize
    return weights.float() if narrow else weights


def _require_part(decay: object, root: Root) -> None:
    if not isinstance(decay, (int, float)) or not (math.isfinite(decay) and 0.0 <= decay <= 1.0):
        raise ConfigError(
            f"decay of AveragedWeights is {decay!r} (rank {root.rank}): it is the part of the average that an update "
            "leaves. Give a number from 0 to 1, such as 0.999, or a function of the number of updates that does."
        )


def _resting(model: nn.Module, call: str) -> Root:
    root = outermost_root(model, call)
    root.leave_failed_backward()
    if root.phase is not Phase.IDLE or root.unsharded or root.borrowed:
        where = f"a {root.phase.value} of the model"
        if root.unsharded or root.borrowed:
            where = "polyshard.unsharded()" if root.unsharded else "AveragedWeights.applied()"
        raise StateError(f"{call} came inside of {where} (rank {root.rank}). Call it between steps.")
    return root
