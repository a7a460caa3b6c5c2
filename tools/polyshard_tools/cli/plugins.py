"""``polyshard plugins``: lists what is installed, and runs the suite of a plugin's contract."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import textwrap
import tomllib
from typing import TYPE_CHECKING, Any

from polyshard import registry
from polyshard.config import PluginSpec, did_you_mean
from polyshard.errors import (
    ConfigError,
    PluginNotFoundError,
    StateError,
)
from polyshard.interfaces import Group
from polyshard.registry.find import normalised, offers_of

from .output import Ink, inked, print_json, print_table

if TYPE_CHECKING:
    from polyshard_testing.check_process import Rule, SuiteRun


#: Options that the suite of collectives gives on each rank.
_GIVEN_BY_RANK = ("rank", "world_size")


def list_or_check(arguments: argparse.Namespace) -> int:
    return _check(arguments) if arguments.verb == "check" else _list(arguments)


def _list(arguments: argparse.Namespace) -> int:
    groups = list(Group) if arguments.group is None else [group_named(arguments.group)]
    plugins = [plugin for each in groups for plugin in registry.installed(each)]
    if arguments.json:
        records = [dataclasses.asdict(plugin) | {"state": plugin.state.value} for plugin in plugins]
        print_json(records)
        return 0
    header = ("group", "name", "distribution", "version", "value", "state")
    rows = [
        (plugin.group.value, plugin.name, plugin.distribution, plugin.version, plugin.value, plugin.state.value)
        for plugin in plugins
    ]
    print_table([header, *rows])
    for plugin in plugins:
        if plugin.error:
            print(f"\n{plugin.group.value} {plugin.name} ({plugin.distribution or 'unnamed'}): {plugin.error}")
    return 0


def group_named(name: str) -> Group:
    """The group that ``name`` stands for, with or without ``polyshard.``; raises ``ConfigError`` for any other name."""
    short = {group.value.rpartition(".")[2]: group for group in Group}
    key = name.removeprefix("polyshard.")
    if key not in short:
        raise ConfigError(f"no plugin group is named {name!r}.{did_you_mean(key, short)} Groups: {', '.join(short)}.")
    return short[key]


def _check(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("pytest") is None:
        raise StateError("the suites are tests for pytest, which is not installed here: pip install pytest")
    if arguments.timeout <= 0:
        raise ConfigError(f"--timeout {arguments.timeout:g} is no time for a suite; give a positive number of seconds")
    options = _table("--options", arguments.options)
    group = _group(arguments)
    try:
        resolved = registry.resolve(group, {"name": arguments.name, **options})
    except tuple(registry.STATES) as error:
        state = registry.STATES[type(error)].value
        return _print_unusable(arguments, {"group": group.value, "name": arguments.name}, state, str(error))
    _check_options(resolved)
    if arguments.model and group is not Group.POLICIES:
        raise ConfigError(f"--model is for policies; a plugin of {group.value} is tested without one of yours")
    # Imported with pytest, so that all else of the command works without it.
    from polyshard_testing.check_process import run_suite

    model = {"model_factory": arguments.model} if arguments.model else {}
    run = run_suite(
        group,
        f"{resolved.distribution}:{resolved.name}",
        arguments.options,
        _attributes(group, arguments.suite) | model,
        _devices(),
        arguments.timeout,
    )
    plugin = {
        "group": group.value,
        "name": resolved.name,
        "distribution": resolved.distribution,
        "version": resolved.version,
    }
    if run.unusable:
        return _print_unusable(arguments, plugin, "unusable", run.unusable)
    return _print_result(arguments, plugin, run)


def _group(arguments: argparse.Namespace) -> Group:
    if arguments.group is not None:
        return group_named(arguments.group)
    spec = PluginSpec.parse(arguments.name)
    assert isinstance(spec, PluginSpec)
    offers = {group: offers_of(group) for group in Group}
    wanted = None if spec.distribution is None else normalised(spec.distribution)
    groups = [
        group
        for group, offered in offers.items()
        if any(each.name == spec.name and wanted in (None, normalised(each.distribution)) for each in offered)
    ]
    if not groups:
        names = sorted({each.name for offered in offers.values() for each in offered})
        raise PluginNotFoundError(
            f"no installed plugin of any group is named {arguments.name!r}.{did_you_mean(spec.name, names)} "
            "polyshard plugins list shows them all."
        )
    if len(groups) > 1:
        listed = " or ".join(f"--group {group.value.rpartition('.')[2]}" for group in groups)
        raise ConfigError(f"{len(groups)} groups have a plugin named {arguments.name!r}: say {listed}.")
    return groups[0]


def _table(option: str, text: str) -> dict[str, Any]:
    reason = ""
    try:
        found: Any = tomllib.loads(f"table = {text}\n")["table"]
        if isinstance(found, dict):
            return found
    except tomllib.TOMLDecodeError as error:
        reason = f": {error}"
    raise ConfigError(f"{option} {text!r} is no inline table of TOML, such as '{{folder = \".\"}}'{reason}")


def _check_options(resolved: registry.Resolved) -> None:
    given = dict(resolved.options)
    if resolved.group is Group.COLLECTIVES:
        taken = _parameters(resolved)
        by_rank = (*_GIVEN_BY_RANK, *(("world",) if hasattr(resolved.factory, "make_world") else ()))
        given = {**{name: 1 for name in by_rank if name in taken}, **given}
    missing = [
        name
        for name, parameter in _parameters(resolved).items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and name not in given
    ]
    if missing:
        shown = ", ".join(f"{name} = ..." for name in missing)
        one = "the option" if len(missing) == 1 else "the options"
        raise ConfigError(
            f"{resolved.label} needs {one} {' and '.join(map(repr, missing))}: give --options '{{{shown}}}'"
        )
    dataclasses.replace(resolved, options=given).check_options()


def _parameters(resolved: registry.Resolved) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(resolved.factory).parameters
    except (TypeError, ValueError):
        return {}
    return dict(list(parameters.items())[1:])


def _attributes(group: Group, text: str) -> dict[str, Any]:
    from polyshard_testing.installed import OF_GROUP

    found = _table("--suite", text)
    known = {
        name
        for base in OF_GROUP[group].__mro__
        for name, value in vars(base).items()
        if not name.startswith("_") and isinstance(value, (bool, int, float, str, tuple))
    }
    for name in found:
        if name not in known:
            raise ConfigError(
                f"the suite of {group.value} has no attribute {name!r}.{did_you_mean(name, known)} It has: "
                f"{', '.join(sorted(known)) or 'none'}."
            )
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _devices() -> tuple[str, ...]:
    import torch

    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _print_unusable(arguments: argparse.Namespace, plugin: dict[str, str], state: str, error: str) -> int:
    if arguments.json:
        print_json(plugin | {"state": state, "error": error, "devices": [], "rules": []})
    else:
        print(f"{_named(plugin)}: {state}\n{textwrap.indent(error, '  ')}")
    return 2


def _print_result(arguments: argparse.Namespace, plugin: dict[str, str], run: SuiteRun) -> int:
    failed = [rule for rule in run.rules if rule.failures]
    asked = [rule for rule in run.rules if rule.asked]
    code = 1 if failed or run.ended_early else 0
    if arguments.json:
        rules = [dataclasses.asdict(rule) | {"holds": rule.holds} for rule in run.rules]
        record: dict[str, Any] = {**plugin, "state": "checked", "error": run.ended_early, "devices": run.devices}
        print_json(record | {"rules": rules})
        return code
    for rule in run.rules:
        verdict, ink = _verdict(rule)
        print(f"{inked(f'{verdict:<14}', ink)} {_sentence(rule)}")
    print()
    for rule in failed:
        _print_failed(rule)
    if run.ended_early:
        print(f"{run.ended_early}; rules that come later were not tried\n")
    held, where = sum(rule.holds for rule in asked), " and ".join(run.devices)
    print(f"{_named(plugin)}: {held} of {len(asked)} rules hold on {where}")
    return code


def _verdict(rule: Rule) -> tuple[str, Ink | None]:
    if rule.failures:
        return "does not hold", Ink.RED
    return ("holds", Ink.GREEN) if rule.asked else ("does not apply", None)


def _sentence(rule: Rule) -> str:
    return rule.name.removeprefix("test_").replace("_", " ")


def _print_failed(rule: Rule) -> None:
    first = rule.failures[0]
    case = f" [{first.case}]" if first.case else ""
    print(f"does not hold on {first.device}: {_sentence(rule)}{case}")
    print(textwrap.indent(first.message, "  "))
    if len(rule.failures) > 1:
        print(f"  and {len(rule.failures) - 1} more of its cases")
    print()


def _named(plugin: dict[str, str]) -> str:
    origin = f"{plugin['distribution']} {plugin['version']} " if "distribution" in plugin else ""
    return f"{origin}{plugin['name']} of {plugin['group']}"
