"""``polyshard config``: what a configuration file means."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from .. import catalog
from ..config import PluginSpec, ShardConfig
from ..interfaces import Group, PluginContext
from .models import importing_beside
from .tables import print_table

_PLUGIN_FIELDS: dict[str, Group] = {
    "collectives": Group.COLLECTIVES,
    "precision": Group.PRECISION,
    "offload": Group.OFFLOAD,
    "policy": Group.POLICIES,
    "layout": Group.LAYOUTS,
}

#: Groups whose plugins can be constructed anywhere, to see whether their options are right.
_CHOOSE = (Group.POLICIES, Group.PRECISION, Group.LAYOUTS)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``commands``."""
    config = commands.add_parser("config", help="show the settings that a TOML file and the environment give")
    config.add_argument("file", metavar="FILE", help="the TOML file")
    config.add_argument("--table", default="shard", help="the table in it (default: %(default)s)")
    config.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> int:
    file, table = arguments.file, arguments.table
    config = ShardConfig.from_toml(file, table)
    rows: list[tuple[str, ...]] = [("setting", "value", "found in")]
    with importing_beside(file):
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
    print_table(rows)
    return 0


def _found_in(group: Group, choice: object) -> str:
    resolved = catalog.resolve(group, choice)
    # What it takes to see a misspelt option. Of those that only choose, values as well: the classes that a policy names
    # are imported when it is constructed. A backend or a manager may want a device, ranks, or room on a disk.
    resolved.check_options()
    if group in _CHOOSE:
        catalog.construct(resolved, PluginContext(resolved.name, torch.device("cpu")))
    return f"{resolved.value} ({resolved.distribution} {resolved.version})"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        spec = PluginSpec.parse(value)
        options = ", ".join(f"{name}={option!r}" for name, option in spec.options.items())
        return f"{spec.label} ({options})" if options else spec.label
    return str(getattr(value, "value", value))
