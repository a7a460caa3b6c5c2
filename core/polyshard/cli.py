"""The command ``polyshard``: what is installed, and what a configuration file means."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from . import catalog
from ._version import __version__
from .config import PluginSpec, ShardConfig, did_you_mean
from .errors import ConfigError, PolyshardError
from .interfaces import Group, PluginContext

__all__ = ["main"]

_PLUGIN_FIELDS: dict[str, Group] = {
    "collectives": Group.COLLECTIVES,
    "precision": Group.PRECISION,
    "offload": Group.OFFLOAD,
    "policy": Group.POLICIES,
    "layout": Group.LAYOUTS,
}

#: Groups whose plugins can be constructed anywhere, to see whether their options are right.
_CHOOSE = (Group.POLICIES, Group.PRECISION, Group.LAYOUTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own arguments).

    Returns the exit code: 0, or 2 where a configuration or a plugin that it names is wrong.
    """
    parser = argparse.ArgumentParser(prog="polyshard", description=__doc__)
    parser.add_argument("--version", action="version", version=f"polyshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    plugins = commands.add_parser("plugins", help="list the installed plugins and whether they can be used")
    plugins.add_argument("group", nargs="?", metavar="GROUP", help="one group only, for example collectives")
    plugins.add_argument("--json", action="store_true", help="print JSON instead of a table")

    config = commands.add_parser("config", help="show the settings that a TOML file and the environment give")
    config.add_argument("file", metavar="FILE", help="the TOML file")
    config.add_argument("--table", default="shard", help="the table in it (default: %(default)s)")

    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "plugins":
            _show_plugins(arguments.group, as_json=arguments.json)
        else:
            _show_config(arguments.file, arguments.table)
    except PolyshardError as error:
        print(f"polyshard: {error}", file=sys.stderr)
        return 2
    return 0


def _show_plugins(group: str | None, *, as_json: bool) -> None:
    groups = list(Group) if group is None else [_group(group)]
    plugins = [plugin for each in groups for plugin in catalog.installed(each)]
    if as_json:
        records = [dataclasses.asdict(plugin) | {"state": plugin.state.value} for plugin in plugins]
        print(json.dumps(records, indent=2))
        return
    header = ("group", "name", "distribution", "version", "value", "state")
    rows = [
        (plugin.group.value, plugin.name, plugin.distribution, plugin.version, plugin.value, plugin.state.value)
        for plugin in plugins
    ]
    _print_table([header, *rows])
    for plugin in plugins:
        if plugin.error:
            print(f"\n{plugin.group.value} {plugin.name} ({plugin.distribution}): {plugin.error}")
    for folder in dict.fromkeys(plugin.editable for plugin in plugins if plugin.editable):
        print(f"\neditable install: {folder}")


def _show_config(file: str, table: str) -> None:
    config = ShardConfig.from_toml(file, table)
    rows: list[tuple[str, ...]] = [("setting", "value", "found in")]
    with _importing_beside(file):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if field.name in _PLUGIN_FIELDS:
                rows.append((field.name, _shown(value), _found_in(_PLUGIN_FIELDS[field.name], value)))
            elif field.name == "listeners":
                rows += [("listeners", _shown(each), _found_in(Group.PLUGINS, each)) for each in value]
                if not value:
                    rows.append(("listeners", "none", ""))
            else:
                rows.append((field.name, _shown(value), ""))
    _print_table(rows)


@contextmanager
def _importing_beside(file: str) -> Iterator[None]:
    """Find modules in the working directory and beside ``file``, as the script that is trained with it would."""
    before = list(sys.path)
    sys.path[:0] = [os.getcwd(), os.path.dirname(os.path.abspath(file))]
    try:
        yield
    finally:
        sys.path[:] = before


def _found_in(group: Group, choice: object) -> str:
    resolved = catalog.resolve(group, choice)
    # What it takes to see a misspelt option. Of those that only choose, values as well: the classes that a policy names
    # are imported when it is constructed. A backend or a manager may want a device, ranks, or room on a disk.
    resolved.check_options()
    if group in _CHOOSE:
        resolved.construct(PluginContext(resolved.name, torch.device("cpu")))
    return f"{resolved.value} ({resolved.distribution} {resolved.version})"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        spec = PluginSpec.parse(value)
        options = ", ".join(f"{name}={option!r}" for name, option in spec.options.items())
        return f"{spec.label} ({options})" if options else spec.label
    return str(getattr(value, "value", value))


def _group(name: str) -> Group:
    short = {group.value.rpartition(".")[2]: group for group in Group}
    key = name.removeprefix("polyshard.")
    if key not in short:
        raise ConfigError(f"no plugin group is named {name!r}.{did_you_mean(key, short)} Groups: {', '.join(short)}.")
    return short[key]


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
