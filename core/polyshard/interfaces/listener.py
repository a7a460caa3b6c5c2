"""What watches a step without taking part in it."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from .unit import UnitSpec


@runtime_checkable
class Observer(Protocol):
    """Told when one unit's operations begin and end, as the host issues them.

    A listener's ``make_observer`` hook returns one, or None, for each unit at wrap; the unit then loops over a tuple of
    them, which costs 34 ns when it is empty. Every call is made with the stream current on which the operation runs, so
    that an event recorded there is reached by the device when the operation begins or ends. Where operations run on
    the host, they begin and end when the call is made.

    A beginning need not be followed by an end: a step may fail. A unit may be gathered and never compute, and may
    compute several times between two gathers; under activation checkpointing, a backward holds another computation.
    A unit with other units inside computes while those do, and while it waits for them.

    Methods must not issue collectives, must not synchronize with the device, and must not raise. A class that inherits
    from this one does nothing at the moments that it leaves out.
    """

    def unshard(self, unit: UnitSpec) -> None:
        """The unit's gather is about to be issued, on the current stream.

        One that an earlier forward left gathered is gathered again, with no reshard.
        """
        return None

    def unsharded(self, unit: UnitSpec) -> None:
        """The gather was issued and ends at this point of the current stream; on the host, it has arrived."""
        return None

    def compute(self, unit: UnitSpec, backward: bool) -> None:
        """The unit's forward, or backward, starts at this point of the current stream."""
        return None

    def computed(self, unit: UnitSpec, backward: bool) -> None:
        """The unit's forward, or backward, ended at this point of the current stream."""
        return None

    def wait(self, unit: UnitSpec) -> None:
        """The stream that computes waits from this point on: for the unit's gather, or for room for its reduction."""
        return None

    def waited(self, unit: UnitSpec) -> None:
        """It waits until this point at most; where everything was there already, for no time."""
        return None

    def reduce(self, unit: UnitSpec) -> None:
        """The unit's gradient reduction is about to be issued, on the current stream."""
        return None

    def reduced(self, unit: UnitSpec) -> None:
        """The reduction's result is delivered at this point of the current stream."""
        return None

    def reshard(self, unit: UnitSpec) -> None:
        """The unit's gather buffer was released, on the stream that computes."""
        return None


class Listener:
    """Optional base of a listener plugin: hook implementations are marked with ``polyshard.hookimpl``.

    A plugin is a callable ``(context: PluginContext, **options) -> object`` in the group ``polyshard.plugins``. The
    hooks are those of ``polyshard.hookspecs``. A listener runs only where the configuration names it: installing a
    package changes no numbers.
    """

    api_version: ClassVar[int]
    """Which version of this contract a plugin was written for. Each says its own: there is none to inherit."""
