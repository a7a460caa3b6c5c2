"""Finds plugins through entry points, when a model is wrapped.

The only module that imports stevedore. Entry points are read from the installed packages at each call: stevedore's own
cache forgets which distribution offers a name, and for two minutes hides a package that was just installed.
"""

from __future__ import annotations

import enum
import importlib.metadata
import inspect
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from typing import Any, Generic, Literal, TypeVar, cast, overload

from stevedore import DriverManager

from .config import PluginChoice, PluginSpec, did_you_mean
from .errors import (
    ConfigError,
    PluginConflictError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
    PluginVersionError,
    PolyshardError,
)
from .fingerprint import fields_of, local_options, options_of
from .interfaces import (
    CURRENT_API,
    OLDEST_API,
    Collectives,
    Group,
    Layout,
    OffloadManager,
    PluginContext,
    PrecisionCaster,
    WrapPolicy,
)

__all__ = ["Installed", "PluginState", "Resolved", "fingerprint", "installed", "resolve"]

_T_co = TypeVar("_T_co", covariant=True)

#: The distribution whose names are its own: no other package changes what they stand for.
_BUILT_IN = "polyshard"

_CONTRACTS: Mapping[Group, type] = {
    Group.COLLECTIVES: Collectives,
    Group.PRECISION: PrecisionCaster,
    Group.OFFLOAD: OffloadManager,
    Group.POLICIES: WrapPolicy,
    Group.LAYOUTS: Layout,
    Group.PLUGINS: object,
}


class PluginState(enum.Enum):
    """Whether an installed plugin can be used."""

    READY = "ready"
    """It can be imported and serves a contract version that this polyshard serves."""
    HIDDEN = "hidden"
    """It is ready, but polyshard itself has a plugin of this name: ask for it as ``"distribution:name"``."""
    AMBIGUOUS = "ambiguous"
    """It is ready, but another distribution offers the same name: ask for it as ``"distribution:name"``."""
    INCOMPATIBLE = "incompatible"
    """Its ``api_version`` is missing or outside the range that this polyshard serves."""
    BROKEN = "broken"
    """It cannot be imported, or is nothing that can be called."""


@dataclass(frozen=True)
class Installed:
    """A plugin that some installed distribution offers."""

    group: Group
    name: str
    value: str
    """Where its factory is: ``"module:attribute"``."""
    distribution: str
    version: str
    """Version of the distribution."""
    state: PluginState
    error: str = ""
    """Why it cannot be used as it is; empty where it is ready."""
    editable: str = ""
    """Folder of an editable install; empty for any other."""


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
        contract = _CONTRACTS[self.group]
        if instance is None or not isinstance(instance, contract):
            wanted = "an object" if contract is object else f"a polyshard.interfaces.{contract.__name__}"
            raise PluginContractError(
                f"{self.described} must construct {wanted}, but {self.value} returned "
                f"{'None' if instance is None else f'an instance of {_qualified(type(instance))}'}."
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
            taken = _option_parameters(signature)
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


class _LiveDriverManager(DriverManager[Any]):
    """stevedore's driver manager over entry points that were just read, instead of over its cache."""

    def __init__(self, namespace: str, name: str, entry_points: list[EntryPoint]) -> None:
        self._live = entry_points
        super().__init__(namespace, name, invoke_on_load=False)

    def list_entry_points(self) -> list[EntryPoint]:
        return self._live


@overload
def resolve(
    group: Literal[Group.COLLECTIVES], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[Collectives]: ...
@overload
def resolve(
    group: Literal[Group.PRECISION], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[PrecisionCaster]: ...
@overload
def resolve(
    group: Literal[Group.OFFLOAD], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[OffloadManager]: ...
@overload
def resolve(
    group: Literal[Group.POLICIES], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[WrapPolicy]: ...
@overload
def resolve(
    group: Literal[Group.LAYOUTS], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[Layout]: ...
@overload
def resolve(group: Group, choice: PluginChoice, entry_points: EntryPoints | None = None) -> Resolved[object]: ...
def resolve(group: Group, choice: PluginChoice, entry_points: EntryPoints | None = None) -> Resolved[Any]:
    """Find the plugin that ``choice`` names, import it, and check the version of its contract.

    An object that fulfils the group's contract resolves to itself. Nothing is constructed and no rank is spoken to.
    ``entry_points``: what ``scan`` returned, for several calls in a row; None reads the installed metadata anew.

    Raises ``ConfigError`` for a choice that names nothing, ``PluginNotFoundError``, ``PluginConflictError`` where
    several distributions but polyshard offer the name, ``PluginLoadError`` with the cause of a failed import,
    ``PluginVersionError``, and ``PluginContractError`` for an object that is no plugin of the group.
    """
    spec = PluginSpec.parse(choice)
    if not isinstance(spec, PluginSpec):
        return _given(group, spec)
    named = _offers(group, entry_points, spec.name)
    offer = _chosen(group, spec, named or _offers(group, entry_points))
    where = f"plugin {spec.name!r} of {group.value} ({offer.value}, from {offer.origin})"
    try:
        factory = _LiveDriverManager(group.value, spec.name, [offer.entry_point]).driver
    except KeyboardInterrupt:
        raise
    # A module that calls sys.exit() must not end the training run without a word.
    except BaseException as error:
        raise PluginLoadError(
            f"{where} cannot be imported: {type(error).__name__}: {error}. Repair or reinstall "
            f"{offer.distribution}, or name another plugin."
        ) from error
    if not callable(factory):
        raise PluginContractError(
            f"{where} is an instance of {_qualified(type(factory))}, which cannot be called. Point the entry point at "
            "a class or function that takes a PluginContext."
        )
    _check_api_version(group, factory, where)
    return Resolved(
        group=group,
        name=spec.name,
        value=offer.value,
        distribution=offer.distribution,
        version=offer.version,
        factory=factory,
        options=dict(spec.options),
    )


def installed(group: Group) -> tuple[Installed, ...]:
    """Every plugin of the group that is installed, by name and distribution.

    Imports them all to tell their states: for listings and error messages, not for a training run.
    """
    offers = _offers(group)
    found = []
    for offer in offers:
        state, error = _state(group, offer.entry_point)
        if state is PluginState.READY:
            rivals = [each for each in offers if each.name == offer.name and each is not offer]
            state, error = _standing(offer, rivals)
        found.append(
            Installed(
                group=group,
                name=offer.name,
                value=offer.value,
                distribution=offer.distribution,
                version=offer.version,
                state=state,
                error=error,
                editable=_editable_folder(offer.entry_point),
            )
        )
    return tuple(found)


def fingerprint(resolved: Resolved[object], instance: object) -> list[Any]:
    """What ranks compare of a plugin: group, name, value, distribution, version, and options as JSON.

    ``instance``: what it constructed. Of an object that the user gave, the fields of a dataclass count as options;
    those of collectives and listeners are each rank's own. Options that the factory's ``local_options`` name are left
    out.

    Raises ``PluginContractError`` for ``local_options`` that are not names.
    """
    where = f"plugin {resolved.name!r} of {resolved.group.value}"
    if resolved.distribution:
        options = options_of(resolved.options, local_options(resolved.group, resolved.factory, where))
    elif resolved.group in (Group.COLLECTIVES, Group.PLUGINS):
        options = []
    else:
        options = fields_of(instance, local_options(resolved.group, instance, where))
    return [resolved.group.value, resolved.name, resolved.value, resolved.distribution, resolved.version, options]


def _given(group: Group, plugin: object) -> Resolved[Any]:
    contract = _CONTRACTS[group]
    cls = type(plugin)
    if not isinstance(plugin, contract):
        hint = ""
        if isinstance(plugin, type) and issubclass(plugin, contract):
            hint = f" {plugin.__name__} is the class: pass an instance."
        raise PluginContractError(
            f"an instance of {_qualified(cls)} is no plugin of {group.value}.{hint} Give a name, a table with a name, "
            f"or an instance of polyshard.interfaces.{contract.__name__}."
        )
    name = cls.__name__
    # Nobody installed it: it is as old as the call that gives it. What says a version all the same is held to it.
    if hasattr(plugin, "api_version"):
        _check_api_version(group, plugin, f"the {_qualified(cls)} object given for {group.value}")

    def give(context: PluginContext) -> object:
        return plugin

    return Resolved(group=group, name=name, value=_qualified(cls), distribution="", version="", factory=give)


def scan() -> EntryPoints:
    """All entry points of all installed distributions, as they are now: about a millisecond for each ten of them."""
    # Python 3.11's annotation still names the class that 3.10 returned.
    return cast("EntryPoints", importlib.metadata.entry_points())


@dataclass(frozen=True)
class _Offer:
    """An entry point, with name and version of the distribution that offers it; both empty where there is none."""

    entry_point: EntryPoint
    distribution: str
    version: str

    @property
    def name(self) -> str:
        return self.entry_point.name

    @property
    def value(self) -> str:
        return self.entry_point.value

    @property
    def label(self) -> str:
        """The name that nobody else's plugin has."""
        return f"{self.distribution}:{self.name}"

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}".strip() or "an unnamed distribution"

    @property
    def built_in(self) -> bool:
        return _normalised(self.distribution) == _BUILT_IN


def _offers(group: Group, scanned: EntryPoints | None = None, name: str | None = None) -> list[_Offer]:
    """The group's entry points, or those called ``name``, ordered, each once.

    An editable install can leave two metadata folders of one distribution, or one file that lists a line twice.
    """
    # Distributions parse their metadata, a whole README among it, each time that they are asked for a field.
    origins: dict[int, tuple[str, str]] = {}
    found: dict[tuple[str, str, str], _Offer] = {}
    for entry_point in (scan() if scanned is None else scanned).select(group=group.value):
        # Nor are those parsed that offer nothing of this name.
        if name is not None and entry_point.name != name:
            continue
        if id(entry_point.dist) not in origins:
            origins[id(entry_point.dist)] = _name_and_version(entry_point.dist)
        offer = _Offer(entry_point, *origins[id(entry_point.dist)])
        found[offer.name, _normalised(offer.distribution), offer.value] = offer
    return [found[key] for key in sorted(found)]


def _chosen(group: Group, spec: PluginSpec, offers: list[_Offer]) -> _Offer:
    named = [offer for offer in offers if offer.name == spec.name]
    if spec.distribution is not None:
        wanted = _normalised(spec.distribution)
        named = [offer for offer in named if _normalised(offer.distribution) == wanted]
    else:
        # Otherwise installing a package that offers "none" would end everybody's run with the default configuration.
        named = [offer for offer in named if offer.built_in] or named
    if not named:
        raise PluginNotFoundError(_not_found(group, spec, offers))
    if len(named) > 1:
        origins = "; ".join(f"{offer.origin} ({offer.value})" for offer in named)
        distributions = dict.fromkeys(offer.distribution for offer in named)
        if len(distributions) == 1:
            cure = f"Ask the author of {next(iter(distributions))} to keep one of them."
        else:
            cure = "Choose one: " + " or ".join(f'"{each}:{spec.name}"' for each in distributions) + "."
        raise PluginConflictError(
            f"plugin {spec.name!r} of {group.value} is offered {len(named)} times: {origins}. {cure}"
        )
    return named[0]


def _not_found(group: Group, spec: PluginSpec, offers: list[_Offer]) -> str:
    lines = [f"no installed plugin of {group.value} is named {spec.label!r}."]
    if spec.distribution is None:
        lines[0] += did_you_mean(spec.name, (offer.name for offer in offers))
    else:
        lines[0] += did_you_mean(spec.label, (offer.label for offer in offers))
    if not offers:
        lines.append("No plugin of this group is installed. Is polyshard itself installed, or only on the path?")
        return "\n".join(lines)
    plugins = installed(group)
    lines.append("Installed:")
    lines += [f"  {plugin.name}  (from {plugin.distribution} {plugin.version})" for plugin in plugins]
    unusable = [plugin for plugin in plugins if plugin.state in (PluginState.BROKEN, PluginState.INCOMPATIBLE)]
    if unusable:
        lines.append("Of these, not usable:")
        lines += [f"  {plugin.name}  ({plugin.value}): {plugin.error}" for plugin in unusable]
    lines.append("Name one of them, or install the package that offers it.")
    return "\n".join(lines)


def _standing(offer: _Offer, rivals: list[_Offer]) -> tuple[PluginState, str]:
    """What the name alone leads to where ``rivals`` have it as well."""
    if any(rival.distribution == offer.distribution for rival in rivals):
        return PluginState.AMBIGUOUS, "its distribution offers the name several times: its author must keep one of them"
    if not rivals or offer.built_in:
        return PluginState.READY, ""
    if any(rival.built_in for rival in rivals):
        return PluginState.HIDDEN, f'polyshard has a plugin of this name: ask for "{offer.label}"'
    return PluginState.AMBIGUOUS, f'several distributions offer the name: ask for "{offer.label}"'


def _state(group: Group, entry_point: EntryPoint) -> tuple[PluginState, str]:
    try:
        factory = entry_point.load()
    except KeyboardInterrupt:
        raise
    # One package that calls sys.exit() must not keep the others from being listed.
    except BaseException as error:
        return PluginState.BROKEN, f"{type(error).__name__}: {error}"
    if not callable(factory):
        return PluginState.BROKEN, f"it is an instance of {_qualified(type(factory))}, which cannot be called"
    try:
        _check_api_version(group, factory, entry_point.value)
    except PluginVersionError as error:
        return PluginState.INCOMPATIBLE, str(error)
    return PluginState.READY, ""


def _check_api_version(group: Group, plugin: object, where: str) -> None:
    oldest, current = OLDEST_API[group], CURRENT_API[group]
    served = f"{oldest}" if oldest == current else f"{oldest} to {current}"
    version = getattr(plugin, "api_version", None)
    if not isinstance(version, int) or isinstance(version, bool):
        found = "has none" if version is None else f"has {version!r}"
        raise PluginVersionError(
            f"{where} must say which version of the contract it implements, in an integer attribute 'api_version', but "
            f"{found}. Add 'api_version = {current}' to the class, or set it on the function."
        )
    if not oldest <= version <= current:
        cure = "Update polyshard" if version > current else "Update the plugin's package"
        raise PluginVersionError(
            f"{where} implements version {version} of the contract, but this polyshard serves {served}. {cure}."
        )


def _option_parameters(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """The parameters that an option can reach: all but the first, which is the context."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return {
        name: parameter.replace(annotation=inspect.Parameter.empty)
        for position, (name, parameter) in enumerate(signature.parameters.items())
        if position > 0 and parameter.kind in by_name
    }


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no options"


def _qualified(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _name_and_version(distribution: Distribution | None) -> tuple[str, str]:
    if distribution is None:
        return "", ""
    metadata = distribution.metadata
    return metadata["Name"], metadata["Version"]


def _normalised(distribution: str) -> str:
    """The form in which package indexes compare names: case and the separators ``-``, ``_``, ``.`` do not matter."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _editable_folder(entry_point: EntryPoint) -> str:
    text = entry_point.dist.read_text("direct_url.json") if entry_point.dist is not None else None
    if not text:
        return ""
    try:
        record = json.loads(text)
        editable = bool(record["dir_info"].get("editable"))
        parts = urllib.parse.urlsplit(record["url"])
    except (KeyError, TypeError, AttributeError, ValueError):
        return ""
    return urllib.request.url2pathname(parts.path) if editable and parts.scheme == "file" else ""
