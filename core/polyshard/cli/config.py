"""``polyshard config``: what a configuration file means."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from .. import registry
from ..config import GROUP_OF_SETTING, PluginChoice, PluginSpec, ShardConfig
from ..errors import DeviceError
from ..explaining.stand_ins import Workbench
from ..interfaces import Group, PluginContext
from .models import importing_beside
from .tables import print_table

#: Groups whose plugins can be constructed anywhere, to see whether their options are right.
_CHOOSE = (Group.POLICIES, Group.PRECISION, Group.LAYOUTS)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``commands``."""
    config = commands.add_parser("config", help="show the settings that a TOML file and the environment give")
    add_file_options(config)
    config.set_defaults(run=_show)


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add ``FILE`` and ``--table``, for ``ShardConfig.from_toml``."""
    parser.add_argument("file", metavar="FILE", help="the TOML file")
    parser.add_argument("--table", default="shard", help="the table in it (default: %(default)s)")


def _show(arguments: argparse.Namespace) -> int:
    config = ShardConfig.from_toml(arguments.file, arguments.table)
    rows: list[tuple[str, ...]] = [("setting", "value", "set by", "found in")]
    with importing_beside(arguments.file):
        for field in dataclasses.fields(config):
            name, value = field.name, getattr(config, field.name)
            set_by = _set_by(config, name)
            if name in GROUP_OF_SETTING:
                rows.append((name, _shown(value), set_by, _found_in(GROUP_OF_SETTING[name], value)))
            elif name == "listeners" and value:
                rows += [(name, _shown(each), set_by, _found_in(Group.PLUGINS, each)) for each in value]
            else:
                rows.append((name, _shown(value), set_by, ""))
    print_table(rows)
    return 0


def _set_by(config: ShardConfig, setting: str) -> str:
    """Where the setting came from, and those options that came from elsewhere."""
    value, source = getattr(config, setting), config.source_of(setting)
    options = [option for option in value if option != "name"] if isinstance(value, Mapping) else []
    sources = {option: config.source_of(setting, option) for option in options}
    elsewhere = [f"{option}: {found}" for option, found in sources.items() if found != source]
    return "; ".join([str(source), *elsewhere])


def _found_in(group: Group, choice: PluginChoice) -> str:
    resolved = registry.resolve(group, choice)
    # What it takes to see a misspelt option. Of those that only choose, values as well: the classes that a policy names
    # are imported when it is constructed. So of collectives, which communicate at first use, where they need no ranks
    # and no device. A manager may want room on a disk.
    resolved.check_options()
    context = PluginContext(resolved.name, torch.device("cpu"))
    if group in _CHOOSE:
        registry.construct(resolved, context)
    elif group is Group.COLLECTIVES:
        with suppress(DeviceError):
            Workbench(1, registry.scan()).construct(group, choice, context)
    return f"{resolved.value} ({resolved.distribution} {resolved.version})"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        spec = PluginSpec.parse(value)
        options = ", ".join(f"{name}={option!r}" for name, option in spec.options.items())
        return f"{spec.label} ({options})" if options else spec.label
    if value == ():
        return "none"
    return str(getattr(value, "value", value))
