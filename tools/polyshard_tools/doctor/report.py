"""Findings, sections of them, and the report, for people and as JSON."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any


class Level(enum.Enum):
    """How much a finding matters."""

    FINE = "fine"
    """Checked, and nothing to do."""
    HINT = "hint"
    """Works, but costs something, or costs it elsewhere than on this machine."""
    PROBLEM = "problem"
    """Does not work, or keeps communication and compute from running side by side."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    about: str
    """The variable, package, device or limit."""
    what: str
    """The observation."""
    why: str = ""
    """Why it matters; empty where nothing is wrong."""
    cure: str = ""
    """The remedy."""
    source: str = ""
    """Where the reason is written down."""


@dataclass(frozen=True, slots=True)
class Section:
    """Facts and findings under one heading."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    """Names and values, for people to read and to send along."""
    findings: tuple[Finding, ...] = ()

    @property
    def level(self) -> Level:
        return worst(self.findings)


def worst(findings: tuple[Finding, ...]) -> Level:
    """The gravest level among ``findings``; ``FINE`` for none."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.FINE)


_WIDTH = 26


@dataclass(frozen=True, slots=True)
class Report:
    sections: tuple[Section, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for section in self.sections for finding in section.findings)

    @property
    def level(self) -> Level:
        return worst(self.findings)

    def as_json(self) -> dict[str, Any]:
        """Values of JSON: the level, and each section's facts and findings."""
        return {
            "level": self.level.value,
            "sections": [
                {
                    "title": section.title,
                    "level": section.level.value,
                    "facts": dict(section.facts),
                    "findings": [asdict(finding) | {"level": finding.level.value} for finding in section.findings],
                }
                for section in self.sections
            ],
        }

    def lines(self, shown: Callable[[Level], str] = lambda level: level.value) -> Iterator[str]:
        """For people: facts, findings under them, and a last line that sums up. ``shown``: how a level is printed."""
        for section in self.sections:
            yield section.title
            for name, value in section.facts:
                yield f"  {name:{_WIDTH}}  {value}"
            for finding in section.findings:
                yield from _lines(finding, shown(finding.level))
            yield ""
        counts = {level: sum(finding.level is level for finding in self.findings) for level in Level}
        problems, hints = counts[Level.PROBLEM], counts[Level.HINT]
        yield f"{problems} problem{'s' * (problems != 1)}, {hints} hint{'s' * (hints != 1)}"


def _lines(finding: Finding, level: str) -> Iterator[str]:
    yield f"  {level}: {finding.about} {finding.what}"
    why = finding.why + (f" ({finding.source})" if finding.source else "")
    for label, text in (("why", why), ("do", finding.cure)):
        first, *others = text.splitlines() or [""]
        if first:
            yield f"    {label + ':':5}{first}"
        yield from (f"         {line}" for line in others)
