"""Installed plugins that cannot be used, or not by their names alone."""

from __future__ import annotations

from collections.abc import Iterable

from ..interfaces.options import ALLOWED_PLUGINS, DISABLE_PLUGINS
from ..registry import Installed, PluginState
from .finding import Finding, Level, Section

#: Those that a longer name still reaches.
_REACHABLE = frozenset({PluginState.HIDDEN, PluginState.AMBIGUOUS})


def plugins(installed: Iterable[Installed]) -> Section:
    """What of ``installed`` is not ready."""
    found = list(installed)
    findings = tuple(_finding(plugin) for plugin in found if plugin.state is not PluginState.READY)
    packages = sorted({f"{plugin.distribution} {plugin.version}".strip() for plugin in found})
    facts = (("plugins", str(len(found))), ("packages", ", ".join(packages) or "none"))
    return Section("plugins", facts, findings)


def _finding(plugin: Installed) -> Finding:
    about = f"{plugin.group.value} {plugin.name} ({plugin.distribution})"
    if plugin.state in _REACHABLE:
        what = f"is {plugin.state.value}"
        return Finding(Level.HINT, about, what, plugin.error, f'say "{plugin.distribution}:{plugin.name}"')
    if plugin.state is PluginState.REFUSED:
        variables = f"{ALLOWED_PLUGINS} and {DISABLE_PLUGINS} decide, which `polyshard doctor` shows under variables"
        return Finding(Level.HINT, about, "is refused, and was not imported", plugin.error, variables)
    cure = f"repair or update {plugin.distribution}, or uninstall it"
    return Finding(Level.PROBLEM, about, f"cannot be used ({plugin.state.value})", plugin.error, cure)
