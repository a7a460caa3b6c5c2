"""Puts the commands together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import PolyshardError
from . import bench_links, config, plan, plugins

#: Each has ``add``, whose parser's ``run`` takes the parsed arguments and returns the exit code.
_COMMANDS = (plugins, config, plan, bench_links)


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
    except PolyshardError as error:
        print(f"polyshard: {error}", file=sys.stderr)
        return 2
    return code
