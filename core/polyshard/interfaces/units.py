"""Units as plugins see them, and the contract of wrap policies, which choose them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..errors import warn_once


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit as plugins see it: parameters that are gathered together, in one flat buffer."""

    name: str
    """Unique in the model: the fully-qualified name of the unit's module in the root (empty for the root), then
    ``suffix``. It changes where a sharded model becomes part of a larger one: key state of a unit's life by the unit's
    master, not by its name."""
    module_class: type[torch.nn.Module]
    """Class of the unit's module; for a module that was split off the root, the root's class."""
    parameter_names: tuple[str, ...]
    """Fully-qualified names of its parameters, in layout order."""
    numel: int
    """Elements of the whole unit, padding included."""
    shard_numel: int
    """Elements of one rank's shard."""
    master_dtype: torch.dtype
    """Dtype of the parameters as the user made them, which the optimizer updates."""
    device: torch.device
    """Device on which the unit computes."""
    is_root: bool
    """Whether the unit's module is the outermost one, or was split off it."""
    suffix: str = ""
    """End of ``name`` that tells the second and later units of one module apart: ``"[float64]"``, ``"[float32,
    frozen]"``. Empty for the first."""
    trained: bool = True
    """Whether its parameters had ``requires_grad`` when the model was sharded: all of them, or none."""
    keeps_dtype: bool = False
    """Whether its precision plugin said so of its parameters."""
    ranks: str = ""
    """The dimensions of the mesh over which it is cut, and over which it is replicated: ``"dp"``,
    ``"edp and dp_replicate"``. Empty where the configuration names none."""

    @property
    def module_name(self) -> str:
        """``name`` without ``suffix``, which several units may share: for settings by name."""
        return self.name.removesuffix(self.suffix)

    @property
    def label(self) -> str:
        """``name`` for messages, with ``(root)`` for the outermost module."""
        return f"{self.module_name or '(root)'}{self.suffix}"


#: For each chosen module, settings that differ from the model's: keys of ``UNIT_OVERRIDES``.
UnitPlan = Mapping[torch.nn.Module, Mapping[str, Any]]

#: The settings that a policy may override for one unit.
UNIT_OVERRIDES: tuple[str, ...] = (
    "precision",
    "offload",
    "placement",
    "reshard_after_forward",
    "mesh",
    "gradient_divisor",
)


def _warn(text: str) -> bool:
    return warn_once(text, rank=0)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Facts for a policy beside the model."""

    ignored_modules: Collection[torch.nn.Module] = field(default_factory=frozenset)
    """Modules that are not sharded, with all inside of them."""
    ignored_parameters: Collection[torch.nn.Parameter] = field(default_factory=frozenset)
    """Parameters that are not sharded; they do not count towards sizes."""
    shards: int = 1
    """Number of ranks that share each unit: each holds one shard of it between uses."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device on which the model computes."""
    warn: Callable[[str], bool] = _warn
    """Warns users on one of the ranks, of each text once a process; returns whether this is that rank."""


class WrapPolicy(ABC):
    """Chooses units.

    A plugin is a callable ``(context: PluginContext, **options) -> WrapPolicy``.
    """

    api_version: ClassVar[int]
    """The version of this contract that a plugin was written for. Each class states its own; none is inherited."""

    def reason(self, module: torch.nn.Module, name: str) -> str:
        """The rule by which ``plan`` chose ``module``, ``name`` in the root; for people, and empty where unknown.

        Called by ``polyshard explain``, after ``plan``, for modules that it chose.
        """
        return ""

    @abstractmethod
    def plan(self, root: torch.nn.Module, context: PolicyContext) -> UnitPlan:
        """The modules inside ``root`` that become units, each with its overrides (an empty mapping for none).

        ``root`` becomes a unit in any case; modules without parameters are skipped. Called at wrap. Must not change the
        model, and must answer alike on every rank.
        """


#: Each parameter starts at a multiple of this many bytes, so that kernels may use 16-byte accesses.
PARAMETER_ALIGNMENT_BYTES = 16
#: Large slices, of 64 KiB and more, start at a multiple of this many: NCCL falls off its fast path on misaligned ones.
SLICE_ALIGNMENT_BYTES = 256
