"""``polyshard plugins``: what is installed, and whether it can be used and keeps its contract."""

from __future__ import annotations

import argparse
import dataclasses
import json

from .. import registry
from ..interfaces import Group
from . import check
from .groups import group_named
from .tables import print_table


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``commands``."""
    plugins = commands.add_parser("plugins", help="list the installed plugins and whether they can be used; check one")
    verbs = plugins.add_subparsers(dest="verb")
    plugins.set_defaults(run=_list, group=None, json=False)
    listing = verbs.add_parser("list", help="list them")
    listing.add_argument("group", nargs="?", metavar="GROUP", help="one group only, for example collectives")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    listing.set_defaults(run=_list)
    check.add(verbs)


def _list(arguments: argparse.Namespace) -> int:
    groups = list(Group) if arguments.group is None else [group_named(arguments.group)]
    plugins = [plugin for each in groups for plugin in registry.installed(each)]
    if arguments.json:
        records = [dataclasses.asdict(plugin) | {"state": plugin.state.value} for plugin in plugins]
        print(json.dumps(records, indent=2))
        return 0
    header = ("group", "name", "distribution", "version", "value", "state")
    rows = [
        (plugin.group.value, plugin.name, plugin.distribution, plugin.version, plugin.value, plugin.state.value)
        for plugin in plugins
    ]
    print_table([header, *rows])
    for plugin in plugins:
        if plugin.error:
            print(f"\n{plugin.group.value} {plugin.name} ({plugin.distribution}): {plugin.error}")
    for folder in dict.fromkeys(plugin.editable for plugin in plugins if plugin.editable):
        print(f"\neditable install: {folder}")
    return 0
