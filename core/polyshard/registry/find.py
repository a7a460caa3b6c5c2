"""The installed plugins: which package offers which name, which may be imported, and which can be used.

Entry points are read again where a folder of ``sys.path`` changed, as an installation changes it: they take about a
millisecond for each ten distributions, and ``fully_shard`` is called for every layer. stevedore's own cache forgets
which distribution offers a name, and for two minutes hides a package that was just installed. The only module that
imports stevedore.
"""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from typing import Any, cast

from stevedore import DriverManager
from typing_extensions import override

from ..config import PluginSpec, did_you_mean
from ..errors import (
    ConfigError,
    PluginConflictError,
    PluginContractError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    PluginRefusedError,
    PluginVersionError,
)
from ..interfaces import Group
from ..interfaces.options import ALLOWED_PLUGINS, DISABLE_PLUGINS, SWITCHED_OFF
from .check import check_api_version, faults_of, qualified, refuse_faults

#: The distribution whose names are its own: no other package changes what they stand for.
BUILT_IN = "polyshard"


@dataclass(frozen=True)
class Offer:
    """An entry point, with name and version of the distribution that offers it, both empty where unknown."""

    entry_point: EntryPoint
    distribution: str
    version: str
    fault: str = ""
    """Why it cannot be imported, whatever is in its module; empty for no reason."""

    @property
    def name(self) -> str:
        return self.entry_point.name

    @property
    def value(self) -> str:
        return self.entry_point.value

    @property
    def label(self) -> str:
        """Distribution and name, which are unique."""
        return f"{self.distribution}:{self.name}"

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}".strip() or "an unnamed distribution"

    @property
    def built_in(self) -> bool:
        return normalised(self.distribution) == BUILT_IN

    def of(self, group: Group) -> str:
        return f"plugin {self.name!r} of {group.value} ({self.value}, from {self.origin})"


def offers_of(group: Group) -> list[Offer]:
    """What is installed of ``group``, as ``_offered`` orders it. Callers do not change the list: it is kept."""
    return _offered(group, _places())


@functools.lru_cache(maxsize=1)
def _entry_points(places: object) -> EntryPoints:
    try:
        # Python 3.11's annotation still names the class that 3.10 returned.
        return cast("EntryPoints", importlib.metadata.entry_points())
    except Exception:
        return EntryPoints(_readable_entry_points())


def _readable_entry_points() -> Iterator[EntryPoint]:
    """What ``importlib.metadata.entry_points`` would list without the files for which it fails."""
    seen = set()
    for each in importlib.metadata.distributions():
        name = normalised(name_and_version(each)[0])
        # The first of a name on the path is the installed one.
        if not name or name not in seen:
            seen.add(name)
            try:
                yield from tuple(each.entry_points)
            except Exception as error:
                warnings.warn(
                    f"The entry points of {_broken_folder(each)} cannot be read, so its plugins are not there: "
                    f"{type(error).__name__}: {error}. Install the distribution anew, or remove what is left of it.",
                    stacklevel=2,
                )


#: Folders of metadata that could not be read: pip may be about to end what it has begun there.
_broken: dict[str, None] = {}


def _broken_folder(distribution: Distribution) -> str:
    # Nothing public tells where a distribution is that says nothing of itself.
    folder = str(getattr(distribution, "_path", "an unknown place"))
    _broken[folder] = None
    return folder


def _places() -> object:
    """Other than before once a distribution was installed, removed or replaced, or a broken one was changed."""
    folders = []
    for path in (*sys.path, *_broken):
        try:
            folders.append((path, os.stat(path or ".").st_mtime_ns))
        except OSError:
            folders.append((path, 0))
    return tuple(folders), tuple(sys.meta_path)


@functools.lru_cache(maxsize=len(Group))
def _offered(group: Group, places: object) -> list[Offer]:
    """The group's entry points, ordered, each once.

    An editable install can leave two metadata folders of one distribution, or one file that lists a line twice.
    """
    # The metadata of a package that offers many plugins is read once, and that of other packages not at all.
    origins: dict[int, tuple[str, str]] = {}
    found: dict[tuple[str, str, str], Offer] = {}
    for entry_point in _entry_points(places).select(group=group.value):
        if id(entry_point.dist) not in origins:
            origins[id(entry_point.dist)] = name_and_version(entry_point.dist)
        name, version = origins[id(entry_point.dist)]
        fault = ""
        if entry_point.dist is not None and not name:
            fault = (
                f"{_broken_folder(entry_point.dist)} does not say of which distribution it is, as where pip ended "
                "early or is at work. Install the distribution anew, or remove what is left of it."
            )
        elif entry_point.pattern.match(entry_point.value) is None:
            fault = f"{entry_point.value!r} is no 'module:attribute'. Ask its author, or name another plugin."
        offer = Offer(entry_point, name, version, fault)
        found[offer.name, normalised(offer.distribution), offer.value] = offer
    return [found[key] for key in sorted(found)]


def name_and_version(distribution: Distribution | None) -> tuple[str, str]:
    """As its metadata say; both empty where there is no distribution, or none that says its name."""
    if distribution is None:
        return "", ""
    try:
        # Looked up by key, what is not there is deprecated.
        metadata: Any = distribution.metadata
        return metadata.get("Name", ""), metadata.get("Version", "")
    # Whatever stands there, or does not: no reason to end a run that names other plugins.
    except Exception:
        return "", ""


def normalised(distribution: str) -> str:
    """The form in which package indexes compare names: case and the separators ``-``, ``_``, ``.`` do not matter."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def choose(group: Group, spec: PluginSpec) -> Offer:
    """The offer that ``spec`` names; nothing is imported.

    Raises ``PluginNotFoundError``, and ``PluginConflictError`` for a name that several distributions offer, none of
    them polyshard.
    """
    offers = offers_of(group)
    named = [offer for offer in offers if offer.name == spec.name]
    if spec.distribution is not None:
        wanted = normalised(spec.distribution)
        named = [offer for offer in named if normalised(offer.distribution) == wanted]
    else:
        # Otherwise installing a package that offers "none" would end everybody's run with the default configuration.
        named = [offer for offer in named if offer.built_in] or named
    named = [offer for offer in named if not offer.fault] or named
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


def _not_found(group: Group, spec: PluginSpec, offers: list[Offer]) -> str:
    lines = [f"no installed plugin of {group.value} is named {spec.label!r}."]
    if spec.distribution is None:
        lines[0] += did_you_mean(spec.name, (offer.name for offer in offers))
    else:
        lines[0] += did_you_mean(spec.label, (offer.label for offer in offers))
    if not offers:
        lines.append("No plugin of this group is installed. Is polyshard itself installed, or only on the path?")
        return "\n".join(lines)
    lines.append("Installed:")
    lines += [f"  {offer.name}  (from {offer.origin})" for offer in offers]
    # Their states are unknown here: a misspelt name must not import plugins.
    lines.append(
        "Name one of them, or install the package that offers it: again after a change of its pyproject.toml. "
        "`polyshard plugins list` tells their states."
    )
    return "\n".join(lines)


_ON = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class Permission:
    """Which plugins of other distributions this process may import; polyshard's own always may.

    Two variables of the environment say so. They are no settings: a configuration file comes from elsewhere more easily
    than the environment of a process, and must not widen what may run.
    """

    allowed: tuple[str, ...] | None
    """Distributions and ``"distribution:name"``, normalised and ordered; None where all are allowed."""
    disabled: bool
    """No other distribution's plugin is allowed, whatever ``allowed`` lists."""

    @classmethod
    def read(cls) -> Permission:
        """That of the process's environment.

        Raises ``ConfigError`` for a text that is neither on nor off: a typo must not count as allowed.
        """
        listed, switch = os.environ.get(ALLOWED_PLUGINS), os.environ.get(DISABLE_PLUGINS, "").strip().lower()
        if switch not in _ON | SWITCHED_OFF:
            raise ConfigError(
                f"environment variable {DISABLE_PLUGINS} must be 1 or 0, not {os.environ[DISABLE_PLUGINS]!r}."
            )
        return cls(None if listed is None else _entries(listed), switch in _ON)

    def refusal(self, offer: Offer) -> str:
        """The reason why the plugin may not be imported, and the cure; empty where it may."""
        if offer.built_in:
            return ""
        if self.disabled:
            return (
                f"{DISABLE_PLUGINS} is set, which leaves polyshard's own plugins alone. Unset it where "
                f"{offer.distribution or 'its package'} is trusted, or name one of polyshard's."
            )
        distribution = normalised(offer.distribution)
        if self.allowed is None or not {distribution, f"{distribution}:{offer.name}"}.isdisjoint(self.allowed):
            return ""
        return (
            f"{ALLOWED_PLUGINS} does not list it ({', '.join(self.allowed) or 'it lists none'}). Add "
            f'"{offer.distribution}" or "{offer.label}" there where it is trusted, or name another plugin.'
        )

    def rows(self) -> list[list[str]]:
        """A row for each variable that is set, for comparison between ranks."""
        rows = [] if self.allowed is None else [[ALLOWED_PLUGINS, *self.allowed]]
        return [*rows, [DISABLE_PLUGINS, "1"]] if self.disabled else rows


def _entries(text: str) -> tuple[str, ...]:
    found = set()
    for entry in filter(None, (each.strip() for each in text.split(","))):
        distribution, separator, name = (part.strip() for part in entry.partition(":"))
        if not distribution or (separator and not name) or ":" in name:
            raise ConfigError(
                f"environment variable {ALLOWED_PLUGINS} has {entry!r}, which is neither a distribution nor "
                f'"distribution:name". Write it as "{BUILT_IN},acme,other:name".'
            )
        # Only of distributions do case and separators not matter.
        found.add(normalised(distribution) + separator + name)
    return tuple(sorted(found))


def load(group: Group, offer: Offer) -> Any:
    """The factory of ``offer``, imported and compared with its contract.

    Raises ``PluginRefusedError`` before anything is imported where the environment does not allow it,
    ``PluginLoadError`` with the cause of a failed import, ``PluginVersionError``, and ``PluginContractError`` for what
    cannot be called as the contract calls it.
    """
    where = offer.of(group)
    refusal = Permission.read().refusal(offer)
    if refusal:
        raise PluginRefusedError(f"{where} was not imported: {refusal}")
    if offer.fault:
        raise PluginLoadError(f"{where} cannot be imported: {offer.fault}")
    try:
        factory = _LiveDriverManager(group, offer).driver
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
            f"{where} is an instance of {qualified(type(factory))}, which cannot be called. Point the entry point at "
            "a class or function that takes a PluginContext."
        )
    check_api_version(group, factory, where, inherited=False)
    refuse_faults(where, faults_of(group, factory))
    return factory


class _LiveDriverManager(DriverManager[Any]):
    """stevedore's driver manager over an entry point that was just read, instead of over its cache."""

    def __init__(self, group: Group, offer: Offer) -> None:
        self._live = [offer.entry_point]
        super().__init__(group.value, offer.name, invoke_on_load=False)

    @override
    def list_entry_points(self) -> list[EntryPoint]:
        return self._live


class PluginState(enum.Enum):
    """Whether an installed plugin can be used."""

    READY = "ready"
    """It can be imported, serves a contract version that this polyshard serves, and can be called as that says."""
    HIDDEN = "hidden"
    """It is ready, but polyshard itself has a plugin of this name: ask for it as ``"distribution:name"``."""
    AMBIGUOUS = "ambiguous"
    """It is ready, but another distribution offers the same name: ask for it as ``"distribution:name"``."""
    INCOMPATIBLE = "incompatible"
    """Its ``api_version`` is missing, inherited, or outside the range that this polyshard serves."""
    INCOMPLETE = "incomplete"
    """It is no factory, its class lacks methods, or a method cannot be called as the contract calls it."""
    REFUSED = "refused"
    """``POLYSHARD_ALLOWED_PLUGINS`` or ``POLYSHARD_DISABLE_PLUGINS`` forbids it; it was not imported."""
    BROKEN = "broken"
    """It cannot be imported."""


#: The state of a plugin that cannot be resolved, by the error.
STATES: Mapping[type[PluginError], PluginState] = {
    PluginLoadError: PluginState.BROKEN,
    PluginVersionError: PluginState.INCOMPATIBLE,
    PluginContractError: PluginState.INCOMPLETE,
    PluginConflictError: PluginState.AMBIGUOUS,
    PluginRefusedError: PluginState.REFUSED,
}


@dataclass(frozen=True)
class Installed:
    """A plugin that some installed distribution offers."""

    group: Group
    name: str
    value: str
    """Its factory: ``"module:attribute"``."""
    distribution: str
    version: str
    """Version of the distribution."""
    state: PluginState
    error: str = ""
    """The reason why it is not ready; empty where it is."""
    file: str = ""
    """File in which its factory is defined; empty where that is not known."""


def installed(group: Group) -> tuple[Installed, ...]:
    """Every plugin of the group that is installed, by name and distribution.

    Imports all that the environment allows to tell their states: for listings, not for a training run.
    """
    offers = offers_of(group)
    found = []
    for offer in offers:
        state, error, file = PluginState.READY, "", ""
        try:
            file = file_of(load(group, offer))
            state, error = _by_name(offer, offers)
        except PluginError as refused:
            state, error = STATES[type(refused)], str(refused).removeprefix(offer.of(group)).lstrip()
        if not file and not offer.fault and state is not PluginState.REFUSED:
            file = _location(offer.entry_point.module)
        found.append(
            Installed(
                group=group,
                name=offer.name,
                value=offer.value,
                distribution=offer.distribution,
                version=offer.version,
                state=state,
                error=error,
                file=file,
            )
        )
    return tuple(found)


def _by_name(offer: Offer, offers: list[Offer]) -> tuple[PluginState, str]:
    rivals = [each for each in offers if each.name == offer.name and each is not offer and not each.fault]
    if any(rival.distribution == offer.distribution for rival in rivals):
        return PluginState.AMBIGUOUS, "its distribution offers the name several times: its author must keep one of them"
    if not rivals or offer.built_in:
        return PluginState.READY, ""
    if any(rival.built_in for rival in rivals):
        return PluginState.HIDDEN, f'polyshard has a plugin of this name: ask for "{offer.label}"'
    return PluginState.AMBIGUOUS, f'several distributions offer the name: ask for "{offer.label}"'


def file_of(factory: object) -> str:
    """File in which ``factory`` is defined; empty where that is not known."""
    source = inspect.getmodule(factory) or inspect.getmodule(type(factory))
    return getattr(source, "__file__", None) or ""


def _location(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except KeyboardInterrupt:
        raise
    # It imports the packages around the module, which may fail as the module did.
    except BaseException:
        return ""
    return (spec.origin or "") if spec is not None and spec.has_location else ""
