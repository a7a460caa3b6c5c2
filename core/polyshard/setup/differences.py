"""The rows of the report that ranks compare, and the words for a difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..interfaces import Collectives
from ..planning.plan import ManagedParameter
from ..planning.units import PlannedModule
from ..planning.values import VALUES, difference_text

#: Characters from which on a part is looked into, instead of being shown as it is.
_LONG = 120
#: Ranks that are named, of more.
_RANKS = 16
#: Differences that are shown; ranks that train another model differ in everything.
_SHOWN = 12
_CURE = (
    "Give every rank the same model, configuration and installed plugins. Options that must differ between ranks are "
    "named in local_options of the plugin."
)
#: Stands for what only one of two ranks has.
_NOTHING = "nothing"

#: How one thing reads on one rank, and on another.
Difference = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Reported:
    """Ranks whose reports are the same."""

    ranks: list[int]
    """Those that are known, in ascending order."""
    number: int
    """How many they are."""
    report: list[Any] | None
    """A list of rows of JSON values, each of which begins with its title; None where it could not be read."""

    @property
    def speaker(self) -> int:
        """The rank that is quoted."""
        return self.ranks[0]

    @staticmethod
    def listed(ranks: Sequence[int], number: int) -> str:
        """So many ``ranks`` in words, of which some may be unknown."""
        shown = list(ranks[:_RANKS])
        return f"{shown}" if len(shown) == number else f"{shown} ({number} in all)"


def told(reports: Sequence[Reported], unread: int = 0) -> str:
    """What to tell all ranks where they report different things.

    Args:
        reports: What was read. The report of most ranks is what the others are compared with; of equally many, that of
            the lowest rank.
        unread: How many ranks more report something else than the first of ``reports``.
    """
    usual = max(reports, key=lambda each: (each.number, -each.speaker))
    lines = [line for each in sorted(reports, key=lambda each: each.ranks) for line in _against(usual, each)]
    if unread:
        lines.append(f"{unread} ranks more report something else, which was not read.")
    return "\n".join([*lines, _CURE] if any(line.startswith("  ") for line in lines) else lines)


def _against(usual: Reported, other: Reported) -> list[str]:
    if other is usual:
        return []
    who = Reported.listed(other.ranks, other.number)
    if usual.report is None or other.report is None:
        gone = usual if usual.report is None else other
        return [f"Ranks {who} are about to shard differently; rank {gone.speaker} ended before it could say more."]
    found, values = _sorted_out(usual.report, other.report)
    lines = []
    if found:
        lines.append(f"Ranks {who} are about to shard differently:")
        for most, theirs in found[:_SHOWN]:
            lines += [f"  rank {usual.speaker}: {most}", f"  rank {other.speaker}: {theirs}"]
        if len(found) > _SHOWN:
            lines.append(f"  and {len(found) - _SHOWN} differences more")
    if values is not None:
        subject = f"Rank {other.speaker} holds" if other.number == 1 else f"Ranks {who} hold"
        lines.append(difference_text(usual.speaker, subject, *values))
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


def kind_of(collectives: Collectives) -> list[Any]:
    """What tells ranks apart that would exchange bytes by other means, or only pretend to."""
    cls = type(collectives)
    communicates = collectives.capabilities.can_communicate
    return [f"{cls.__module__}:{cls.__qualname__}", collectives.world_size, collectives.device.type, communicates]


def rows_of(plan: PlannedModule, overrides: list[Any]) -> list[list[Any]]:
    """The rows that ranks compare of a module: its settings, and for each unit dtypes, wire, parameters and layout."""
    gathers = "gathered in backward" if plan.reads_in_backward else "not gathered in backward"
    rows: list[list[Any]] = [[f"'{plan.name or '(root)'}'", overrides, str(plan.buffer_dtype), gathers]]
    for unit, group in zip(plan.units, plan.groups, strict=True):
        title = f"unit '{unit.spec.label}'"
        dtypes = [str(getattr(unit.dtypes, field.name)) for field in dataclasses.fields(unit.dtypes)]
        travels = ["bytes on the wire", unit.wire and unit.wire.nbytes_per_rank]
        rows.append([title, ["dtypes", *dtypes], travels, ["parked", unit.parked]])
        # Not in the layout's order, which the next row compares.
        title = f"{title}, by {plan.plugins.layout.label}"
        rows.append([title, *sorted(_parameter(parameter) for parameter in group)])
        places = [
            [parameter.names[0], slot.offset, "rows" if slot.by_rows else "elements"]
            for parameter, slot in zip(group, unit.layout.slots, strict=True)
        ]
        rows.append([title, ["slices", unit.layout.shard_numel], ["places", *places]])
    return rows


def _parameter(parameter: ManagedParameter) -> list[Any]:
    original = parameter.original
    trained = "trained" if original.requires_grad else "frozen"
    return [*parameter.names, list(original.shape), list(original.stride()), str(original.dtype), trained]
