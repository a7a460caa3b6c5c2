"""What a plugin is told when it is constructed, and about each unit that it serves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class RankAndSize(Protocol):
    """The least that stands for a process group: something that knows its rank and its size."""

    def rank(self) -> int:
        """This process's rank."""

    def size(self) -> int:
        """Number of ranks."""


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


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit as plugins see it: parameters that are gathered together, in one flat buffer."""

    name: str
    """Unique in the model: the fully-qualified name of the unit's module in the root, empty for the root itself. Behind
    that ``suffix``, which the second and later units of one module have."""
    module_class: type[torch.nn.Module]
    """Class of the unit's module; where a module was split off the outermost one, the outermost one's class."""
    parameter_names: tuple[str, ...]
    """Fully-qualified names of its parameters, in layout order."""
    numel: int
    """Elements of the whole unit, padding included."""
    shard_numel: int
    """Elements of one rank's shard."""
    master_dtype: torch.dtype
    """Dtype of the parameters as the user made them, which the optimizer updates."""
    device: torch.device
    """Where the unit computes."""
    is_root: bool
    """Whether the unit's module is the outermost one, or was split off it."""
    suffix: str = ""
    """What ``name`` ends in where other parameters of the same module form a unit before this one: what tells this one
    from them, ``"[float64]"`` or ``"[float32, frozen]"``. Otherwise empty."""

    @property
    def module_name(self) -> str:
        """Fully-qualified name of the unit's module in the root; empty for the root itself. Several units may share it:
        for settings by name, where ``name`` is for state."""
        return self.name.removesuffix(self.suffix)

    @property
    def label(self) -> str:
        """``name`` for people to read, with ``(root)`` for the outermost module."""
        return f"{self.module_name or '(root)'}{self.suffix}"
