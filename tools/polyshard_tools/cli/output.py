"""What commands print: tables and colour for people, one JSON document for programs."""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO


class Ink(enum.Enum):
    """A colour or weight, as ECMA-48 numbers it."""

    BOLD = 1
    RED = 31
    GREEN = 32
    YELLOW = 33


def inked(text: str, ink: Ink | None, stream: TextIO | None = None) -> str:
    """``text`` in ``ink`` where ``stream`` (default: stdout) is a terminal and ``NO_COLOR`` is not set."""
    shows = (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{ink.value}m{text}\x1b[0m" if shows and ink is not None else text


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` of text, the first of them the header, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(line if number else inked(line, Ink.BOLD))


def print_json(value: Any) -> None:
    """Print the one document that ``--json`` asks for."""
    print(json.dumps(value, indent=2))


def print_error(error: Exception, *, as_json: bool) -> None:
    """Say on stderr why the command ends; as the document on stdout, too, where ``--json`` asks for one."""
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": str(error)}})
    print(f"{inked('polyshard:', Ink.RED, sys.stderr)} {error}", file=sys.stderr)
