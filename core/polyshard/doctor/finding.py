"""What the doctor says of one thing."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
    """One observation."""

    level: Level
    about: str
    """The variable, package, device or limit."""
    what: str
    """What was found."""
    why: str = ""
    """Why it matters; empty where nothing is wrong."""
    cure: str = ""
    """What to do about it."""
    source: str = ""
    """Where the reason is written down."""


@dataclass(frozen=True, slots=True)
class Section:
    """What was looked at under one heading."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    """Names and values, for people to read and to send along."""
    findings: tuple[Finding, ...] = ()

    @property
    def level(self) -> Level:
        """The worst of its findings."""
        return worst(self.findings)


def worst(findings: tuple[Finding, ...]) -> Level:
    """The gravest level among ``findings``; ``FINE`` for none."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.FINE)
