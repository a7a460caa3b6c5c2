"""Logs a line for each step: how many units were gathered and reduced in it."""

from __future__ import annotations

import logging

from polyshard import hookimpl
from polyshard.errors import ConfigError
from polyshard.interfaces import Listener, Observer, PluginContext, UnitEvent, UnitOperation, UnitSpec

_LOGGER = logging.getLogger(__name__)


class Tally(Listener):
    """Every rank counts; rank 0 logs every ``every``-th step, at level INFO."""

    api_version = 1

    def __init__(self, context: PluginContext, every: int = 1) -> None:
        if every < 1:
            raise ConfigError(f"every of listener {context.name!r} must be 1 or more, not {every}")
        self._every = every
        self._speaks = context.rank in (0, None)  # None in a test that gave none
        self._step = self._gathers = self._reductions = 0

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer:
        return self._count  # one for all units; a function for each could keep figures apart

    @hookimpl
    def step_begin(self) -> None:
        self._gathers = self._reductions = 0

    @hookimpl
    def step_end(self) -> None:
        self._step += 1
        if self._speaks and self._step % self._every == 0:
            _LOGGER.info("step %d: %d gathers, %d reductions", self._step, self._gathers, self._reductions)

    def _count(self, event: UnitEvent) -> None:
        self._gathers += event.begins and event.operation is UnitOperation.GATHER
        self._reductions += event.begins and event.operation is UnitOperation.REDUCE
