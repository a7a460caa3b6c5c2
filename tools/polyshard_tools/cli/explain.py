"""``polyshard config`` and ``polyshard explain``: what a configuration means, by itself and for a model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from typing import Any

import torch
from polyshard import registry
from polyshard.config import GROUP_OF_SETTING, PluginChoice, PluginSpec, ShardConfig
from polyshard.errors import DeviceError
from polyshard.interfaces import Group, PluginContext

from ..explaining import ExplainedPlugin, ExplainedUnit, Explanation, explain
from ..explaining.explain import Workbench
from ..explaining.explanation import folded, plain
from ..explaining.picture import draw
from ..pictures import require_drawable
from .output import print_json, print_table
from .shared import (
    config_of,
    importing_beside,
    model_of,
)

#: Groups whose plugins can be constructed anywhere, to see whether their options are right.
_CHOOSE = (Group.POLICIES, Group.PRECISION)


def explain_model(arguments: argparse.Namespace) -> int:
    if arguments.picture:
        require_drawable(arguments.picture)
    config, world_size = config_of(arguments)
    # Prints of the user's modules stay out of the output.
    with importing_beside(arguments.file), redirect_stdout(sys.stderr):
        explanation = explain(config, model_of(arguments), world_size, device=arguments.device)
    if arguments.picture:
        draw(explanation, arguments.picture)
    if arguments.json:
        print_json(explanation.as_json())
    else:
        _print(explanation, unfolded=arguments.all)
    return 0


def _print(explanation: Explanation, *, unfolded: bool) -> None:
    print(explanation.headline + "\n")
    print_table([("setting", "value", "set by"), *_setting_rows(explanation)])
    print()
    print_table([("plugin", "serves", "factory", "from", "file"), *_plugin_rows(explanation)])
    print()
    lines = []
    for each in (inner for plugin in explanation.plugins for inner in plugin.walk()):
        lines += [f"{each.name} was not constructed here: {each.absent}"] if each.absent else []
        lines += [f"{each.name} chooses {each.reason}"] if each.reason else []
    # A plugin has the reason of what it constructed.
    for line in dict.fromkeys(lines):
        print(line)
    if lines:
        print()
    print_table(_unit_rows(explanation, unfolded=unfolded))
    print(
        f"\n{len(explanation.units)} units of {explanation.elements:,} elements; {explanation.padding:,} of padding "
        f"({explanation.padding / max(1, explanation.elements):.3%})"
    )


def _setting_rows(explanation: Explanation) -> Iterator[tuple[str, str, str]]:
    for setting in explanation.settings:
        yield setting.name, _value(setting.value), str(setting.source)
        for plugin in explanation.plugins:
            if plugin.serves.partition("[")[0] == setting.name:
                yield from _option_rows(plugin, "  ")


def _option_rows(plugin: ExplainedPlugin, prefix: str) -> Iterator[tuple[str, str, str]]:
    for option in plugin.options:
        yield f"{prefix}{option.name}", _value(option.value), str(option.source)
    for inner in plugin.inner:
        yield from _option_rows(inner, f"{prefix}{inner.name}.")


def _plugin_rows(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    def rows(plugin: ExplainedPlugin, depth: int) -> Iterator[tuple[str, ...]]:
        origin = f"{plugin.distribution} {plugin.version}" if plugin.distribution else "the program"
        yield "  " * depth + plugin.name, plugin.serves, plugin.value, origin, plugin.file
        for each in plugin.inner:
            yield from rows(each, depth + 1)

    for plugin in explanation.plugins:
        yield from rows(plugin, 0)


def _unit_rows(explanation: Explanation, *, unfolded: bool) -> list[tuple[str, ...]]:
    units = explanation.units
    folds = [(unit,) for unit in units] if unfolded else folded(units, [_cells(unit) for unit in units])
    rows: list[tuple[str, ...]] = [("unit", *_HEADER)]
    for fold in folds:
        many = f" to {fold[-1].name} ({len(fold)} units)" if len(fold) > 1 else ""
        rows.append((fold[0].name + many, *_cells(fold[0])))
    # A column that is empty in every row is left out.
    kept = [index for index in range(len(rows[0])) if index < _ALWAYS or any(row[index] for row in rows[1:])]
    return [tuple(row[index] for index in kept) for row in rows]


_HEADER = (
    *(
        "class",
        "parameters",
        "elements",
        "padding",
        "each rank",
        "master",
        "compute",
        "communication",
        "reduce",
        "grad",
    ),
    *("chosen since", "frozen", "gathered as", "over", "overrides"),
)
#: How many columns of the table are there in any case.
_ALWAYS = 1 + _HEADER.index("frozen")


def _cells(unit: ExplainedUnit) -> tuple[str, ...]:
    numbers = (len(unit.parameters), unit.elements, unit.padding, unit.shard_elements)
    dtypes = (unit.master, unit.compute, unit.communication, unit.reduce, unit.grad)
    return (
        unit.module_class,
        *(f"{number:,}" for number in numbers),
        *(str(dtype).removeprefix("torch.") for dtype in dtypes),
        unit.reason,
        "" if unit.trained else "frozen",
        f"{unit.gather_nbytes:,} bytes encoded" if unit.encoded else "",
        f"{unit.ranks}: {unit.shards:,} x {unit.replicas:,} ranks, sum / {unit.divisor:g}" if unit.ranks else "",
        ", ".join(f"{name}={_value(value)}" for name, value in unit.overrides.items()),
    )


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        # Its options have lines of their own.
        return PluginSpec.parse(value).label
    if value is None or value == ():
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(_value(each) for each in value)
    return str(value) if isinstance(value, torch.device) else str(plain(value))


def show_config(arguments: argparse.Namespace) -> int:
    config = ShardConfig.from_toml(arguments.file, arguments.table)
    rows: list[tuple[str, Any, str, str]] = []
    with importing_beside(arguments.file):
        for field in dataclasses.fields(config):
            name, value = field.name, getattr(config, field.name)
            set_by = _set_by(config, name)
            if name in GROUP_OF_SETTING:
                rows.append((name, value, set_by, _found_in(config, name, value)))
            elif name == "listeners" and value:
                rows += [(name, each, set_by, _found_in(config, name, each)) for each in value]
            else:
                rows.append((name, value, set_by, ""))
    header = ("setting", "value", "set by", "found in")
    if arguments.json:
        print_json([dict(zip(header, map(plain, row), strict=True)) for row in rows])
    else:
        print_table([header, *((name, _choice(value), *rest) for name, value, *rest in rows)])
    return 0


def _set_by(config: ShardConfig, setting: str) -> str:
    """Where the setting came from, and those options that came from elsewhere."""
    value, source = getattr(config, setting), config.source_of(setting)
    options = [option for option in value if option != "name"] if isinstance(value, Mapping) else []
    sources = {option: config.source_of(setting, option) for option in options}
    elsewhere = [f"{option}: {found}" for option, found in sources.items() if found != source]
    return "; ".join([str(source), *elsewhere])


def _found_in(config: ShardConfig, setting: str, choice: PluginChoice) -> str:
    resolved = registry.resolve_setting(config, setting, choice)
    # Enough to see a misspelt option. Plugins that only choose show wrong values as well, once they are constructed: a
    # policy then imports the classes that it names. So do collectives, where they need no ranks and no device, for they
    # communicate at first use. A manager may want room on a disk.
    resolved.check_options()
    context = PluginContext(resolved.name, torch.device("cpu"))
    if resolved.group in _CHOOSE:
        registry.construct(resolved, context)
    elif resolved.group is Group.COLLECTIVES:
        with suppress(DeviceError):
            Workbench(1).construct(resolved, context)
    return f"{resolved.value} ({resolved.distribution} {resolved.version})"


def _choice(value: Any) -> str:
    if isinstance(value, dict):
        spec = PluginSpec.parse(value)
        options = ", ".join(f"{name}={option!r}" for name, option in spec.options.items())
        return f"{spec.label} ({options})" if options else spec.label
    if value == ():
        return "none"
    return str(getattr(value, "value", value))
