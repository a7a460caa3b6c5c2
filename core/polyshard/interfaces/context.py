"""The entry-point groups and their contract versions, and the context in which plugins are constructed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload, runtime_checkable

import torch

from ..errors import StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .collectives import Collectives
    from .offload import OffloadManager
    from .precision import PrecisionPlugin
    from .units import WrapPolicy


class Group(enum.StrEnum):
    """Entry-point groups, one for each contract."""

    COLLECTIVES = "polyshard.collectives"
    """Factories of ``Collectives``."""
    PRECISION = "polyshard.precision"
    """Factories of ``PrecisionPlugin``."""
    OFFLOAD = "polyshard.offload"
    """Factories of ``OffloadManager``."""
    POLICIES = "polyshard.policies"
    """Factories of ``WrapPolicy``."""
    PLUGINS = "polyshard.plugins"
    """Factories of listeners."""


#: The oldest ``api_version`` that is still served, per group.
OLDEST_API: dict[Group, int] = dict.fromkeys(Group, 1)
#: The newest ``api_version`` that is served, per group.
CURRENT_API: dict[Group, int] = dict.fromkeys(Group, 1)


@runtime_checkable
class RankAndSize(Protocol):
    """Stands for a process group: an object with a rank and a size."""

    def rank(self) -> int:
        """This process's rank."""

    def size(self) -> int:
        """Number of ranks."""


class Constructor(Protocol):
    """Constructs the plugin of ``group`` that ``choice`` names; behind ``PluginContext.construct``."""

    def __call__(self, context: PluginContext, group: Group, choice: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class PluginContext:
    """Given to every plugin factory as its first argument."""

    name: str
    """The name under which the configuration asked for the plugin."""
    device: torch.device
    """Device on which the model computes."""
    process_group: Any | None = None
    """A ``torch.distributed.ProcessGroup``, or an object with ``rank()`` and ``size()``, where the user gave one."""
    mesh: DeviceMesh | None = None
    """The device mesh that the user gave."""
    timeout: timedelta = timedelta(minutes=10)
    """Limit of a collective's wait for another rank."""
    rank: int | None = None
    """This process's rank among those that share the model: for listeners, which may differ between ranks. None for
    every other plugin."""
    world_size: int | None = None
    """Number of ranks that share the model; for listeners alone, too."""
    constructor: Constructor | None = None
    """Called by ``construct``; polyshard sets it while the factory runs."""

    @overload
    def construct(self, group: Literal[Group.COLLECTIVES], choice: Any) -> Collectives: ...
    @overload
    def construct(self, group: Literal[Group.PRECISION], choice: Any) -> PrecisionPlugin: ...
    @overload
    def construct(self, group: Literal[Group.OFFLOAD], choice: Any) -> OffloadManager: ...
    @overload
    def construct(self, group: Literal[Group.POLICIES], choice: Any) -> WrapPolicy: ...
    @overload
    def construct(self, group: Group, choice: Any) -> object: ...
    def construct(self, group: Group, choice: Any) -> object:
        """Another plugin, of any group: by name, by a table of a name and options, or an object.

        For factories of plugins that are made of others. Ranks compare the constructed plugin with its owner, and
        ``polyshard explain`` shows it. It gets this context: change that by ``dataclasses.replace`` for another device
        or group of ranks.

        Raises what choosing the plugin in a configuration raises, and ``StateError`` outside of a factory, or in a
        context that polyshard did not make (``polyshard_testing.plugin_context`` makes one for tests).
        """
        if self.constructor is None:
            raise StateError(
                f"the context of {self.name!r} cannot construct {choice!r} of {group.value}: polyshard did not make "
                "it. In a test, take polyshard_testing.plugin_context()."
            )
        return self.constructor(self, group, choice)
