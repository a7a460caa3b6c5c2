"""Puts the commands together."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import PolyshardError
from . import bench_links, config, doctor, explain, new, plan, plugins

#: Each has ``add``, whose parser's ``run`` takes the parsed arguments and returns the exit code.
_COMMANDS = (plugins, config, explain, plan, bench_links, doctor, new)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own arguments).

    Returns the exit code: 0; 2 where a configuration or a plugin that it names is wrong; others are the command's own.
    """
    parser = argparse.ArgumentParser(
        prog="polyshard", description="What is installed, what a configuration means, and what it would cost."
    )
    parser.add_argument("--version", action="version", version=f"polyshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add(commands)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has enough, ``head`` for one. The interpreter would flush the rest at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except PolyshardError as error:
        print(f"polyshard: {error}", file=sys.stderr)
        return 2
    return code
