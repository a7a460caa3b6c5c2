"""A thread that speaks for a rank which is stuck: in Python between communications, or on its device.

A rank that waits on the host raises at its time limit, and tells what it knows. One that sits elsewhere, in a data
loader or in a lock, does not even know that it is waited for, and one whose device waits has no Python that could
raise. So once nothing was issued for almost as long as others wait, this thread tells them where the rank stands, and
where the device does not get on leaves a report.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
import traceback
import weakref

from ...errors import CollectiveTimeoutError
from .failure_report import write_report
from .peers import Peers
from .recorder import Recorder

_LOGGER = logging.getLogger(__name__)

#: Of the time limit, after which a rank speaks: those that wait ask at its end.
_SPEAKS_AT = 0.9
#: Of the time limit, between two looks.
_LOOKS_AT = 0.02
#: The innermost calls of a stack that others are told.
_CALLS = 12


class Watch:
    """Watches one model on this rank, from its first communication until ``stop``, or until the model is gone."""

    def __init__(self, recorder: Recorder, peers: Peers, timeout_s: float) -> None:
        """``timeout_s``: how long ranks wait for each other. The calling thread is taken to train."""
        self._recorder = weakref.ref(recorder)
        self._peers = peers
        self._timeout_s = timeout_s
        self._trains = threading.get_ident()
        self._told = 0
        #: Seconds between two looks.
        self.period_s = max(0.05, timeout_s * _LOOKS_AT)

    def start(self) -> None:
        """To be called once."""
        _watched.add(self)

    def stop(self) -> None:
        """Look no more. Idempotent."""
        _watched.remove(self)

    def look(self) -> None:
        """Speak if the rank is stuck, and did not speak of that yet."""
        recorder = self._recorder()
        last = None if recorder is None else recorder.last
        if recorder is None or last is None or last.number == self._told:
            return
        silent_s = time.monotonic() - last.at
        if silent_s < self._timeout_s * _SPEAKS_AT:
            return
        self._told = last.number
        waits = recorder.sender is not None and recorder.sender.waiting
        # One that waits on the host raises by itself, and what was told before is an error: both know more.
        if not (waits or self._peers.spoke):
            self._speak(recorder, silent_s)

    def _speak(self, recorder: Recorder, silent_s: float) -> None:
        where = str(recorder.last)
        frame = sys._current_frames().get(self._trains)
        stack = "".join(traceback.format_stack(frame)[-_CALLS:]) if frame is not None else "its thread has ended\n"
        self._peers.tell_silence(where, silent_s, stack)
        if recorder.sender is None or not recorder.sender.busy():
            return
        heard = self._peers.hear_others()
        error = CollectiveTimeoutError(
            f"Rank {recorder.rank} has issued nothing for {silent_s:.1f} s, and its device is not through with "
            f"what it issued. The last is {where}."
        )
        report = write_report(recorder.rank, error, [each.as_table() for each in recorder.issued], heard)
        said = self._peers.raised(heard) or self._peers.places(heard)
        if report is not None:
            said += f"\nIts last communications and stacks are in {report} on {socket.gethostname()!r}."
        _LOGGER.error("%s\n%s", error, said)


class _Watched:
    """The models of this process that are watched, and the thread that looks at them: one for all, since threads of
    models that wait for the garbage collector would add up.
    """

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        with self._more:
            self._watches.add(watch)
            # A forked process has the object, and not the thread.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look_on, name="polyshard watch", daemon=True)
                self._thread.start()
            self._more.notify()

    def remove(self, watch: Watch) -> None:
        with self._more:
            self._watches.discard(watch)

    def _look_on(self) -> None:
        while True:
            with self._more:
                self._more.wait(min((watch.period_s for watch in self._watches), default=None))
            self._look()

    def _look(self) -> None:
        # In a frame of its own: models are not kept alive while the thread waits.
        with self._more:
            watches = list(self._watches)
        for watch in watches:
            watch.look()


# Of the process, as threads are.
_watched = _Watched()
