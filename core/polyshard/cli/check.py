"""``polyshard plugins check``: runs the suite of an installed plugin's contract, and says which rules hold."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import json
import textwrap
import tomllib
from collections.abc import Mapping
from typing import Any

from .. import catalog
from ..catalog.offers import normalised, offers_of
from ..config import PluginSpec, did_you_mean
from ..errors import (
    ConfigError,
    PluginConflictError,
    PluginContractError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    PluginRefusedError,
    PluginVersionError,
    StateError,
)
from ..interfaces import Group
from .groups import group_named
from .suite_run import Rule, Suite, SuiteRun

#: What a plugin that cannot be resolved is, by the error that says so.
_STATES: Mapping[type[PluginError], catalog.PluginState] = {
    PluginLoadError: catalog.PluginState.BROKEN,
    PluginVersionError: catalog.PluginState.INCOMPATIBLE,
    PluginContractError: catalog.PluginState.INCOMPLETE,
    PluginConflictError: catalog.PluginState.AMBIGUOUS,
    PluginRefusedError: catalog.PluginState.REFUSED,
}
#: Options that the suite of collectives gives on each rank.
_GIVEN_BY_RANK = ("rank", "world_size")


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``verbs``, those of ``polyshard plugins``."""
    check = verbs.add_parser(
        "check",
        help="run the tests of its contract on one",
        description="Runs the conformance suite of its group on an installed plugin, on the CPU and, where there is "
        "one, a CUDA device. Exit code: 0 where every rule holds, 1 where one does not, 2 where the plugin "
        "cannot be used.",
    )
    check.add_argument("name", metavar="NAME", help='its name, or "distribution:name"')
    check.add_argument("--group", help="its group, for example offload, where several have the name")
    check.add_argument("--options", default="{}", metavar="TABLE", help="its options, for example '{folder = \".\"}'")
    check.add_argument(
        "--suite", default="{}", metavar="TABLE", help="attributes of the suite, for example '{wire_tolerance = 0.01}'"
    )
    check.add_argument("--model", default="", metavar="PKG:FACTORY", help="builds the model that a policy is to plan")
    check.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds until the suite must have ended"
    )
    check.add_argument("--json", action="store_true", help="print JSON instead of text")
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("pytest") is None:
        raise StateError("the suites are tests for pytest, which is not installed here: pip install pytest")
    if arguments.timeout <= 0:
        raise ConfigError(f"--timeout {arguments.timeout:g} is no time for a suite; give a positive number of seconds")
    options = _table("--options", arguments.options)
    group = _group(arguments)
    try:
        resolved = catalog.resolve(group, {"name": arguments.name, **options})
    except tuple(_STATES) as error:
        state = next(state for kind, state in _STATES.items() if isinstance(error, kind))
        return _tell_unusable(arguments, {"group": group.value, "name": arguments.name}, state.value, str(error))
    _check_options(resolved)
    suite = Suite(
        group,
        f"{resolved.distribution}:{resolved.name}",
        _document(arguments.options),
        _attributes(group, arguments.suite),
        _model(group, arguments.model),
    )
    run = suite.run(_devices(group), arguments.timeout)
    plugin = {
        "group": group.value,
        "name": resolved.name,
        "distribution": resolved.distribution,
        "version": resolved.version,
    }
    if run.unusable:
        return _tell_unusable(arguments, plugin, "unusable", run.unusable)
    return _tell(arguments, plugin, run)


def _group(arguments: argparse.Namespace) -> Group:
    if arguments.group is not None:
        return group_named(arguments.group)
    scanned = catalog.scan()
    spec = PluginSpec.parse(arguments.name)
    assert isinstance(spec, PluginSpec)
    offers = {group: offers_of(group, scanned) for group in Group}
    found = [
        group
        for group, offered in offers.items()
        for each in offered
        if each.name == spec.name
        and (spec.distribution is None or normalised(each.distribution) == normalised(spec.distribution))
    ]
    groups = list(dict.fromkeys(found))
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


def _document(table: str) -> str:
    """An inline table as a document, which is how it is handed on: TOML has values that JSON has not."""
    return f"table = {table}\n"


def _table(option: str, text: str) -> dict[str, Any]:
    try:
        found: Any = tomllib.loads(_document(text))["table"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{option} {text!r} is no inline table of TOML, such as '{{folder = \".\"}}': {error}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{option} {text!r} is no inline table of TOML, such as '{{folder = \".\"}}'")
    return found


def _check_options(resolved: catalog.Resolved[Any]) -> None:
    given = dict(resolved.options)
    if resolved.group is Group.COLLECTIVES:
        taken = _parameters(resolved)
        by_rank = (*_GIVEN_BY_RANK, *(("world",) if hasattr(resolved.factory, "make_world") else ()))
        given = {**{name: None for name in by_rank if name in taken}, **given}
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
            f"{resolved.described} needs {one} {' and '.join(map(repr, missing))}: give --options '{{{shown}}}'"
        )
    dataclasses.replace(resolved, options=given).check_options()


def _parameters(resolved: catalog.Resolved[Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(resolved.factory).parameters
    except (TypeError, ValueError):
        return {}
    return dict(list(parameters.items())[1:])


def _attributes(group: Group, text: str) -> dict[str, Any]:
    # Imported with pytest, so that all else of the command works without it.
    from ..testing.installed import OF_GROUP

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


def _model(group: Group, model: str) -> str:
    if model and group is not Group.POLICIES:
        raise ConfigError(f"--model is for policies; a plugin of {group.value} is tested without one of yours")
    return model


def _devices(group: Group) -> tuple[str, ...]:
    # With the command that needs it: a list of plugins does not.
    import torch

    # A layout is arithmetic.
    return ("cpu", "cuda") if torch.cuda.is_available() and group is not Group.LAYOUTS else ("cpu",)


def _tell_unusable(arguments: argparse.Namespace, plugin: dict[str, str], state: str, error: str) -> int:
    if arguments.json:
        print(json.dumps(plugin | {"state": state, "error": error, "devices": [], "rules": []}, indent=2))
    else:
        print(f"{_named(plugin)}: {state}\n{textwrap.indent(error, '  ')}")
    return 2


def _tell(arguments: argparse.Namespace, plugin: dict[str, str], run: SuiteRun) -> int:
    failed = [rule for rule in run.rules if rule.failures]
    asked = [rule for rule in run.rules if rule.asked]
    code = 1 if failed or run.ended_early else 0
    if arguments.json:
        rules = [dataclasses.asdict(rule) | {"holds": rule.holds} for rule in run.rules]
        record: dict[str, Any] = {**plugin, "state": "checked", "error": run.ended_early, "devices": run.devices}
        print(json.dumps(record | {"rules": rules}, indent=2))
        return code
    for rule in failed:
        _print_failed(rule)
    if run.ended_early:
        print(f"{run.ended_early}; rules that come later were not tried\n")
    print(f"{_named(plugin)}: {sum(rule.holds for rule in asked)} of {len(asked)} rules hold")
    return code


def _print_failed(rule: Rule) -> None:
    first = rule.failures[0]
    case = f" [{first.case}]" if first.case else ""
    print(f"does not hold on {first.device}: {rule.name.removeprefix('test_').replace('_', ' ')}{case}")
    print(textwrap.indent(first.message, "  "))
    if len(rule.failures) > 1:
        print(f"  and {len(rule.failures) - 1} more of its cases")
    print()


def _named(plugin: dict[str, str]) -> str:
    origin = f"{plugin['distribution']} {plugin['version']} " if "distribution" in plugin else ""
    return f"{origin}{plugin['name']} of {plugin['group']}"
