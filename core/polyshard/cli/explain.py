"""``polyshard explain``: what a configuration means for a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any

import torch

from ..config import PluginSpec, ShardConfig
from ..explaining import ExplainedPlugin, ExplainedUnit, Explanation, explain
from ..explaining.explanation import plain
from .config import add_file_options
from .folding import Fold, folded
from .models import add_model_options, importing_beside, model_of
from .tables import print_table


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``commands``."""
    parser = commands.add_parser(
        "explain", help="say which plugins serve a model, who chose them, and what its units are; needs no GPU"
    )
    add_file_options(parser)
    add_model_options(parser)
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--device", help="where ranks compute, for example cuda (default: as FILE says)")
    parser.add_argument("--all", action="store_true", help="a line for each unit, equal ones too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config = ShardConfig.from_toml(arguments.file, arguments.table)
    # What modules of the user's print stays out of the output.
    with importing_beside(arguments.file), redirect_stdout(sys.stderr):
        explanation = explain(config, model_of(arguments), arguments.world_size, device=arguments.device)
    if arguments.json:
        print(json.dumps(explanation.as_json(), indent=2))
    else:
        _print(explanation, unfolded=arguments.all)
    return 0


def _print(explanation: Explanation, *, unfolded: bool) -> None:
    print(_headline(explanation) + "\n")
    print_table([("setting", "value", "set by"), *_setting_rows(explanation)])
    print()
    print_table([("plugin", "serves", "factory", "from", "file"), *_plugin_rows(explanation)])
    print()
    absent = [each for plugin in explanation.plugins for each in plugin.walk() if each.absent]
    for each in absent:
        print(f"{each.name} was not constructed here: {each.absent}")
    if absent:
        print()
    print_table(_unit_rows(explanation, unfolded=unfolded))
    print(
        f"\n{len(explanation.units)} units of {explanation.elements:,} elements; {explanation.padding:,} of padding "
        f"({explanation.padding / max(1, explanation.elements):.3%})"
    )


def _headline(explanation: Explanation) -> str:
    ranks = f"{explanation.world_size:,} ranks" if explanation.world_size > 1 else "one rank"
    cut = f"units in {explanation.shards:,} shards" if explanation.shards > 1 else "whole units on each rank"
    copies = f", {explanation.replicas:,} replicas of each" if explanation.shards > 1 < explanation.replicas else ""
    # Each rank has a device of its own, with an index of its own.
    place = explanation.device.type
    return f"{explanation.model} on {ranks}, computing on {place}: {explanation.strategy.value}, {cut}{copies}"


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
    folds = [Fold((unit,)) for unit in units] if unfolded else folded(units, [_cells(unit) for unit in units])
    rows: list[tuple[str, ...]] = [("unit", *_HEADER)]
    rows += [(_names(fold), *_cells(fold.items[0])) for fold in folds]
    # What none of them has would be a column of nothing.
    kept = [index for index in range(len(rows[0])) if index < _ALWAYS or any(row[index] for row in rows[1:])]
    return [tuple(row[index] for index in kept) for row in rows]


_HEADER = (
    *("class", "parameters", "elements", "padding", "each rank", "master", "compute", "wire", "reduce", "grad"),
    *("layout", "chosen since", "frozen", "gathered as", "overrides"),
)
#: How many columns of the table are there in any case.
_ALWAYS = 1 + _HEADER.index("frozen")


def _cells(unit: ExplainedUnit) -> tuple[str, ...]:
    """All that is shown of a unit but its name."""
    numbers = (len(unit.parameters), unit.elements, unit.padding, unit.shard_elements)
    dtypes = (unit.master, unit.compute, unit.wire, unit.reduce, unit.grad)
    return (
        unit.module_class,
        *(f"{number:,}" for number in numbers),
        *(str(dtype).removeprefix("torch.") for dtype in dtypes),
        unit.layout,
        unit.reason,
        "" if unit.trained else "frozen",
        f"{unit.gather_nbytes:,} bytes encoded" if unit.encoded else "",
        ", ".join(f"{name}={_value(value)}" for name, value in unit.overrides.items()),
    )


def _names(fold: Fold[ExplainedUnit]) -> str:
    first, last = fold.items[0], fold.items[-1]
    return first.name if first is last else f"{first.name} to {last.name} ({len(fold.items)} units)"


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        # Its options have lines of their own.
        return PluginSpec.parse(value).label
    if value is None or value == ():
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(_value(each) for each in value)
    return str(value) if isinstance(value, torch.device) else str(plain(value))
