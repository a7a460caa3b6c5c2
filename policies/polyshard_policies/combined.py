"""``or``: units that any of several policies chooses, and the forms in which a policy may be given to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from polyshard.errors import ConfigError, PluginContractError, PluginNotFoundError
from polyshard.interfaces import Group, PluginContext, PolicyContext, UnitPlan, WrapPolicy, resolve_object
from torch import nn
from typing_extensions import override

from .functions import Lambda
from .module_class import ModuleClass

#: A policy, one or several module classes, a function of a module, ``"package.module:Name"`` of one of these, or a
#: plugin: ``"name"``, ``"distribution:name"``, or a table of ``name`` and options.
PolicyForm = WrapPolicy | type | str | Mapping[str, Any] | Iterable[type | str] | Callable[..., bool]


class NamedPolicy(NamedTuple):
    label: str
    policy: WrapPolicy


class Or(WrapPolicy):
    """``or``: a module becomes a unit when at least one of several policies chooses it.

    Each policy plans by itself: one that counts parameters does not see the modules that the others chose.
    """

    api_version = 1

    def __init__(self, context: PluginContext, policies: Sequence[PolicyForm]) -> None:
        """``policies``: a list of forms that ``as_policy`` takes: names of plugins, tables of a name and options,
        another ``or`` among them; ``"package.module:Name"`` of classes, functions or policy objects; or these
        themselves.

        Raises ``ConfigError`` for an empty list or an entry that is no policy, and the errors of a plugin's name or
        options.
        """
        if isinstance(policies, str | Mapping) or not isinstance(policies, Sequence) or not policies:
            raise ConfigError(
                f"policies of policy {context.name!r} is {policies!r}. Give a list of at least one policy's "
                "name, table, object, function, module class or 'package.module:Name'."
            )
        self._policies = tuple(as_policy(form, context) for form in policies)
        # The policies that chose each module. Weak: a policy may be kept and serve several models.
        self._choosers: WeakKeyDictionary[nn.Module, list[NamedPolicy]] = WeakKeyDictionary()

    @override
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``ConfigError`` where two policies set the same setting of one module to different values, and
        ``PluginContractError`` where one of them does not answer with a mapping.
        """
        merged: dict[nn.Module, dict[str, Any]] = {}
        choosers: dict[nn.Module, list[NamedPolicy]] = {}
        for named in self._policies:
            plan = named.policy.plan(root, context)
            if not isinstance(plan, Mapping):
                raise PluginContractError(
                    f"{type(named.policy).__name__}.plan, joined by 'or', returned a {type(plan).__name__}. "
                    "Return a mapping of modules to their settings."
                )
            for module, overrides in plan.items():
                choosers.setdefault(module, []).append(named)
                settings = merged.setdefault(module, {})
                for key, value in overrides.items():
                    if settings.setdefault(key, value) != value:
                        name = next((name for name, found in root.named_modules() if found is module), "")
                        raise ConfigError(
                            f"policies joined by 'or' disagree on {key} of module {(name or type(module).__name__)!r}: "
                            f"{settings[key]!r} and {value!r}. Let one policy set it."
                        )
        self._choosers.update(choosers)
        ordered = {module: merged[module] for module in root.modules() if module in merged}
        # A module of another model is a mistake of the policy, which the caller reports: it must not vanish here.
        return ordered | merged

    @override
    def reason(self, module: nn.Module, name: str) -> str:
        rules = ((label, policy.reason(module, name)) for label, policy in self._choosers[module])
        return "; ".join(f"{label}: {rule}" if rule else label for label, rule in rules)


def as_policy(form: PolicyForm, context: PluginContext) -> NamedPolicy:
    """The policy that ``form`` stands for.

    * a ``WrapPolicy``: itself
    * a class, or several of them: units are their instances, as with ``module_class``
    * a function of one module, or of ``(module, recurse, nonwrapped_numel)``: as with ``lambda``; a
      ``functools.partial`` that leaves these arguments open is such a function
    * ``"name"``, or a table with a name: the plugin, which ``context`` constructs
    * ``"package.module:Name"``: the form that is found there, else the plugin ``"distribution:name"``

    Raises ``ConfigError`` for anything else, and the errors of a plugin's name or options.
    """
    if isinstance(form, Mapping):
        policy = context.construct(Group.POLICIES, form)
        return NamedPolicy(str(form["name"]), policy)
    if not isinstance(form, str):
        return _from_object(form, context)
    if ":" not in form:
        try:
            return NamedPolicy(form, context.construct(Group.POLICIES, form))
        except PluginNotFoundError as error:
            raise PluginNotFoundError(f"{error} A class or a function is written as 'package.module:Name'.") from error
    try:
        found = resolve_object(form, f"policy {context.name!r}")
    except ConfigError as error:
        # As in a configuration, a plugin may be named with its distribution. A bare context knows no plugins.
        if context.constructor is None:
            raise
        try:
            return NamedPolicy(form, context.construct(Group.POLICIES, form))
        except PluginNotFoundError:
            raise ConfigError(f"{error} Nor does an installed plugin have this name.") from error
    return _from_object(found, context)


def _from_object(found: Any, context: PluginContext) -> NamedPolicy:
    if isinstance(found, WrapPolicy):
        return NamedPolicy(type(found).__name__, found)
    if isinstance(found, type):
        if issubclass(found, WrapPolicy):
            raise ConfigError(
                f"policy {context.name!r} was given the policy class {found.__name__}. Give an instance of it."
            )
        return NamedPolicy("module_class", ModuleClass(context, found))
    if callable(found):
        return NamedPolicy("lambda", Lambda(context, found))
    if isinstance(found, Iterable) and not isinstance(found, str):
        return NamedPolicy("module_class", ModuleClass(context, found))
    raise ConfigError(
        f"a {type(found).__name__} is not a policy, in policy {context.name!r}. Give a plugin's name, a table with a "
        "name, a WrapPolicy, module classes, a function of a module, or 'package.module:Name'."
    )
