"""The plugins that are installed, and whether each can be used."""

from __future__ import annotations

import enum
import importlib.util
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from ..errors import PluginVersionError
from ..interfaces import Group
from .contracts import check_stated_version, faults_of, qualified
from .offers import Offer, editable_folder, offers_of
from .permission import Permission


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
    """Its class lacks methods, or its factory or a method cannot be called as the contract calls it."""
    REFUSED = "refused"
    """``POLYSHARD_ALLOWED_PLUGINS`` or ``POLYSHARD_DISABLE_PLUGINS`` forbids it; it was not imported, so nothing
    else is known of it."""
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
    file: str = ""
    """File in which its factory is defined; empty where that is not known."""


def installed(group: Group) -> tuple[Installed, ...]:
    """Every plugin of the group that is installed, by name and distribution.

    Imports all that the environment allows to tell their states: for listings, not for a training run.
    """
    permission = Permission.read()
    offers = offers_of(group)
    found = []
    for offer in offers:
        refusal = permission.refusal(offer)
        if refusal:
            factory, state, error = None, PluginState.REFUSED, refusal
        else:
            factory, state, error = _loaded(group, offer.entry_point)
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
                editable=editable_folder(offer.entry_point),
                # Looking for a module's file imports the packages around it.
                file="" if refusal else file_of(factory, offer.entry_point),
            )
        )
    return tuple(found)


def _standing(offer: Offer, rivals: list[Offer]) -> tuple[PluginState, str]:
    """What the name alone leads to where ``rivals`` have it as well."""
    if any(rival.distribution == offer.distribution for rival in rivals):
        return PluginState.AMBIGUOUS, "its distribution offers the name several times: its author must keep one of them"
    if not rivals or offer.built_in:
        return PluginState.READY, ""
    if any(rival.built_in for rival in rivals):
        return PluginState.HIDDEN, f'polyshard has a plugin of this name: ask for "{offer.label}"'
    return PluginState.AMBIGUOUS, f'several distributions offer the name: ask for "{offer.label}"'


def _loaded(group: Group, entry_point: EntryPoint) -> tuple[Any, PluginState, str]:
    """The factory, None where it cannot be imported; its state as if it had its name alone; and why."""
    try:
        factory = entry_point.load()
    except KeyboardInterrupt:
        raise
    # One package that calls sys.exit() must not keep the others from being listed.
    except BaseException as error:
        return None, PluginState.BROKEN, f"{type(error).__name__}: {error}"
    return factory, *_state(group, factory, entry_point.value)


def _state(group: Group, factory: Any, value: str) -> tuple[PluginState, str]:
    if not callable(factory):
        return PluginState.BROKEN, f"it is an instance of {qualified(type(factory))}, which cannot be called"
    try:
        check_stated_version(group, factory, value)
    except PluginVersionError as error:
        return PluginState.INCOMPATIBLE, str(error)
    faults = list(faults_of(group, factory))
    return (PluginState.INCOMPLETE, "; ".join(faults)) if faults else (PluginState.READY, "")


def file_of(factory: object, entry_point: EntryPoint) -> str:
    """File in which ``factory`` is defined; for None, that of the entry point's module; empty where none is found."""
    defined = factory if hasattr(factory, "__module__") else type(factory)
    names = [entry_point.module] if factory is None else [defined.__module__, entry_point.module]
    for name in names:
        found = getattr(sys.modules.get(name), "__file__", None) or _found(name)
        if found:
            return found
    return ""


def _found(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except KeyboardInterrupt:
        raise
    # It imports the packages around the module, which may fail as the module did.
    except BaseException:
        return ""
    return (spec.origin or "") if spec is not None and spec.has_location else ""
