"""``polyshard doctor``: whether this machine is fit, and what to do where it is not."""

from __future__ import annotations

import argparse
import json
import os

from .. import doctor, registry
from ..interfaces import Group


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``commands``."""
    parser = commands.add_parser(
        "doctor",
        help="look for what keeps polyshard from working, or from working fast, on this machine",
        description="Versions, devices, links, environment variables, plugins, limits, and a short training run. The "
        "exit code is 1 where there is a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--no-trial", action="store_true", help="leave out the training run, which starts processes")
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=doctor.LIMIT_S,
        metavar="SECONDS",
        help="end the training run after so long (default: %(default)g)",
    )
    parser.set_defaults(run=_examine)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be 1 or more")
    return seconds


def _examine(arguments: argparse.Namespace) -> int:
    machine = doctor.read_machine(dict(os.environ))
    installed = [plugin for group in Group for plugin in registry.installed(group)]
    sections = [
        doctor.versions(machine),
        doctor.devices(machine),
        doctor.links(machine),
        doctor.variables(machine),
        doctor.plugins(installed),
        doctor.limits(machine),
    ]
    if not arguments.no_trial:
        trials = doctor.trials_for(machine)
        sections.append(doctor.trial_section([doctor.run_trial(each, os.environ, arguments.limit) for each in trials]))
    report = doctor.Report(tuple(sections))
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print("\n".join(report.lines()))
    return 1 if report.level is doctor.Level.PROBLEM else 0
