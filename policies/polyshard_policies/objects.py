"""The forms in which a policy may be given inside of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from polyshard.errors import ConfigError, PluginNotFoundError
from polyshard.interfaces import Group, PluginContext, WrapPolicy, resolve_object

from .functions import Lambda
from .module_class import ModuleClass

#: A policy, one or several module classes, a function of a module, ``"package.module:Name"`` of one of these, or what
#: names a plugin: ``"name"``, ``"distribution:name"``, or a table of ``name`` and options.
PolicyForm = WrapPolicy | type | str | Mapping[str, Any] | Iterable[type | str] | Callable[..., bool]


class NamedPolicy(NamedTuple):
    """A policy, and what people call it."""

    label: str
    policy: WrapPolicy


def as_policy(form: PolicyForm, context: PluginContext) -> NamedPolicy:
    """The policy that ``form`` stands for.

    * a ``WrapPolicy``: itself
    * a class, or several of them: units are their instances, as with ``module_class``
    * a function of one module, or of ``(module, recurse, nonwrapped_numel)``: as with ``lambda``; a
      ``functools.partial`` that leaves these arguments open is such a function
    * ``"name"``, or a table with a name: the plugin, which ``context`` constructs
    * ``"package.module:Name"``: the form that is found there; where there is none, ``"distribution:name"`` of a plugin

    Raises ``ConfigError`` for anything else, and what choosing the plugin in a configuration would.
    """
    if isinstance(form, str):
        return _named(form, context)
    if isinstance(form, Mapping):
        policy = context.construct(Group.POLICIES, form)
        return NamedPolicy(str(form["name"]), policy)
    return _object(form, context)


def _named(text: str, context: PluginContext) -> NamedPolicy:
    if ":" not in text:
        try:
            return NamedPolicy(text, context.construct(Group.POLICIES, text))
        except PluginNotFoundError as error:
            raise PluginNotFoundError(f"{error} A class or a function is written as 'package.module:Name'.") from error
    try:
        found = resolve_object(text, f"policy {context.name!r}")
    except ConfigError as error:
        # As in a configuration, a plugin may be named with its distribution. A bare context knows no plugins.
        if context.constructor is None:
            raise
        try:
            return NamedPolicy(text, context.construct(Group.POLICIES, text))
        except PluginNotFoundError:
            raise ConfigError(f"{error} Nor does an installed plugin have this name.") from error
    return _object(found, context)


def _object(found: Any, context: PluginContext) -> NamedPolicy:
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
