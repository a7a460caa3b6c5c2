"""The Python forms in which a policy may be given beside a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, WrapPolicy

from .functions import Lambda
from .module_class import ModuleClass
from .references import resolve

#: A policy, one or several module classes, a function of a module, or ``"package.module:Name"`` of one of these.
PolicyForm = WrapPolicy | type | str | Iterable[type | str] | Callable[..., bool]


def as_policy(form: PolicyForm, context: PluginContext) -> WrapPolicy:
    """The policy that ``form`` stands for.

    * a ``WrapPolicy``: itself
    * a class, or several of them: units are their instances, as with ``module_class``
    * a function of one module, or of ``(module, recurse, nonwrapped_numel)``: as with ``lambda``; a
      ``functools.partial`` that leaves these arguments open is such a function
    * ``"package.module:Name"``: the form that is found there

    Raises ``ConfigError`` for anything else.
    """
    found: Any = resolve(form, f"policy {context.name!r}") if isinstance(form, str) else form
    if isinstance(found, WrapPolicy):
        return found
    if isinstance(found, type):
        if issubclass(found, WrapPolicy):
            raise ConfigError(
                f"policy {context.name!r} was given the policy class {found.__name__}. Give an instance of it."
            )
        return ModuleClass(context, found)
    if callable(found):
        return Lambda(context, found)
    if isinstance(found, Iterable) and not isinstance(found, str):
        return ModuleClass(context, found)
    raise ConfigError(
        f"a {type(found).__name__} is not a policy, in policy {context.name!r}. Give a WrapPolicy, module classes, a "
        "function of a module, or 'package.module:Name'."
    )
