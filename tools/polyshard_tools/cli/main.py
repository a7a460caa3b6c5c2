"""The command ``polyshard``, and those of its commands that other packages do the work of: doctor, trace and new."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from polyshard import registry
from polyshard._version import __version__
from polyshard.config import did_you_mean
from polyshard.errors import PolyshardError
from polyshard.interfaces import Group

from .. import doctor
from ..scaffold import Kind, write_plugin
from .explain import add_config, add_explain
from .plan import add_bench_links, add_plan
from .plugins import add_plugins
from .shared import Commands

_NEW = """\
Write a small plugin that works, its test and its entry point, for you to change. A FOLDER that is not there becomes a
package of that name; a package that is there gets one plugin more. Without --into, the package that you are in does, if
it has plugins of polyshard; otherwise a new folder polyshard-NAME is made."""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the usage: that has dozens of lines, and scrolls the error away."""

    def error(self, message: str) -> NoReturn:
        stop = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message.removesuffix('.')}{stop} See {self.prog} --help.\n")


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End for arguments that the command of ``parser`` does not have."""
    near = did_you_mean(unknown[0].partition("=")[0], parser._option_string_actions)
    parser.error(f"unrecognized arguments: {' '.join(unknown)}.{near}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own arguments).

    Returns the exit code: 0; 2 where a configuration, a file or a plugin that it names is wrong; others are the
    command's own. Ends the process with 2 for arguments that there are not.
    """
    parser: argparse.ArgumentParser = _Parser(
        prog="polyshard", description="What is installed, what a configuration means, and what it would cost."
    )
    parser.add_argument("--version", action="version", version=f"polyshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_plugins, add_config, add_explain, add_plan, add_bench_links, _add_doctor, _add_trace, _add_new):
        add(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(commands.choices[arguments.command], unknown)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has enough, ``head`` for one. The interpreter would flush the rest at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (PolyshardError, OSError) as error:
        # Of the system: a file that is not there, or may not be read or written. It names the file.
        print(f"polyshard: {error}", file=sys.stderr)
        return 2
    return code


def _add_doctor(commands: Commands) -> None:
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
    parser.set_defaults(run=_doctor)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 1 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of 1 or more, not {text!r}")


def _doctor(arguments: argparse.Namespace) -> int:
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
    print(json.dumps(report.as_json(), indent=2) if arguments.json else "\n".join(report.lines()))
    return 1 if report.level is doctor.Level.PROBLEM else 0


def _add_trace(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="say what a device's time in a profiled step goes to, and what to change first",
        description="Reads a file of torch.profiler's export_chrome_trace(), of one step with ProfilerActivity.CUDA, "
        "and prints the time of its kernels by what they compute. Times add up: where several kernels run, the first "
        "kind counts.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the trace, .json or .json.gz")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=_trace)


def _trace(arguments: argparse.Namespace) -> int:
    # Here, since other commands need no plugin's package.
    from polyshard_plugins.trace_kernels import kernel_table, read_kernels

    found = kernel_table(read_kernels(arguments.file))
    if arguments.json:
        ms = {kind.value: round(time, 3) for kind, time in found.ms.items()}
        print(json.dumps({"ms": ms, "kernels": {kind.value: number for kind, number in found.launches.items()}}))
    else:
        print("\n".join(found.lines()))
    return 0


def _add_new(commands: Commands) -> None:
    parser = commands.add_parser(
        "new",
        help="write a package with a plugin of your own",
        description=_NEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = [kind.value for kind in Kind]
    parser.add_argument("kind", metavar="KIND", choices=kinds, help=f"what the plugin is for: {', '.join(kinds)}")
    parser.add_argument("name", metavar="NAME", help="what a configuration calls it: lower-case words and underscores")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="the package's folder")
    parser.set_defaults(run=_new)


def _new(arguments: argparse.Namespace) -> int:
    written = write_plugin(Kind(arguments.kind), arguments.name, arguments.into)
    for path in written.added:
        print(f"wrote    {written.folder / path}")
    for path in written.changed:
        print(f"changed  {written.folder / path}")
    # pip takes a folder for one only where it looks like a path.
    bare = written.folder.parts[:1] in ((), ("..",), ("/",))
    where = written.folder.as_posix() if bare else f"./{written.folder.as_posix()}"
    print(f"\nNext:\n  pip install --editable '{where}[test]'")
    print(f"  python -m pytest {where}")
    print(f"  polyshard plugins check {written.distribution}:{written.name}")
    print(f"\nA configuration picks it by: {written.kind.setting(written.name)}")
    return 0
