"""``polyshard plugins``: what is installed, and whether it can be used."""

from __future__ import annotations

import argparse
import dataclasses
import json

from .. import catalog
from ..config import did_you_mean
from ..errors import ConfigError
from ..interfaces import Group
from .tables import print_table


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``commands``."""
    plugins = commands.add_parser("plugins", help="list the installed plugins and whether they can be used")
    verbs = plugins.add_subparsers(dest="verb")
    plugins.set_defaults(run=_list, group=None, json=False)
    listing = verbs.add_parser("list", help="list them")
    listing.add_argument("group", nargs="?", metavar="GROUP", help="one group only, for example collectives")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    listing.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> int:
    groups = list(Group) if arguments.group is None else [group_named(arguments.group)]
    plugins = [plugin for each in groups for plugin in catalog.installed(each)]
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


def group_named(name: str) -> Group:
    """The group that ``name`` stands for, with or without ``polyshard.``; raises ``ConfigError`` for any other name."""
    short = {group.value.rpartition(".")[2]: group for group in Group}
    key = name.removeprefix("polyshard.")
    if key not in short:
        raise ConfigError(f"no plugin group is named {name!r}.{did_you_mean(key, short)} Groups: {', '.join(short)}.")
    return short[key]
