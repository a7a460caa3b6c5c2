"""Which installed plugins this process may import, as two variables of its environment say.

They are no settings: a configuration file comes from elsewhere more easily than the environment of a process, and must
not widen what may run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..interfaces.references import ALLOWED_PLUGINS, DISABLE_PLUGINS, SWITCHED_OFF
from .offers import BUILT_IN, Offer, normalised

_ON = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class Permission:
    """Which of other distributions' plugins may be imported; polyshard's own always may."""

    allowed: tuple[str, ...] | None
    """Distributions and ``"distribution:name"``, normalised and ordered; None where all are allowed."""
    disabled: bool
    """None are allowed, whatever else is said."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Permission:
        """What ``environ`` says; None for the process's own.

        Raises ``ConfigError`` for a text that says neither: what is not understood must not count as allowed.
        """
        environ = os.environ if environ is None else environ
        listed, switch = environ.get(ALLOWED_PLUGINS), environ.get(DISABLE_PLUGINS, "").strip().lower()
        if switch not in _ON | SWITCHED_OFF:
            raise ConfigError(
                f"environment variable {DISABLE_PLUGINS} must be 1 or 0, not {environ[DISABLE_PLUGINS]!r}."
            )
        return cls(None if listed is None else _entries(listed), switch in _ON)

    def refusal(self, offer: Offer) -> str:
        """Why the plugin may not be imported, and what to do; empty where it may."""
        if offer.built_in:
            return ""
        if self.disabled:
            return (
                f"{DISABLE_PLUGINS} is set, which leaves polyshard's own plugins alone. Unset it where "
                f"{offer.distribution or 'its package'} is trusted, or name one of polyshard's."
            )
        distribution = normalised(offer.distribution)
        if self.allowed is None or not {distribution, f"{distribution}:{offer.name}"}.isdisjoint(self.allowed):
            return ""
        return (
            f"{ALLOWED_PLUGINS} does not list it ({', '.join(self.allowed) or 'it lists none'}). Add "
            f'"{offer.distribution}" or "{offer.label}" there where it is trusted, or name another plugin.'
        )

    def rows(self) -> list[list[str]]:
        """What ranks compare: a row for each variable that says something."""
        rows = [] if self.allowed is None else [[ALLOWED_PLUGINS, *self.allowed]]
        return [*rows, [DISABLE_PLUGINS, "1"]] if self.disabled else rows


def _entries(text: str) -> tuple[str, ...]:
    found = set()
    for entry in filter(None, (each.strip() for each in text.split(","))):
        distribution, separator, name = (part.strip() for part in entry.partition(":"))
        if not distribution or (separator and not name) or ":" in name:
            raise ConfigError(
                f"environment variable {ALLOWED_PLUGINS} has {entry!r}, which is neither a distribution nor "
                f'"distribution:name". Write it as "{BUILT_IN},acme,other:name".'
            )
        # Only of distributions do case and separators not matter.
        found.add(normalised(distribution) + separator + name)
    return tuple(sorted(found))
