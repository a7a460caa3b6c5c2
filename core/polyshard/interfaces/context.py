"""What a plugin is told when it is constructed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload, runtime_checkable

import torch

from ..errors import StateError
from .versions import Group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .collectives import Collectives
    from .layout import Layout
    from .offload import OffloadManager
    from .policy import WrapPolicy
    from .precision import PrecisionCaster


@runtime_checkable
class RankAndSize(Protocol):
    """The least that stands for a process group: something that knows its rank and its size."""

    def rank(self) -> int:
        """This process's rank."""

    def size(self) -> int:
        """Number of ranks."""


class Constructor(Protocol):
    """Makes a plugin of ``group`` from ``choice``: what stands behind ``PluginContext.construct``."""

    def __call__(self, context: PluginContext, group: Group, choice: Any) -> Any:
        """The instance, constructed with ``context`` under the name that ``choice`` gives."""


@dataclass(frozen=True, slots=True)
class PluginContext:
    """Given to every plugin factory as its first argument."""

    name: str
    """The name under which the configuration asked for the plugin."""
    device: torch.device
    """Where the model computes."""
    process_group: Any | None = None
    """A ``torch.distributed.ProcessGroup``, or an object with ``rank()`` and ``size()``, where the user gave one."""
    mesh: DeviceMesh | None = None
    """The device mesh that the user gave."""
    timeout: timedelta = timedelta(minutes=10)
    """How long a collective may wait for another rank."""
    rank: int | None = None
    """This process's rank among those that share the model: for listeners alone, which may do different things on each.
    None for every other plugin."""
    world_size: int | None = None
    """How many ranks share the model: for listeners alone, too."""
    constructor: Constructor | None = None
    """What ``construct`` calls; polyshard sets it while the factory runs."""

    @overload
    def construct(self, group: Literal[Group.COLLECTIVES], choice: Any) -> Collectives: ...
    @overload
    def construct(self, group: Literal[Group.PRECISION], choice: Any) -> PrecisionCaster: ...
    @overload
    def construct(self, group: Literal[Group.OFFLOAD], choice: Any) -> OffloadManager: ...
    @overload
    def construct(self, group: Literal[Group.POLICIES], choice: Any) -> WrapPolicy: ...
    @overload
    def construct(self, group: Literal[Group.LAYOUTS], choice: Any) -> Layout: ...
    @overload
    def construct(self, group: Group, choice: Any) -> object: ...
    def construct(self, group: Group, choice: Any) -> object:
        """Another plugin, of any group: by name, by a table of a name and options, or an object.

        For factories of plugins that are made of others. What they construct is compared between ranks with them, and
        shown by ``polyshard explain``. It gets this context, so one that ``dataclasses.replace`` changed where another
        device or group of ranks is meant.

        Raises what choosing the plugin in a configuration would, and ``StateError`` outside of a factory, or in a
        context that polyshard did not make (``polyshard.testing.plugin_context`` makes one for tests).
        """
        if self.constructor is None:
            raise StateError(
                f"the context of {self.name!r} cannot construct {choice!r} of {group.value}: polyshard did not make "
                "it. In a test, take polyshard.testing.plugin_context()."
            )
        return self.constructor(self, group, choice)
