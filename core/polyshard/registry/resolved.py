"""A plugin that was found and imported, and how its factory is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from ..config import did_you_mean
from ..errors import ConfigError, PluginContractError, PluginLoadError, PolyshardError
from ..interfaces import Group, PluginContext
from .contracts import CONTRACTS, instance_faults, qualified

_T_co = TypeVar("_T_co", covariant=True)


@dataclass(frozen=True)
class Resolved(Generic[_T_co]):
    """A plugin that was found, imported, and checked for its contract's version, but not constructed."""

    group: Group
    name: str
    value: str
    """Where its factory is: ``"module:attribute"``; for an object that the user gave, where its class is."""
    distribution: str
    """The distribution that offers it; empty for an object that the user gave."""
    version: str
    """Version of the distribution; empty for an object that the user gave."""
    factory: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def construct(self, context: PluginContext) -> _T_co:
        """Call the factory as ``factory(context, **options)``.

        Raises ``ConfigError`` for options that the factory does not take or that are missing, ``PluginContractError``
        where the result is not what the group's contract asks for, and ``PluginLoadError``, with the cause chained, for
        every failure inside the factory that is not an error of polyshard's own, ``SystemExit`` included.
        """
        self.check_options()
        try:
            instance = self.factory(context, **self.options)
        except (PolyshardError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise PluginLoadError(
                f"{self.described} failed while it was constructed with {_shown(self.options)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        contract = CONTRACTS[self.group]
        if instance is None or not isinstance(instance, contract):
            wanted = "an object" if contract is object else f"a polyshard.interfaces.{contract.__name__}"
            raise PluginContractError(
                f"{self.described} must construct {wanted}, but {self.value} returned "
                f"{'None' if instance is None else f'an instance of {qualified(type(instance))}'}."
            )
        if self.factory is not type(instance):
            # Of a class this was known before.
            refuse_faults(
                f"{self.described}, an instance of {qualified(type(instance))},", instance_faults(self.group, instance)
            )
        return cast("_T_co", instance)

    def check_options(self) -> None:
        """Compare the options with the factory's signature, without calling it.

        Raises ``ConfigError`` for options that it does not take or that are missing, and ``PluginContractError`` where
        it takes no context.
        """
        try:
            signature = inspect.signature(self.factory)
        except (TypeError, ValueError):
            return  # Some callables written in C have no signature; the call itself will tell.
        try:
            signature.bind_partial(None)
        except TypeError as error:
            raise PluginContractError(
                f"{self.described} must take a PluginContext as its first argument, but {self.value} has the "
                f"signature {signature}."
            ) from error
        try:
            signature.bind(None, **self.options)
        except TypeError as error:
            taken = option_parameters(signature)
            unknown = [name for name in self.options if name not in taken]
            problem = f"does not take the option {unknown[0]!r}" if unknown else f"cannot take its options: {error}"
            suggestion = did_you_mean(unknown[0], taken) if unknown else ""
            raise ConfigError(
                f"{self.described} {problem}.{suggestion} Its options: {', '.join(map(str, taken.values())) or 'none'}."
            ) from error

    @property
    def described(self) -> str:
        """For messages: the plugin, its group and the package that it is from."""
        origin = f" (from {self.distribution} {self.version})" if self.distribution else ""
        return f"plugin {self.name!r} of {self.group.value}{origin}"


def refuse_faults(where: str, faults: Iterable[str]) -> None:
    """Raise ``PluginContractError`` that names all of ``faults``, where there are any."""
    found = list(faults)
    if found:
        raise PluginContractError(f"{where} does not fit its contract: {'; '.join(found)}.")


def option_parameters(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """The parameters that an option can reach: all but the first, which is the context."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return {
        name: parameter.replace(annotation=inspect.Parameter.empty)
        for position, (name, parameter) in enumerate(signature.parameters.items())
        if position > 0 and parameter.kind in by_name
    }


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no options"
