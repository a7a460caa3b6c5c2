"""The file in which a rank that waited in vain leaves what it knows."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from ..errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    PeerFailedError,
    StateError,
)
from .peers import Peers


def write_report(rank: int, error: BaseException, operations: Sequence[Mapping[str, Any]], others: Any) -> str | None:
    """Write JSON to a new file in the folder for temporary files; returns its path, None where that cannot be done.

    Args:
        rank: Of this process among those of the model.
        error: On its way to the program.
        operations: The last communications, the oldest first.
        others: What other ranks said of themselves.
    """
    try:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        told = {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "monotonic": time.monotonic(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "error": f"{type(error).__name__}: {error}",
            "others": others,
            "operations": operations,
            "stacks": {
                f"{names.get(ident, 'unknown')} ({ident})": traceback.format_stack(frame)
                for ident, frame in sys._current_frames().items()
            },
        }
        # A name that nobody can foresee: a link in its place would be followed.
        descriptor, path = tempfile.mkstemp(prefix=f"polyshard-rank-{rank}-", suffix=".json")
        try:
            with os.fdopen(descriptor, "w") as stream:
                json.dump(told, stream, indent=1)
        except BaseException:
            # Of a full disk, say: half a report misleads.
            os.unlink(path)
            raise
    except Exception:
        # The error that is reported must come through whatever happens here.
        return None
    return path


# The last communications that this rank issued for one model, and errors that say at which of them it stood.


#: Communications that are remembered.
REMEMBERED = 1000


class Named(Protocol):
    """What a recorder needs of a unit's spec; asked when something is told."""

    @property
    def label(self) -> str:
        """The unit's name in messages."""


class Sender(Protocol):
    """What a recorder, and who watches it, needs of communication streams. Asked from any thread."""

    waiting: bool
    """Whether the host waits for other ranks."""

    def busy(self) -> bool:
        """Whether a device has still to run what was issued."""


class Watching(Protocol):
    """What looks at a recorder from another thread."""

    def start(self) -> None:
        """The first communication is about to be issued."""

    def stop(self) -> None:
        """There will be no more."""


@dataclass(eq=False, slots=True)
class Issued:
    """One communication."""

    number: int
    """Of those of this model on this rank, from 1 on: equal on ranks that go the same way."""
    operation: str
    units: Sequence[Named]
    backward: bool | None
    """Whether a backward issued it; None outside of steps, and of both."""
    at: float
    """``time.monotonic`` when it was begun."""
    ended: float | None = None
    """``time.monotonic`` when the wait for it ended; None where the host does not wait, or where that failed."""

    def as_table(self) -> dict[str, Any]:
        """For a report."""
        return {
            "number": self.number,
            "operation": self.operation,
            "units": [unit.label for unit in self.units],
            "phase": self._phase,
            "at": self.at,
            "ended": self.ended,
        }

    @property
    def _phase(self) -> str | None:
        return None if self.backward is None else "backward" if self.backward else "forward"

    def __str__(self) -> str:
        names = ", ".join(f"'{unit.label}'" for unit in self.units)
        about = f" of {names}" if names else ""
        return f"number {self.number}, {self.operation}{about}" + (f", in {self._phase}" if self._phase else "")


class Recorder:
    """Remembers what a rank issued. Text is made where it is told alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last: Issued | None = None
        #: Those that share the model, where they can be asked.
        self.peers: Peers | None = None
        #: What issues for the model.
        self.sender: Sender | None = None
        #: Speaks for a rank that is stuck; None where nobody could be told.
        self.watch: Watching | None = None
        #: What did not end, and why nothing is issued any more; None where all went well.
        self.failure: str | None = None
        #: Called when ``failure`` is set: what is on its way may still be read and written.
        self.when_failed: Callable[[], None] | None = None
        self._issued: deque[Issued] = deque(maxlen=REMEMBERED)
        self._count = 0
        # Before the first communication, and behind one that failed.
        self._unready = True

    def issue(self, operation: str, units: Sequence[Named] = (), backward: bool | None = None) -> Issued:
        """A communication of ``units`` begins; to be called before anything of it is compared or sent.

        Raises:
            StateError: an earlier one failed.
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
            # Not at the wrap: of a model that is sharded module by module, the outermost recorder alone is used.
            self.watch.start()

    def refuse_behind_failure(self, call: str) -> None:
        """Raise if a communication of this model failed; ``call`` begins the message.

        Raises:
            StateError: saying which.
        """
        if self.failure is not None:
            raise StateError(
                f"{call} is refused on rank {self.rank}, because an earlier communication of this model did not end: "
                f"{self.failure}. Other ranks may still stand in it or come to it, and would take what is sent next "
                "for a part of it. Start the job again from its last checkpoint, or make new process groups on all "
                "ranks and shard the model anew over them."
            )

    def fail(self, error: CollectiveError, entry: Issued | None = None) -> None:
        """Remember that ``error``, of communication ``entry``, leaves ranks at different places of their order.

        Other errors than of time and of peers are about the call, and leave ranks where they were.
        """
        if self.failure is None and isinstance(error, CollectiveTimeoutError | CollectiveAbortedError):
            which = "" if entry is None else f"{entry}: "
            # Text alone: an error keeps the frames that it came through, and these keep tensors.
            self.failure = f"{which}{type(error).__name__}, {str(error).partition(chr(10))[0].rstrip('.')}"
            self._unready = True
            if self.when_failed is not None:
                self.when_failed()

    def tell(self, error: BaseException) -> None:
        """Let the other ranks know that the program raised ``error`` inside of a step."""
        if self.peers is not None and not isinstance(error, CollectiveError):
            self.peers.tell(error, "none" if self.last is None else str(self.last))

    @property
    def issued(self) -> tuple[Issued, ...]:
        """What is remembered, the oldest first."""
        return tuple(self._issued)

    @contextmanager
    def during(self, operation: str, units: Sequence[Named] = (), backward: bool | None = None) -> Iterator[None]:
        """One communication, or several that are one to whoever calls, made and waited for inside."""
        entry = self.issue(operation, units, backward)
        with self.placing(entry):
            yield
        entry.ended = time.monotonic()

    @contextmanager
    def placing(self, entry: Issued | None) -> Iterator[None]:
        """Let a ``CollectiveError`` that leaves say which communication it is about."""
        try:
            yield
        except CollectiveError as error:
            self.refuse(error, entry)

    def refuse(self, error: CollectiveError, entry: Issued | None) -> NoReturn:
        """Raise ``error`` anew, with ``entry`` and the last communication that was issued in its words.

        An error that says so already is raised as it is. Other ranks that failed are asked where they stood.

        Raises:
            PeerFailedError: another rank's program raised an error, whose words these are.
        """
        self.fail(error, entry)
        if entry is None or error.located:
            raise error
        behind = "" if self.last is None or self.last is entry else f" The last that it issued is {self.last}."
        waited = f"Rank {self.rank} waited for its communication {entry}.{behind}"
        if self.peers is not None and not isinstance(error, PeerFailedError):
            heard = self.peers.ask(str(entry))
            report = write_report(self.rank, error, [each.as_table() for each in self._issued], heard)
            if report is not None:
                waited += f" Its last communications and stacks are in {report} on {socket.gethostname()!r}."
            raised = self.peers.raised(heard)
            if raised is not None:
                failed = PeerFailedError(f"{raised}\n{waited}")
                failed.located = True
                raise failed from error
            waited += "\n" + self.peers.places(heard)
        try:
            told = type(error)(f"{error}\n{waited}")
        except Exception:
            # A backend's own class may be made of something else than a text.
            raise error from None
        told.located = True
        raise told from error


# A thread that speaks for a rank which is stuck: in Python between communications, or on its device.
#
# A rank that waits on the host raises at its time limit, and tells what it knows. One that sits elsewhere, in a data
# loader or in a lock, does not even know that it is waited for, and one whose device waits has no Python that could
# raise. So once nothing was issued for almost as long as others wait, this thread tells them where the rank stands, and
# where the device does not get on leaves a report.


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
