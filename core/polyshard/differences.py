"""In what the reports of ranks differ, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from .engine.planning.values import VALUES, refusal

#: Characters from which on a part is looked into, instead of being shown as it is.
_LONG = 120
#: Differences that are shown; ranks that train another model differ in everything.
_SHOWN = 12
_CURE = (
    "Give every rank the same model, configuration and installed plugins. Options that must differ between ranks are "
    "named in local_options of the plugin."
)
#: Stands for what only one of two ranks has.
_NOTHING = "nothing"

#: How one thing reads here, and there.
Difference = tuple[str, str]


def told(reports: Sequence[Sequence[Any]], mine: Sequence[Any], rank: int) -> str | None:
    """What to tell ``rank``, which reported ``mine``, about the ranks that reported something else; None for none.

    A report is a list of rows of JSON values, each of which begins with its title.
    """
    others: dict[str, list[int]] = {}
    for other, theirs in enumerate(reports):
        if theirs != mine:
            others.setdefault(repr(theirs), []).append(other)
    if not others:
        return None
    lines = [line for ranks in others.values() for line in _against(mine, reports[ranks[0]], rank, ranks)]
    return "\n".join([*lines, _CURE] if any(line.startswith("  ") for line in lines) else lines)


def _against(mine: Sequence[Any], theirs: Sequence[Any], rank: int, others: Sequence[int]) -> list[str]:
    found, values = _sorted_out(mine, theirs)
    lines = []
    if found:
        lines.append(f"Ranks {list(others)} are about to shard differently:")
        for here, there in found[:_SHOWN]:
            lines += [f"  here: {here}", f"  rank {others[0]}: {there}"]
        if len(found) > _SHOWN:
            lines.append(f"  and {len(found) - _SHOWN} differences more")
    if values is not None:
        lines.append(refusal(rank, others, *values))
    return lines


def _sorted_out(mine: Sequence[Any], theirs: Sequence[Any]) -> tuple[list[Difference], tuple[Any, Any] | None]:
    """All differences but those of parameters' values, and the first of these where both ranks have the parameter."""
    ours, others = _by_title(mine), _by_title(theirs)
    found: list[Difference] = []
    values = None
    for title in dict.fromkeys([*ours, *others]):
        here, there = ours.get(title), others.get(title)
        if here == there:
            continue
        if title[0] == VALUES:
            # A parameter that one rank lacks shows in its unit.
            values = values or ((here, there) if here and there else None)
            continue
        found += _inside(here, there)
    return found, values


def _by_title(rows: Sequence[Any]) -> Mapping[tuple[Any, ...], Any]:
    """``rows`` by title, and by number where several share one: ranks may have different numbers of rows."""
    found: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        title = (VALUES, row[1]) if row[0] == VALUES else (str(row[0]),)
        number = 0
        while (*title, number) in found:
            number += 1
        found[(*title, number)] = row
    return found


def _inside(here: Any, there: Any) -> list[Difference]:
    """The differences between two values; of long lists that begin alike, those between their parts."""
    if not _comparable(here, there):
        return [(_shown(here), _shown(there))]
    title, of_plugins = here[0] if isinstance(here[0], str) else repr(here[0]), _tells_a_plugin(here)
    if of_plugins:
        if here[1] != there[1]:
            # The options of another plugin tell nothing.
            return [(_plugin(here), _plugin(there))]
        title = _plugin(here)
    elif max(len(repr(here)), len(repr(there))) <= _LONG:
        return [(repr(here), repr(there))]
    found: list[Difference] = []
    for ours, other in zip_longest(here[1:], there[1:]):
        if ours != other:
            found += [(f"{title}: {a}", f"{title}: {b}") for a, b in _inside(ours, other)]
    return found


def _comparable(here: Any, there: Any) -> bool:
    lists = isinstance(here, list) and isinstance(there, list)
    return lists and bool(here) and bool(there) and here[0] == there[0]


def _tells_a_plugin(row: list[Any]) -> bool:
    return len(row) > 1 and isinstance(row[1], dict)


def _plugin(row: list[Any]) -> str:
    told = row[1]
    return f"plugin {told['name']!r} of {row[0]} ({told['is']}, from {told['from']})"


def _shown(value: Any) -> str:
    text = _NOTHING if value is None else repr(value)
    return text if len(text) <= 2 * _LONG else f"{text[: 2 * _LONG]}..."
