"""What watches a step without taking part in it."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from .context import UnitSpec


@runtime_checkable
class Observer(Protocol):
    """Told what one unit does, as the host issues it.

    A listener's ``make_observer`` hook returns one, or None, for each unit at wrap; the unit then loops over a tuple of
    them, which costs 34 ns when it is empty. Methods must not issue collectives, must not synchronize with the device,
    and must not raise.
    """

    def unshard(self, unit: UnitSpec) -> None:
        """The unit's gather was issued; one left gathered by an earlier forward is gathered again, with no reshard."""

    def compute(self, unit: UnitSpec, backward: bool) -> None:
        """The unit's forward, or backward, is about to start."""

    def reshard(self, unit: UnitSpec) -> None:
        """The unit's gather buffer was released."""

    def reduce(self, unit: UnitSpec) -> None:
        """The unit's gradient reduction was issued."""


class Listener:
    """Optional base of a listener plugin: hook implementations are marked with ``polyshard.hookimpl``.

    A plugin is a callable ``(context: PluginContext, **options) -> object`` in the group ``polyshard.plugins``. The
    hooks are those of ``polyshard.hookspecs``. A listener runs only where the configuration names it: installing a
    package changes no numbers.
    """

    api_version: ClassVar[int] = 1
