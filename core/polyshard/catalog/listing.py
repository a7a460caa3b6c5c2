"""The plugins that are installed, and whether each can be used."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from ..errors import PluginVersionError
from ..interfaces import Group
from .contracts import check_api_version, qualified
from .offers import Offer, editable_folder, offers_of


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


def installed(group: Group) -> tuple[Installed, ...]:
    """Every plugin of the group that is installed, by name and distribution.

    Imports them all to tell their states: for listings and error messages, not for a training run.
    """
    offers = offers_of(group)
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
                editable=editable_folder(offer.entry_point),
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


def _state(group: Group, entry_point: EntryPoint) -> tuple[PluginState, str]:
    try:
        factory = entry_point.load()
    except KeyboardInterrupt:
        raise
    # One package that calls sys.exit() must not keep the others from being listed.
    except BaseException as error:
        return PluginState.BROKEN, f"{type(error).__name__}: {error}"
    if not callable(factory):
        return PluginState.BROKEN, f"it is an instance of {qualified(type(factory))}, which cannot be called"
    try:
        check_api_version(group, factory, entry_point.value)
    except PluginVersionError as error:
        return PluginState.INCOMPATIBLE, str(error)
    return PluginState.READY, ""
