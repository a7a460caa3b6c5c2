"""The communications that this rank issued for one model, and reports of those that did not end.

A rank that waits on the host raises at its time limit, with the communication at which it stood. A rank that is stuck
elsewhere, in a data loader or in a lock, does not know that others wait for it, and a rank whose device waits has no
Python call that could raise. So a thread (``Watch``) looks at the recorder: once nothing was issued for almost as long
as others wait, it posts to them where the rank stands, and where the device does not proceed it writes a report.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from typing_extensions import override

from ..errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    PeerFailedError,
    StateError,
)
from ..interfaces import UnitSpec
from .peers import Peers, Posts

_LOGGER = logging.getLogger(__name__)
#: Communications that are remembered.
REMEMBERED = 1000
#: The fraction of the time limit after which a silent rank posts: those that wait read posts at its end.
_POSTS_AT = 0.9
#: The fraction of the time limit between two looks.
_LOOKS_AT = 0.02
#: The innermost calls of a posted stack.
_CALLS = 12


class Recorder:
    """Remembers the communications that a rank issued. Text is made only for errors and reports."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last: Issued | None = None
        #: The other ranks of the model; None where there is no store.
        self.peers: Peers | None = None
        #: Issues the communications.
        self.sender: Sender | None = None
        #: Posts for a rank that is stuck; None without peers.
        self.watch: Watch | None = None
        #: The communication that did not end and its error, behind which nothing is issued; None for no failure.
        self.failure: str | None = None
        #: Called when ``failure`` is set: memory of communications in flight may still be read and written.
        self.when_failed: Callable[[], None] | None = None
        self._issued: deque[Issued] = deque(maxlen=REMEMBERED)
        self._count = 0
        # Before the first communication, and behind one that failed.
        self._unready = True

    def issue(self, operation: str, units: Sequence[UnitSpec] = (), backward: bool | None = None) -> Issued:
        """Record that a communication of ``units`` begins; called before anything of it is compared or sent.

        Raises StateError: an earlier one failed.
        """
        if self._unready:
            self._get_ready(operation)
        self._count += 1
        self.last = entry = Issued(self._count, operation, units, backward, time.monotonic())
        self._issued.append(entry)
        return entry

    def _get_ready(self, operation: str) -> None:
        self.refuse_behind_failure(f"The communication '{operation}'")
        self._unready = False
        if self.watch is not None:
            # Not at the wrap: a model that is sharded module by module uses the outermost recorder alone.
            self.watch.start()

    def refuse_behind_failure(self, call: str) -> None:
        """Raise StateError if a communication of this model failed; ``call`` begins the message."""
        if self.failure is not None:
            raise StateError(
                f"{call} is refused on rank {self.rank}, because an earlier communication of this model did not end: "
                f"{self.failure}. Other ranks may still stand in it or come to it, and would take what is sent next "
                "for a part of it. Start the job again from its last checkpoint, or make new process groups on all "
                "ranks and shard the model anew over them."
            )

    def fail(self, error: CollectiveError, entry: Issued | None = None) -> None:
        """Remember ``error``, of communication ``entry``, if it leaves ranks at different places of their order.

        Timeouts and aborts do. Other errors are about the call, and leave ranks at the same place.
        """
        if self.failure is None and isinstance(error, CollectiveTimeoutError | CollectiveAbortedError):
            which = "" if entry is None else f"{entry}: "
            # Text alone: an error keeps its frames alive, and these keep tensors.
            self.failure = f"{which}{type(error).__name__}, {str(error).partition(chr(10))[0].rstrip('.')}"
            self._unready = True
            if self.when_failed is not None:
                self.when_failed()

    def post_error(self, error: BaseException) -> None:
        """Post to the other ranks that the program raised ``error`` inside of a step.

        It gets a note of what another rank raised before, if one did.
        """
        if self.peers is not None and not isinstance(error, CollectiveError):
            earlier = self.peers.post_error(error, "none" if self.last is None else str(self.last))
            if earlier is not None:
                error.add_note(earlier)

    @property
    def issued(self) -> tuple[Issued, ...]:
        """The last communications, the oldest first."""
        return tuple(self._issued)

    @contextmanager
    def during(self, operation: str, units: Sequence[UnitSpec] = (), backward: bool | None = None) -> Iterator[None]:
        """Record one communication, or several that the caller takes for one, issued and waited for inside."""
        entry = self.issue(operation, units, backward)
        try:
            yield
        except CollectiveError as error:
            self.refuse(error, entry)
        entry.ended = time.monotonic()

    def refuse(self, error: CollectiveError, entry: Issued | None) -> NoReturn:
        """Raise ``error`` anew, with ``entry`` and the last communication that was issued in its text.

        An error with a communication is raised as it is. Posts of other ranks that failed are added.

        Raises PeerFailedError: another rank's program raised an error; with its text.
        """
        self.fail(error, entry)
        if entry is None or error.located:
            raise error
        behind = "" if self.last is None or self.last is entry else f" The last that it issued is {self.last}."
        waited = f"Rank {self.rank} waited for its communication {entry}.{behind}"
        if self.peers is not None and not isinstance(error, PeerFailedError):
            posts = self.peers.post_wait(str(entry))
            report = _write_report(self.rank, error, self._issued, posts)
            if report:
                waited += f" {report}"
            raised = self.peers.raised_text(posts)
            if raised is not None:
                failed = PeerFailedError(f"{raised}\n{waited}")
                failed.located = True
                raise failed from error
            waited += "\n" + self.peers.places_text(posts)
        try:
            located = type(error)(f"{error}\n{waited}")
        except Exception:
            # A backend's own class may take other arguments than a text.
            raise error from None
        located.located = True
        raise located from error


@dataclass(eq=False, slots=True)
class Issued:
    """One communication."""

    number: int
    """Of this model on this rank, from 1 on: equal on ranks that take the same path."""
    operation: str
    units: Sequence[UnitSpec]
    backward: bool | None
    """Whether a backward issued it; None outside of steps, and of both."""
    at: float
    """``time.monotonic`` when it was begun."""
    ended: float | None = None
    """``time.monotonic`` when the wait for it ended; None where the host does not wait, or where that failed."""

    def as_table(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "operation": self.operation,
            "units": [unit.label for unit in self.units],
            "over": [unit.ranks for unit in self.units],
            "phase": self._phase,
            "at": self.at,
            "ended": self.ended,
        }

    @property
    def _phase(self) -> str | None:
        return None if self.backward is None else "backward" if self.backward else "forward"

    @override
    def __str__(self) -> str:
        names = ", ".join(f"'{unit.label}'" for unit in self.units)
        over = " and ".join(dict.fromkeys(unit.ranks for unit in self.units if unit.ranks))
        about = (f" of {names}" if names else "") + (f" over {over}" if over else "")
        return f"number {self.number}, {self.operation}{about}" + (f", in {self._phase}" if self._phase else "")


class Sender(Protocol):
    """The communication streams, as a recorder and its watch see them. Read from any thread."""

    waiting: bool
    """Whether the host waits for other ranks."""

    def busy(self) -> bool:
        """Whether the device has not finished the operations issued."""


def _write_report(rank: int, error: BaseException, issued: Iterable[Issued], posts: Posts) -> str:
    """Write a JSON report to a new file among temporary files.

    Returns a sentence with its path, or "" where writing failed: the error that is reported must be raised in any case.

    Args:
        rank: This process's among those of the model.
        error: The reported one.
        issued: The last communications, the oldest first.
        posts: Of other ranks.
    """
    try:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        report = {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "monotonic": time.monotonic(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "error": f"{type(error).__name__}: {error}",
            "others": posts,
            "operations": [each.as_table() for each in issued],
            "stacks": {
                f"{names.get(ident, 'unknown')} ({ident})": traceback.format_stack(frame)
                for ident, frame in sys._current_frames().items()
            },
        }
        # A name that nobody can foresee: a link in its place would be followed.
        descriptor, path = tempfile.mkstemp(prefix=f"polyshard-rank-{rank}-", suffix=".json")
        try:
            with os.fdopen(descriptor, "w") as stream:
                json.dump(report, stream, indent=1)
        except BaseException:
            # The disk may be full: half a report misleads.
            os.unlink(path)
            raise
    except Exception:
        return ""
    return f"Its last communications and stacks are in {path} on {socket.gethostname()!r}."


class Watch:
    """Watches one model on this rank, from its first communication until ``stop``, or until the model is gone."""

    def __init__(self, recorder: Recorder, peers: Peers, timeout_s: float) -> None:
        """``timeout_s``: how long ranks wait for each other. The calling thread is taken to train."""
        self._recorder = weakref.ref(recorder)
        self._peers = peers
        self._timeout_s = timeout_s
        self._trains = threading.get_ident()
        # The number of the communication behind which the rank was silent last.
        self._silent_behind = 0
        #: Seconds between two looks.
        self.period_s = max(0.05, timeout_s * _LOOKS_AT)

    def start(self) -> None:
        """Begin to look; called once."""
        _watched.add(self)

    def stop(self) -> None:
        """Look no more. Idempotent."""
        _watched.remove(self)

    def look(self) -> None:
        """Post if the rank is stuck behind a communication, once for each."""
        recorder = self._recorder()
        last = None if recorder is None else recorder.last
        if recorder is None or last is None or last.number == self._silent_behind:
            return
        silent_s = time.monotonic() - last.at
        if silent_s < self._timeout_s * _POSTS_AT:
            return
        self._silent_behind = last.number
        waits = recorder.sender is not None and recorder.sender.waiting
        # A rank that waits on the host raises by itself, and a post before this one is an error: both say more.
        if not (waits or self._peers.posted):
            self._post(recorder, silent_s)

    def _post(self, recorder: Recorder, silent_s: float) -> None:
        where = str(recorder.last)
        frame = sys._current_frames().get(self._trains)
        stack = "".join(traceback.format_stack(frame)[-_CALLS:]) if frame is not None else "its thread has ended\n"
        self._peers.post_silence(where, silent_s, stack)
        if recorder.sender is None or not recorder.sender.busy():
            return
        posts = self._peers.read()
        error = CollectiveTimeoutError(
            f"Rank {recorder.rank} has issued nothing for {silent_s:.1f} s, and its device is not through with "
            f"what it issued. The last is {where}."
        )
        report = _write_report(recorder.rank, error, recorder.issued, posts)
        text = self._peers.raised_text(posts) or self._peers.places_text(posts)
        _LOGGER.error("%s\n%s", error, f"{text}\n{report}" if report else text)


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


_watched = _Watched()
