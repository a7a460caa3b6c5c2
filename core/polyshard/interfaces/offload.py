"""The contract of offload managers: where a unit's master shard and gradient live between uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .units import UnitSpec


@dataclass(frozen=True, slots=True)
class OffloadCapabilities:
    """The features of a manager."""

    offloads: bool
    """Masters and gradients of ``units_to_offload`` leave the compute device. False: no method is called."""
    keeps_values: bool = False
    """``fetch`` gives what the master was at the first ``fetch`` since ``begin_forward``, whatever it is now."""
    awaits_gradients: bool = False
    """``await_grad`` waits. With ``keeps_values``, an optimizer may step in the backward: ``step_in_backward``."""


class OffloadManager(ABC):
    """Offloads shards.

    A plugin is a callable ``(context: PluginContext, **options) -> OffloadManager``.

    ``fetch`` and ``store_grad`` run on the current stream, which the engine has set to the unit's gather or reduction
    stream; the engine records the events. ``sync_for_step`` is the one place where the host may wait.
    """

    api_version: ClassVar[int]
    """The version of this contract that a plugin was written for. Each class states its own; none is inherited."""

    @property
    @abstractmethod
    def capabilities(self) -> OffloadCapabilities:
        """The features of this manager; constant over the instance's life."""

    def units_to_offload(self, units: Sequence[UnitSpec]) -> Collection[UnitSpec]:
        """The offloaded ones of ``units``: all, unless a manager chooses.

        Called where ``capabilities.offloads``, before the model changes, with all units that this manager serves in one
        call of ``shard`` or ``fully_shard``, in the model's order. The others stay on the compute device, and no method
        below is called for them. The answer follows from ``units`` and options alone: ranks compare it, and another
        attempt must get the same. Raises ``ConfigError`` for options that fit no unit.
        """
        return units

    @abstractmethod
    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        """The master shard in the memory where it lives from now on; called at wrap, before the model changes.

        ``shard``: ``[shard_numel]``, master dtype, on the compute device. Returns a contiguous tensor of equal shape,
        dtype and values, which the optimizer updates in place. After a failure on any rank it is dropped, and the next
        attempt calls this again.
        """

    @abstractmethod
    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        """Write ``master`` into ``own_slice`` (``[shard_numel]``, compute dtype, compute device)."""

    @abstractmethod
    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """Store the reduced gradient (``[shard_numel]``) beside the master; add it to ``into`` where that is given.

        Returns the contiguous tensor, of the gradient's shape and dtype, that ``.grad`` will view. Its values need to
        be there only after ``sync_for_step``.
        """

    def begin_forward(self) -> None:
        """Masters may have changed; called before the first ``fetch`` of a forward, or of a gather between steps.

        Until the next call, masters do not change, in the backward either, unless the manager ``keeps_values`` and an
        optimizer steps there. No other sign tells of a change: an optimizer updates tensors that view the master, whose
        ``_version`` does not move.
        """
        return None

    def await_grad(self, unit: UnitSpec, grad: torch.Tensor) -> None:
        """Return when the host can read ``grad``, which ``store_grad`` returned for ``unit`` with ``into`` None.

        Called where ``capabilities.awaits_gradients``, from a thread of its own, beside any other method, before
        ``sync_for_step`` of that backward or after it. The unit's master may change from there on.
        """
        return None

    def sync_for_step(self) -> None:
        """Return when every stored gradient can be read by the host; called once, at the end of a backward."""
        return None
