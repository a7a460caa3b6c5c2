"""From a name to an instance: ``resolve`` finds and imports a plugin, ``construct`` calls its factory."""

from __future__ import annotations

import inspect
import numbers
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Optional, Union, get_args, get_origin

import torch
from typing_extensions import override

from ..config import GROUP_OF_SETTING, PluginChoice, PluginSpec, ShardConfig, did_you_mean
from ..errors import (
    PLUGIN_ORIGIN,
    ConfigError,
    PluginContractError,
    PluginError,
    PluginLoadError,
    PolyshardError,
    StateError,
)
from ..interfaces import Collectives, Group, PluginContext
from .check import CONTRACTS, check_api_version, instance_faults, qualified, refuse_faults
from .find import choose, file_of, load, offers_of


@dataclass(frozen=True)
class Resolved:
    """A plugin that was found, imported and checked against its contract, but not constructed."""

    group: Group
    name: str
    value: str
    """Its factory, or the class of an object that the user gave: ``"module:attribute"``."""
    distribution: str
    """The distribution that offers it; empty for an object that the user gave."""
    version: str
    """Version of the distribution; empty for an object that the user gave."""
    factory: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def construct(self, context: PluginContext) -> Any:
        """Call the factory as ``factory(context, **options)``.

        Raises ``ConfigError`` for options that the factory does not take or that are missing, ``PluginContractError``
        for a result that does not fit the group's contract, and ``PluginLoadError``, with the cause chained, for every
        failure inside the factory that is not an error of polyshard's own, ``SystemExit`` included.
        """
        self.check_options()
        try:
            instance = self.factory(context, **self.options)
        except (PolyshardError, KeyboardInterrupt):
            raise
        except BaseException as error:
            options = ", ".join(f"{name}={value!r}" for name, value in self.options.items()) or "no options"
            raise PluginLoadError(
                f"{self.label} failed while it was constructed with {options}: {type(error).__name__}: {error}"
            ) from error
        contract = CONTRACTS[self.group]
        if instance is None or not isinstance(instance, contract):
            wanted = "an object" if contract is object else f"a polyshard.interfaces.{contract.__name__}"
            raise PluginContractError(
                f"{self.label} must construct {wanted}, but {self.value} returned "
                f"{'None' if instance is None else f'an instance of {qualified(type(instance))}'}."
            )
        if self.distribution:
            # Objects with slots go without.
            with suppress(AttributeError):
                object.__setattr__(instance, PLUGIN_ORIGIN, f"{self.name!r}, from {self.distribution} {self.version}")
        # A class was checked before it was called.
        if self.factory is not type(instance):
            where = f"{self.label}, an instance of {qualified(type(instance))},"
            refuse_faults(where, instance_faults(self.group, instance))
        return instance

    def check_options(self) -> None:
        """Compare the options with the factory's signature, without calling it.

        Raises ``ConfigError`` for options that it does not take, that are missing, or whose values its annotations
        exclude.
        """
        try:
            signature = inspect.signature(self.factory)
        except (TypeError, ValueError):
            return  # Some callables written in C have no signature; the call itself will tell.
        try:
            signature.bind(None, **self.options)
        except TypeError as error:
            taken = option_parameters(signature)
            unknown = [name for name in self.options if name not in taken]
            problem = f"does not take the option {unknown[0]!r}" if unknown else f"cannot take its options: {error}"
            suggestion = did_you_mean(unknown[0], taken) if unknown else ""
            raise ConfigError(
                f"{self.label} {problem}.{suggestion} Its options: {', '.join(map(str, taken.values())) or 'none'}."
            ) from error
        wanted = {name: each.annotation for name, each in signature.parameters.items() if name in self.options}
        wrong = [name for name, annotation in wanted.items() if not _fits(self.options[name], annotation)]
        if wrong:
            told = "; ".join(f"{_formatted(wanted[name])} for {name}, not {self.options[name]!r}" for name in wrong)
            raise ConfigError(f"{self.label} takes {told}.")

    @property
    def label(self) -> str:
        """The plugin, its group and its package, for messages."""
        origin = f" (from {self.distribution} {self.version})" if self.distribution else ""
        return f"plugin {self.name!r} of {self.group.value}{origin}"


#: Annotations that options are compared with, by their text, and the classes of values that they take.
_TAKES: Mapping[Any, type | tuple[type, ...]] = {
    bool: bool,
    int: numbers.Integral,
    float: numbers.Real,
    str: (str, os.PathLike),
    Path: (str, os.PathLike),
    type(None): type(None),
}
_NAMES = {"Literal": Literal, "None": None, "Optional": Optional} | {each.__name__: each for each in _TAKES}


def _formatted(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _fits(value: object, annotation: Any) -> bool:
    """Whether ``annotation`` takes ``value``: True of all that is not made of ``_TAKES``, ``Literal`` and unions."""
    if isinstance(annotation, str):
        try:
            # Of these names alone: the modules of others may be imported for type checkers only.
            annotation = eval(annotation, {"__builtins__": {}}, _NAMES)
        except Exception:
            return True
    if get_origin(annotation) is Literal:
        return any(type(each) is type(value) and each == value for each in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(annotation))
    taken = _TAKES.get(annotation, object) if isinstance(annotation, type) else object
    # True is an int to Python, and a slip in a configuration.
    return isinstance(value, taken) and (taken in (bool, object) or not isinstance(value, bool))


def option_parameters(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """The parameters that an option can reach: all but the first, which is the context."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return {
        name: parameter.replace(annotation=inspect.Parameter.empty)
        for position, (name, parameter) in enumerate(signature.parameters.items())
        if position > 0 and parameter.kind in by_name
    }


def resolve(group: Group, choice: PluginChoice) -> Resolved:
    """Find the plugin that ``choice`` names, import it, and compare it with its contract.

    An object that fulfils the group's contract resolves to itself. Nothing is constructed and no rank communicates.

    Raises ``ConfigError`` for a choice that names nothing, ``PluginNotFoundError``, ``PluginConflictError`` where
    several distributions but polyshard offer the name, ``PluginContractError`` for an object that is no plugin of the
    group, and what ``load`` does.
    """
    spec = PluginSpec.parse(choice)
    if not isinstance(spec, PluginSpec):
        return _given(group, spec)
    offer = choose(group, spec)
    factory = load(group, offer)
    return Resolved(group, spec.name, offer.value, offer.distribution, offer.version, factory, dict(spec.options))


def resolve_setting(config: ShardConfig, setting: str, choice: PluginChoice) -> Resolved:
    """``resolve`` of ``choice``, the ``setting`` of ``config``; errors begin with the variable or file that sets it."""
    try:
        return resolve(GROUP_OF_SETTING.get(setting, Group.PLUGINS), choice)
    except (ConfigError, PluginError) as error:
        if where := config.source_of(setting).where:
            error.args = (f"{where}: {error}",)
        raise


def _given(group: Group, plugin: object) -> Resolved:
    """An object of the user's, which takes the place of a factory's instance."""
    contract = CONTRACTS[group]
    cls = type(plugin)
    if not isinstance(plugin, contract):
        hint = ""
        if isinstance(plugin, type) and issubclass(plugin, contract):
            hint = f" {plugin.__name__} is the class: pass an instance."
        elif isinstance(plugin, torch.dtype):
            hint = did_you_mean(str(plugin).removeprefix("torch."), (offer.name for offer in offers_of(group)))
        elif (table := _table_of_policy(plugin)) is not None:
            raise PluginContractError(
                f"{cls.__name__} of torch.distributed.fsdp is no plugin of {group.value}. Write {group.name.lower()} = "
                f"{table!r} in its place."
            )
        raise PluginContractError(
            f"an instance of {qualified(cls)} is no plugin of {group.value}.{hint} Give a name, a table with a name, "
            f"or an instance of polyshard.interfaces.{contract.__name__}."
        )
    where = f"the {qualified(cls)} object given for {group.value}"
    # It belongs to the program and needs no version; one that it states must be served.
    if hasattr(plugin, "api_version"):
        check_api_version(group, plugin, where)
    refuse_faults(where, instance_faults(group, plugin))
    return Resolved(group, cls.__name__, qualified(cls), "", "", lambda context: plugin)


#: Fields of torch's policies, for FSDP1 and FSDP2, as options of ``mixed``.
_MIXED = {
    "param_dtype": "param",
    "reduce_dtype": "reduce",
    "buffer_dtype": "buffer",
    "output_dtype": "output",
    "cast_forward_inputs": "cast_inputs",
    "cast_root_forward_inputs": "cast_root_inputs",
    "keep_low_precision_grads": "keep_low_precision_grads",
}


def _table_of_policy(given: object) -> object:
    """What to write in the place of a policy object of ``torch.distributed.fsdp``; None for other objects."""
    names = {kind.__name__ for kind in type(given).__mro__ if kind.__module__.startswith("torch.distributed.fsdp")}
    fields = {name: getattr(given, name) for name in (*_MIXED, "pin_memory", "offload_params") if hasattr(given, name)}
    if names & {"MixedPrecisionPolicy", "MixedPrecision"}:
        # Of FSDP2 it is said once for all modules.
        fields.setdefault("cast_root_forward_inputs", fields.get("cast_forward_inputs", True))
        options = {option: fields[name] for name, option in _MIXED.items() if name in fields}
        plain = {"cast_inputs": True, "cast_root_inputs": True, "keep_low_precision_grads": False}
        kept = {name: value for name, value in options.items() if value is not None and value is not plain.get(name)}
        return {"name": "mixed"} | {
            name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            for name, value in kept.items()
        }
    if "CPUOffloadPolicy" in names:
        return {"name": "cpu", "pin_memory": fields["pin_memory"]}
    if names & {"CPUOffload", "OffloadPolicy"}:
        return "cpu" if fields.get("offload_params") else "none"
    return None


@dataclass(frozen=True)
class Constructed:
    """A plugin that was constructed, and the plugins that its factory constructed by name."""

    resolved: Resolved
    instance: Any
    inner: tuple[Constructed, ...] = ()
    """In the order in which the factory asked for them, each with inner ones of its own."""
    choice: object = None
    """Of an inner one that by which it was asked for: usually an option of the outer one."""

    def walk(self) -> Iterator[Constructed]:
        """This one, and all inside of it: an outer one before its inner ones."""
        yield self
        for each in self.inner:
            yield from each.walk()


#: Makes a plugin that a factory asks for.
InnerMaker = Callable[[Group, PluginChoice, PluginContext], Constructed]


def construct(resolved: Resolved, context: PluginContext, make_inner: InnerMaker | None = None) -> Constructed:
    """Construct ``resolved``; its factory may construct others through ``context.construct``.

    ``make_inner``: makes the plugins that the factory asks for; by default they are resolved and constructed.

    Raises what ``Resolved.construct`` does, and what ``resolve`` does for the names that the factory asks for.
    """

    made: list[Constructed] = []
    ended = False

    def inner(context: PluginContext, group: Group, choice: PluginChoice) -> Any:
        if ended:
            asked = PluginSpec.parse(choice)
            name = asked.label if isinstance(asked, PluginSpec) else type(asked).__name__
            raise StateError(
                f"{resolved.label} asked for {name!r} of {group.value} after its construction, when ranks have "
                "compared their plugins already. Construct it in the factory."
            )
        make = make_inner or (lambda group, choice, context: construct(resolve(group, choice), context))
        made.append(replace(make(group, choice, context), choice=choice))
        return made[-1].instance

    try:
        instance = resolved.construct(replace(context, name=resolved.name, constructor=inner))
    finally:
        ended = True
    return Constructed(resolved, instance, tuple(made))


@dataclass(frozen=True)
class UsedPlugin:
    """A plugin that serves a sharded model."""

    module: str
    """Fully-qualified name of the module that it serves, with all inside but what has plugins of its own; empty for the
    model itself."""
    group: Group
    name: str
    """As the configuration asked for it; of an object that the user gave, its class's."""
    distribution: str
    """The distribution that offers it; empty for an object that the user gave."""
    version: str
    """Version of the distribution; empty for an object that the user gave."""
    value: str
    """Its factory: ``"module:attribute"``."""
    file: str
    """The file in which its factory is defined; empty where none is known."""
    options: Mapping[str, Any]
    instance: object
    """The factory's result."""
    inner: tuple[UsedPlugin, ...] = ()
    """The plugins that its factory constructed by name."""

    @property
    def reason(self) -> str:
        """One line for people: what collectives chose by themselves until now, and why; empty for other plugins."""
        return self.instance.reason if isinstance(self.instance, Collectives) else ""

    @override
    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}" if self.distribution else "an object of the program"
        inside = ", ".join(map(str, self.inner))
        return f"{self.name} ({origin}{'; of ' if inside else ''}{inside})"


def used(constructed: Constructed, module: str = "") -> UsedPlugin:
    """``constructed`` as users see it. ``module``: the module that it serves."""
    resolved = constructed.resolved
    return UsedPlugin(
        module=module,
        group=resolved.group,
        name=resolved.name,
        distribution=resolved.distribution,
        version=resolved.version,
        value=resolved.value,
        file=file_of(resolved.factory if resolved.distribution else type(constructed.instance)),
        options=dict(resolved.options),
        instance=constructed.instance,
        inner=tuple(used(each, module) for each in constructed.inner),
    )
