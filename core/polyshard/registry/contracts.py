"""What each group asks of a plugin, and of its factory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import PluginVersionError
from ..interfaces import (
    CURRENT_API,
    OLDEST_API,
    Collectives,
    Group,
    Layout,
    OffloadManager,
    PrecisionCaster,
    WrapPolicy,
)
from .signatures import hook_faults, method_faults, takes_context

#: What an instance of each group's plugins is.
CONTRACTS: Mapping[Group, type] = {
    Group.COLLECTIVES: Collectives,
    Group.PRECISION: PrecisionCaster,
    Group.OFFLOAD: OffloadManager,
    Group.POLICIES: WrapPolicy,
    Group.LAYOUTS: Layout,
    Group.PLUGINS: object,
}

_VERSION = "api_version"


def check_stated_version(group: Group, factory: object, where: str) -> None:
    """Raise ``PluginVersionError`` where the factory itself states no version that this polyshard serves.

    A class states it in its own body, and so does that of an object which can be called; a function has an attribute.
    """
    base = _inherited_from(factory)
    if base is not None:
        raise PluginVersionError(
            f"{where} inherits {_VERSION} from {qualified(base)}; state its own. Add '{_VERSION} = "
            f"{CURRENT_API[group]}' to the class: what it was written for does not change with its base."
        )
    check_api_version(group, factory, where)


def check_api_version(group: Group, plugin: object, where: str) -> None:
    """Raise ``PluginVersionError`` where ``plugin`` has no version that this polyshard serves, its own or inherited."""
    oldest, current = OLDEST_API[group], CURRENT_API[group]
    served = f"{oldest}" if oldest == current else f"{oldest} to {current}"
    version = getattr(plugin, _VERSION, None)
    if not isinstance(version, int) or isinstance(version, bool):
        found = "has none" if version is None else f"has {version!r}"
        raise PluginVersionError(
            f"{where} must say which version of the contract it implements, in an integer attribute '{_VERSION}', but "
            f"{found}. Add '{_VERSION} = {current}' to the class, or set it on the function."
        )
    if not oldest <= version <= current:
        cure = "Update polyshard" if version > current else "Update the plugin's package"
        raise PluginVersionError(
            f"{where} implements version {version} of the contract, but this polyshard serves {served}. {cure}."
        )


def _inherited_from(factory: object) -> type | None:
    """The base class whose ``api_version`` the factory would pass for its own; None where it has one, or has none."""
    cls = factory if isinstance(factory, type) else type(factory)
    if _VERSION in vars(cls) or (cls is not factory and _VERSION in getattr(factory, "__dict__", {})):
        return None
    return next((base for base in cls.__mro__[1:] if _VERSION in vars(base)), None)


def faults_of(group: Group, factory: Any) -> Iterator[str]:
    """What keeps ``factory`` from making a plugin that is called as the contract says: a sentence for each.

    Nothing is constructed. Of a function it is known only whether it takes a context; ``instance_faults`` tells the
    rest of what it made.
    """
    if not takes_context(factory):
        yield f"it must take a PluginContext as its first argument, but has the signature {inspect.signature(factory)}"
    if isinstance(factory, type):
        yield from _class_faults(group, factory)


def _class_faults(group: Group, cls: type) -> Iterator[str]:
    contract = CONTRACTS[group]
    if contract is object:
        yield from hook_faults(cls)
    elif issubclass(cls, contract):
        yield from method_faults(contract, cls)
    elif cls.__new__ is object.__new__:
        # With a __new__ of its own, calling it may give anything.
        yield f"it is no {contract.__name__}: derive it from polyshard.interfaces.{contract.__name__}"


def instance_faults(group: Group, plugin: object) -> Iterator[str]:
    """The same of an object that was made, but what its construction would have refused."""
    contract = CONTRACTS[group]
    if contract is not object and isinstance(plugin, contract):
        yield from method_faults(contract, type(plugin))


def qualified(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
