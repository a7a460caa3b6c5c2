"""The contract for where a unit's master shard and gradient live between uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .unit import UnitSpec


@dataclass(frozen=True, slots=True)
class OffloadCapabilities:
    """What a manager does to the step."""

    parks: bool
    """Masters and gradients leave the compute device, those of all units or of some: ``units_to_park`` says which.
    False lets the engine skip every call."""


class OffloadManager(ABC):
    """Parks shards.

    A plugin is a callable ``(context: PluginContext, **options) -> OffloadManager``.

    ``fetch`` and ``store_grad`` run on the current stream, which the engine has set to the unit's gather or reduction
    stream; the engine records the events. ``sync_for_step`` is the one place where the host may wait.
    """

    api_version: ClassVar[int]
    """Which version of this contract a plugin was written for. Each says its own: there is none to inherit."""

    @property
    @abstractmethod
    def capabilities(self) -> OffloadCapabilities:
        """What this manager does to the step."""

    def units_to_park(self, units: Sequence[UnitSpec]) -> Collection[UnitSpec]:
        """Which of ``units`` are parked: all of them, unless a manager says otherwise.

        Asked where the capabilities say that it parks, before the model changes, of all units at once that this manager
        serves in one call of ``shard`` or ``fully_shard``, in the order in which their modules stand in the model. The
        others stay on the compute device; in a step they cost what they would without a manager, and no method below is
        called for them. The answer follows from ``units`` and the options alone: it is the same on every rank, which
        ranks compare, and for every attempt. Raises ``ConfigError`` where options fit none of them.
        """
        return units

    @abstractmethod
    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        """Where the master shard lives from now on; called at wrap, before the model changes.

        ``shard``: ``[shard_numel]``, master dtype, on the compute device. Returns a contiguous tensor of the same shape
        and dtype with the same values; the optimizer updates it in place. Where sharding fails on any rank, it is let
        go of, and the next attempt calls this again.
        """

    @abstractmethod
    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        """Write ``master`` into ``own_slice`` (``[shard_numel]``, compute dtype, compute device)."""

    @abstractmethod
    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """Park the reduced gradient (``[shard_numel]``) beside the master; add it to ``into`` where that is given.

        Returns the contiguous tensor, of the gradient's shape and dtype, that ``.grad`` will view. Its values need to
        be there only after ``sync_for_step``.
        """

    def begin_forward(self) -> None:
        """Masters may have changed: an outermost forward starts, or a gather between steps, and what was
        fetched before counts as old.

        Called before the first ``fetch`` of each. Until the next call the master of a unit may be taken to be as it
        was when it was fetched, in the backward as well. There is no other sign of a change: an optimizer updates
        tensors that view the master, whose ``_version`` does not move.
        """
        return None

    def sync_for_step(self) -> None:
        """Return when every stored gradient can be read by the host; called once, at the end of a backward."""
        return None
