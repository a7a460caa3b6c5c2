"""An end that was asked for: all ranks leave behind the same step, although one alone may have been told."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, ClassVar

from torch import nn

from .engine.step.root import Root
from .errors import ConfigError, StateError
from .state.exchange import speaks
from .state.resting import resting_root
from .state.rounds import Round, summing

#: Seconds within which signals are one request.
_SAME_S = 1.0


class Preemption:
    """Notes signals that ask for an end, and lets all ranks agree behind which step they leave::

        with polyshard.Preemption(model) as preemption:
            for step in range(first, last):
                train(step)
                if preemption.requested():
                    polyshard.checkpoint.save(root, step + 1, model, optimizer)
                    sys.exit(preemption.exit_code)

    [Note: agreement without waiting]
    What ranks know is summed up by a collective that is issued at one call of ``requested`` and read at the next one,
    when it has long ended: the host does not wait for it, and all ranks read the same at the same call. A signal is
    thus followed at the call behind the next exchange, at most ``every + 1`` calls after it came.

    A second signal ends the process at once, as it would have without. Within a second it counts as the first:
    schedulers signal every process, and launchers pass on what they got themselves.
    """

    exit_code: ClassVar[int] = 75
    """What a program should exit with that was ended so and can be taken up: ``EX_TEMPFAIL`` of ``sysexits.h``."""

    def __init__(self, model: nn.Module, signals: Iterable[signal.Signals] = (signal.SIGTERM,), *, every: int = 1):
        """Raises ``ConfigError`` for ``every`` below 1.

        Args:
            model: The outermost sharded module.
            signals: What asks for an end. With none, ``request`` alone does.
            every: At every how many calls of ``requested`` ranks exchange what they know.
        """
        if every < 1:
            raise ConfigError(f"every must be a number of calls, 1 or more, not {every!r}.")
        self._model = model
        self._signals = tuple(signals)
        self._every = every
        self._former: dict[signal.Signals, Any] = {}
        self._entered = False
        self._noted = False
        # When the first signal came.
        self._told_at: float | None = None
        self._agreed = False
        self._calls = 0
        self._round: Round | None = None
        self._root: Root | None = None

    def __enter__(self) -> Preemption:
        """Raises ``StateError`` outside of the main thread, where signals cannot be taken, and inside of itself."""
        if self._entered:
            raise StateError("A Preemption was entered twice. Enter it once, around the loop of training.")
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise StateError(
                "A Preemption was entered outside of the main thread, where Python takes no signals. Enter it in the "
                "main thread, or give signals=() and call request()."
            )
        self._root = resting_root(self._model, "Preemption")
        try:
            for each in self._signals:
                self._former[each] = signal.signal(each, self._note)
        except BaseException:
            # One of them cannot be taken, as SIGKILL: nobody would put back the others.
            self._put_back()
            raise
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()
        self._entered = False
        pending, self._round = self._round, None
        if pending is not None and kind is None:
            # Communicators may be closed next. Behind an exception another rank may never come to it; what is on its
            # way then keeps its memory by itself.
            pending.read()

    def request(self) -> None:
        """Ask for an end, as a signal does: where a program knows its time limit, for example. One rank is enough."""
        self._noted = True

    def requested(self) -> bool:
        """Whether to save and leave. Every rank calls it once a step, between steps; all get the same answer.

        Raises:
            StateError: outside of the ``with``.
            RankMismatchError: another rank does something else, where the collectives compare that.
            CollectiveError: another rank did not come.
        """
        root = self._root
        if not self._entered or root is None:
            raise StateError("requested() was called outside of 'with polyshard.Preemption(model)'.")
        if not speaks(root.collectives):
            return self._noted
        if self._agreed:
            return True
        self._calls += 1
        pending, self._round = self._round, None
        exchanges = self._calls % self._every == 0
        if pending is not None or exchanges:
            with root.meeting("exchange of requests to end", (root.collectives,)):
                if pending is not None:
                    self._agreed = pending.read()[0] > 0
                if exchanges and not self._agreed:
                    self._round = summing(root.collectives, float(self._noted))
        return self._agreed

    def _put_back(self) -> None:
        for each, former in self._former.items():
            # None: a handler that was not installed from Python, and cannot be put back from there.
            signal.signal(each, signal.SIG_DFL if former is None else former)
        self._former.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._told_at is None:
            self._told_at = now
        elif now - self._told_at > _SAME_S:
            former = self._former.get(signal.Signals(number))
            signal.signal(number, signal.SIG_DFL if former is None else former)
            os.kill(os.getpid(), number)
        self._noted = True
