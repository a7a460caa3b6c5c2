"""What each group asks of a plugin, and of its factory."""

from __future__ import annotations

from collections.abc import Mapping

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

#: What an instance of each group's plugins is.
CONTRACTS: Mapping[Group, type] = {
    Group.COLLECTIVES: Collectives,
    Group.PRECISION: PrecisionCaster,
    Group.OFFLOAD: OffloadManager,
    Group.POLICIES: WrapPolicy,
    Group.LAYOUTS: Layout,
    Group.PLUGINS: object,
}


def check_api_version(group: Group, plugin: object, where: str) -> None:
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


def qualified(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
