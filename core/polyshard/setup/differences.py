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
from ..planning.values import VALUES, difference_text, dimension_names

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
    """In ascending order."""
    report: list[Any] | None
    """Rows of JSON values, each beginning with its title; None where it could not be read."""

    @property
    def speaker(self) -> int:
        return self.ranks[0]


def listed(ranks: Sequence[int], number: int) -> str:
    """``ranks`` in words; ``number``: how many there are, unknown ones too."""
    shown = list(ranks[:_RANKS])
    return f"{shown}" if len(shown) == number else f"{shown} ({number} in all)"


def message_of(reports: Sequence[Reported], unread: int = 0, scope: str = "") -> str:
    """The error of all ranks where they report different things.

    ``reports``: what was read. The report of most ranks is what the others are compared with; of equally many, that of
    the lowest rank. ``unread``: how many ranks more report something else than the first of ``reports``. ``scope``:
    what the ranks have in common that ought to report the same; empty for all ranks.
    """
    usual = max(reports, key=lambda each: (len(each.ranks), -each.speaker))
    lines = [line for each in sorted(reports, key=lambda each: each.ranks) for line in _against(usual, each, scope)]
    if unread:
        lines.append(f"{unread} ranks more report something else, which was not read.")
    return "\n".join([*lines, _CURE] if any(line.startswith("  ") for line in lines) else lines)


def _against(usual: Reported, other: Reported, scope: str) -> list[str]:
    if other is usual:
        return []
    who = listed(other.ranks, len(other.ranks))
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
        subject = f"Rank {other.speaker} holds" if len(other.ranks) == 1 else f"Ranks {who} hold"
        lines.append(difference_text(usual.speaker, subject, *values, scope))
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
    if not (isinstance(here, list) and isinstance(there, list) and here and there and here[0] == there[0]):
        return [(_shown(here), _shown(there))]
    title = here[0] if isinstance(here[0], str) else repr(here[0])
    if len(here) > 1 and isinstance(here[1], dict):
        if here[1] != there[1]:
            # The options of another plugin are no difference of this one.
            return [(_plugin(here), _plugin(there))]
        title = _plugin(here)
    elif max(len(repr(here)), len(repr(there))) <= _LONG:
        return [(repr(here), repr(there))]
    found: list[Difference] = []
    for ours, other in zip_longest(here[1:], there[1:]):
        if ours != other:
            found += [(f"{title}: {a}", f"{title}: {b}") for a, b in _inside(ours, other)]
    return found


def _plugin(row: list[Any]) -> str:
    plugin = row[1]
    return f"plugin {plugin['name']!r} of {row[0]} ({plugin['is']}, from {plugin['from']})"


def _shown(value: Any) -> str:
    text = _NOTHING if value is None else repr(value)
    return text if len(text) <= 2 * _LONG else f"{text[: 2 * _LONG]}..."


def kind_of(collectives: Collectives) -> list[Any]:
    """Differs between ranks that would exchange bytes by other means, or only pretend to."""
    cls = type(collectives)
    communicates = collectives.capabilities.can_communicate
    return [f"{cls.__module__}:{cls.__qualname__}", collectives.world_size, collectives.device.type, communicates]


def rows_of(plan: PlannedModule, overrides: list[Any]) -> list[list[Any]]:
    """The rows that ranks compare of a module: its settings, and for each unit dtypes, encoding, parameters and layout.

    All of it is the same on ranks with different parts of the parameters: where these are uneven, what depends on a
    rank's own part is left out. It follows from the rest.
    """
    gathers = "gathered in backward" if plan.reads_in_backward else "not gathered in backward"
    rows: list[list[Any]] = [[f"'{plan.name or '(root)'}'", overrides, str(plan.buffer_dtype), gathers]]
    if plan.ranks.lists.label or plan.ranks.divisor is not None:
        rows[0].append(["over", plan.ranks.lists.label, "gradients divided by", plan.ranks.divisor])
    for unit in plan.units:
        group = unit.parameters
        title = f"unit '{unit.spec.label}'"
        even = all(parameter.part is None or parameter.part.is_even for parameter in group)
        dtypes = [str(getattr(unit.dtypes, field.name)) for field in dataclasses.fields(unit.dtypes)]
        travels = [
            "bytes of a gather",
            unit.encoding and (unit.encoding.nbytes_per_rank if even else "of uneven parts"),
        ]
        rows.append([title, ["dtypes", *dtypes], travels, ["offloaded", unit.offloaded]])
        if unit.ranks is not plan.ranks:
            rows[-1].append(["over", unit.ranks.lists.label])
        if unit.forms:
            rows[-1].append(["lanes", *(nbytes for form in unit.forms for nbytes in form.lanes)])
        rows.append([title, *sorted(_parameter(parameter) for parameter in group)])
        if even:
            places = [
                [parameter.names[0], slot.offset] for parameter, slot in zip(group, unit.layout.slots, strict=True)
            ]
            rows.append([title, ["slices", *unit.layout.slices], ["places", *places]])
    return rows


def _parameter(parameter: ManagedParameter) -> list[Any]:
    original, part = parameter.original, parameter.part
    trained = "trained" if original.requires_grad else "frozen"
    if parameter.dim:
        trained += f", cut along dimension {parameter.dim}"
    if part is None:
        row = [*parameter.names, list(original.shape), list(original.stride()), str(original.dtype), trained]
        if parameter.packed is not None:
            beside = [[list(each.shape), str(each.dtype)] for each in parameter.packed.tensors]
            row += [parameter.packed.cls.__qualname__, beside]
        return row
    mesh = list(map(list, zip(dimension_names(part.mesh), part.mesh.mesh.shape, strict=True)))
    placed = ["placed", *map(str, part.placements), "on", *mesh]
    return [*parameter.names, list(part.shape), list(part.stride), str(original.dtype), trained, placed]
