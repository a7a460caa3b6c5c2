"""Tables in pages: between two markers, so that a page has what a benchmark last found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


class UnusablePageError(Exception):
    """The page has no place for the tables."""


def markers(name: str) -> tuple[str, str]:
    """The lines above and below the tables of ``name``."""
    return f"<!-- begin: {name} -->", f"<!-- end: {name} -->"


def placed(page: str, tables: str, between: tuple[str, str]) -> str:
    """``page`` with ``tables`` between its markers. Raises ``UnusablePageError`` where it has not one of each."""
    begin, end = between
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise UnusablePageError(f"the page needs one line {begin} and below it one line {end}")
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n\n{tables}\n\n{end}{rest.partition(end)[2]}"


def tell(
    about: str | None,
    table: Callable[[], str],
    page: Path,
    between: tuple[str, str],
    arguments: Sequence[str] | None = None,
) -> int:
    """The command of a table that is computed, not measured: print it, and put it into ``page`` at ``--write``.

    ``about`` is what ``--help`` says. Returns the process's exit code.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the table into {page.name}")
    options = parser.parse_args(arguments)
    made = table()
    print(made)
    if options.write:
        try:
            text = placed(page.read_text(encoding="utf-8"), made, between)
        except UnusablePageError as error:
            print(f"nothing written: {page}: {error}", file=sys.stderr)
            return 2
        page.write_text(text, encoding="utf-8")
    return 0
