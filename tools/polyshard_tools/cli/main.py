"""The command ``polyshard``, and those of its commands that other packages do the work of: doctor, trace and new."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from polyshard.errors import PolyshardError

from .output import Ink, inked, print_error, print_json
from .parser import command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own arguments).

    Returns the exit code: 0; 2 where a configuration, a file or a plugin that it names is wrong; others are the
    command's own. Ends the process with 2 for arguments that there are not.
    """
    parser = command_line()
    # Of a shell that wants to complete a word; this then ends the process.
    if "_ARGCOMPLETE" in os.environ:
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        code = _command(arguments.command)(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has enough, ``head`` for one. The interpreter would flush the rest at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (PolyshardError, OSError) as error:
        # Of the system: a file that is not there, or may not be read or written. It names the file.
        print_error(error, as_json=getattr(arguments, "json", False))
        return 2
    return code


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """The function of a command. What it needs is imported with it: of most, torch."""
    match name:
        case "plugins":
            from .plugins import list_or_check as command
        case "config":
            from .explain import show_config as command
        case "explain":
            from .explain import explain_model as command
        case "plan":
            from .plan import plan_step as command
        case "bench-links":
            from .plan import bench_links as command
        case _:
            command = {"doctor": _doctor, "trace": _trace, "new": _new}[name]
    return command


def _doctor(arguments: argparse.Namespace) -> int:
    from polyshard import registry
    from polyshard.interfaces import Group

    from ..doctor import checks, trial
    from ..doctor.machine import read_machine
    from ..doctor.report import Level, Report

    here = read_machine(dict(os.environ))
    installed = [plugin for group in Group for plugin in registry.installed(group)]
    sections = [
        checks.versions(here),
        checks.devices(here),
        checks.links(here),
        checks.variables(here),
        checks.plugins(installed),
        checks.limits(here),
    ]
    if not arguments.no_trial:
        trials = trial.trials_for(here)
        sections.append(trial.trial_section([trial.run_trial(each, os.environ, arguments.limit) for each in trials]))
    report = Report(tuple(sections))
    if arguments.json:
        print_json(report.as_json())
    else:
        inks = {Level.PROBLEM: Ink.RED, Level.HINT: Ink.YELLOW, Level.FINE: Ink.GREEN}
        print("\n".join(report.lines(lambda level: inked(level.value, inks[level]))))
    return 1 if report.level is Level.PROBLEM else 0


def _trace(arguments: argparse.Namespace) -> int:
    from polyshard_plugins.trace_kernels import kernel_table, read_kernels

    found = kernel_table(read_kernels(arguments.file))
    if arguments.json:
        ms = {kind.value: round(time, 3) for kind, time in found.ms.items()}
        print_json({"ms": ms, "kernels": {kind.value: number for kind, number in found.launches.items()}})
    else:
        print("\n".join(found.lines()))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from ..scaffold import Kind, Ownership, write_plugin

    ownership = Ownership(arguments.author, arguments.license)
    written = write_plugin(Kind(arguments.kind), arguments.name, arguments.into, ownership)
    if arguments.json:
        print_json(written.as_json())
        return 0
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
    if written.missing:
        print(f"Before it is published, it needs: {', '.join(written.missing)}")
    return 0
