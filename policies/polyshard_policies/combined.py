"""``or``: units that any of several policies chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from polyshard.errors import ConfigError, PluginContractError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from torch import nn

from .objects import NamedPolicy, PolicyForm, as_policy


class Or(WrapPolicy):
    """``or``: a module becomes a unit when at least one of several policies chooses it.

    Each policy plans by itself: one that counts parameters does not see what the others chose.
    """

    api_version = 1

    def __init__(self, context: PluginContext, policies: Sequence[PolicyForm]) -> None:
        """``policies``: a list of what ``as_policy`` takes: names of plugins, tables of a name and options, another
        ``or`` among them; ``"package.module:Name"`` of classes, functions or policy objects; or these themselves.

        Raises ``ConfigError`` for an empty list or an entry that is no policy, and for a plugin's name or options what
        choosing it in a configuration would.
        """
        if isinstance(policies, str | Mapping) or not isinstance(policies, Sequence) or not policies:
            raise ConfigError(
                f"policies of policy {context.name!r} is {policies!r}. Give a list of at least one policy's "
                "name, table, object, function, module class or 'package.module:Name'."
            )
        self._policies = tuple(as_policy(form, context) for form in policies)
        # Which of them chose it. Weak: a policy may be kept and serve several models.
        self._choosers: WeakKeyDictionary[nn.Module, list[NamedPolicy]] = WeakKeyDictionary()

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``ConfigError`` where two policies set the same setting of one module to different values, and
        ``PluginContractError`` where one of them does not answer with a mapping.
        """
        merged: dict[nn.Module, dict[str, Any]] = {}
        choosers: dict[nn.Module, list[NamedPolicy]] = {}
        for named in self._policies:
            policy = named.policy
            plan = policy.plan(root, context)
            if not isinstance(plan, Mapping):
                raise PluginContractError(
                    f"{type(policy).__name__}.plan, joined by 'or', returned a {type(plan).__name__}. "
                    "Return a mapping of modules to their settings."
                )
            for module, overrides in plan.items():
                choosers.setdefault(module, []).append(named)
                settings = merged.setdefault(module, {})
                for key, value in overrides.items():
                    if settings.setdefault(key, value) != value:
                        raise ConfigError(
                            f"policies joined by 'or' disagree on {key} of module {_name(root, module)!r}: "
                            f"{settings[key]!r} and {value!r}. Let one policy set it."
                        )
        self._choosers.update(choosers)
        ordered = {module: merged[module] for module in root.modules() if module in merged}
        # A module from elsewhere is a mistake of the policy's, which the caller reports: it must not vanish here.
        return ordered | merged

    def reason(self, module: nn.Module, name: str) -> str:
        rules = ((label, policy.reason(module, name)) for label, policy in self._choosers[module])
        return "; ".join(f"{label}: {rule}" if rule else label for label, rule in rules)


def _name(root: nn.Module, module: nn.Module) -> str:
    return next((name for name, found in root.named_modules() if found is module), type(module).__name__)
