"""The last communications that this rank issued for one model, and errors that say at which of them it stood."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from ...errors import CollectiveAbortedError, CollectiveError, CollectiveTimeoutError, PeerFailedError, StateError
from .failure_report import write_report
from .peers import Peers

#: Communications that are remembered.
REMEMBERED = 1000


class Named(Protocol):
    """What a recorder needs of a unit's spec; asked when something is told."""

    @property
    def label(self) -> str:
        """The unit's name in messages."""


class Sender(Protocol):
    """What a recorder, and who watches it, needs of lanes. Asked from any thread."""

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
