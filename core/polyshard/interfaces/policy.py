"""The contract for choosing which modules become units."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

#: For each chosen module, settings that differ from the model's: keys of ``UNIT_OVERRIDES``.
UnitPlan = Mapping[torch.nn.Module, Mapping[str, Any]]

#: The settings that a policy may override for one unit.
UNIT_OVERRIDES: tuple[str, ...] = ("precision", "offload", "layout", "reshard_after_forward")


def _warn(text: str) -> bool:
    warnings.warn(text, stacklevel=4)
    return True


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may need to know beside the model."""

    ignored_modules: Collection[torch.nn.Module] = field(default_factory=frozenset)
    """Modules that are not sharded, nor anything inside them."""
    ignored_parameters: Collection[torch.nn.Parameter] = field(default_factory=frozenset)
    """Parameters that are not sharded; they do not count towards sizes."""
    shards: int = 1
    """How many ranks share each unit: one of them holds this part of it between uses."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the model computes."""
    warn: Callable[[str], bool] = _warn
    """Says something of the model to users, as ``warnings.warn`` does, on one of the ranks, which all plan alike;
    returns whether this is the one."""


class WrapPolicy(ABC):
    """Chooses units.

    A plugin is a callable ``(context: PluginContext, **options) -> WrapPolicy``.
    """

    api_version: ClassVar[int]
    """Which version of this contract a plugin was written for. Each says its own: there is none to inherit."""

    def reason(self, module: torch.nn.Module, name: str) -> str:
        """Why ``plan`` chose ``module``, whose fully-qualified name in the root is ``name``: the rule, for people.

        Asked by ``polyshard explain``, after ``plan`` and of what it chose. Empty where there is nothing to say.
        """
        return ""

    @abstractmethod
    def plan(self, root: torch.nn.Module, context: PolicyContext) -> UnitPlan:
        """The modules inside ``root`` that become units, each with its overrides (an empty mapping for none).

        ``root`` becomes a unit in any case. Modules without parameters may be named; they are passed over. Must not
        change the model, and must answer alike on every rank.
        """
