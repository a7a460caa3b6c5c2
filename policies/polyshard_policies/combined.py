"""``or``: units that any of several policies chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyshard.errors import ConfigError, PluginContractError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from torch import nn

from .objects import PolicyForm, as_policy


class Or(WrapPolicy):
    """``or``: a module becomes a unit when at least one of several policies chooses it.

    Each policy plans by itself: one that counts parameters does not see what the others chose.
    """

    api_version = 1

    def __init__(self, context: PluginContext, policies: Sequence[PolicyForm]) -> None:
        """``policies``: a list of what ``as_policy`` takes. Names of plugins are not among it, since a plugin does not
        reach the catalogue: a file lists ``"package.module:Name"`` of classes, functions or policy objects.

        Raises ``ConfigError`` for an empty list or an entry that is no policy.
        """
        if isinstance(policies, str) or not isinstance(policies, Sequence) or not policies:
            raise ConfigError(
                f"policies of policy {context.name!r} is {policies!r}. Give a list of at least one policy object, "
                "function, module class or 'package.module:Name'."
            )
        self._policies = tuple(as_policy(form, context) for form in policies)

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``ConfigError`` where two policies set the same setting of one module to different values, and
        ``PluginContractError`` where one of them does not answer with a mapping.
        """
        merged: dict[nn.Module, dict[str, Any]] = {}
        for policy in self._policies:
            plan = policy.plan(root, context)
            if not isinstance(plan, Mapping):
                raise PluginContractError(
                    f"{type(policy).__name__}.plan, joined by 'or', returned a {type(plan).__name__}. "
                    "Return a mapping of modules to their settings."
                )
            for module, overrides in plan.items():
                settings = merged.setdefault(module, {})
                for key, value in overrides.items():
                    if settings.setdefault(key, value) != value:
                        raise ConfigError(
                            f"policies joined by 'or' disagree on {key} of module {_name(root, module)!r}: "
                            f"{settings[key]!r} and {value!r}. Let one policy set it."
                        )
        ordered = {module: merged[module] for module in root.modules() if module in merged}
        # A module from elsewhere is a mistake of the policy's, which the caller reports: it must not vanish here.
        return ordered | merged


def _name(root: nn.Module, module: nn.Module) -> str:
    return next((name for name, found in root.named_modules() if found is module), type(module).__name__)
