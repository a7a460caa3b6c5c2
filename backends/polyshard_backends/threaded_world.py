"""Ranks that are threads: how they start, meet in collectives, time out and stop."""

from __future__ import annotations

import enum
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

from polyshard.errors import (
    CollectiveAbortedError,
    CollectiveTimeoutError,
    ConfigError,
    PolyshardError,
    RankMismatchError,
    StateError,
    WorldSizeError,
    different_calls,
)

from . import _torch_private

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Seconds that threads have to end after the world was given up.
_GRACE = 2.0


class MeetingState(enum.Enum):
    """The progress of one collective of one group."""

    GATHERING = "gathering"
    """Some ranks have not issued it yet."""
    RUNNING = "running"
    """Every rank has issued it; the last one to arrive carries it out."""
    DONE = "done"
    """Every rank's output is written."""
    FAILED = "failed"
    """It never will be; every rank raises the same error."""


class Meeting:
    """One collective of one group: the k-th that each of its ranks issues."""

    __slots__ = ("cause", "error", "group", "message", "payloads", "result", "signatures", "state")

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.state = MeetingState.GATHERING
        self.signatures: dict[int, str] = {}
        self.payloads: dict[int, Any] = {}
        self.result: Any = None
        self.error: type[PolyshardError] = CollectiveAbortedError
        self.message = ""
        self.cause: BaseException | None = None

    def fail(self, error: type[PolyshardError], message: str, cause: BaseException | None = None) -> None:
        self.state = MeetingState.FAILED
        self.error, self.message, self.cause = error, message, cause
        self.payloads.clear()

    def missing(self) -> list[int]:
        return [rank for rank in self.group if rank not in self.signatures]


class ThreadedWorld:
    """N ranks as N threads of one process.

    Each rank's k-th collective of a group meets the other ranks' k-th; the last rank to issue it carries it out for
    all, so that issuing never blocks and ``Work.wait`` blocks until the last rank has issued. Ranks that issue
    different operations, sizes or dtypes all raise ``RankMismatchError``.

    ``torch.manual_seed`` and the default random generator belong to the process, not to a thread: build models, and
    draw anything else that must be the same on every rank, before ``run`` or while holding ``lock``. For the same
    reason dropout is not reproducible here.

    Before Python 3.12, cyclic garbage is collected while ranks run only where one issues a collective.

    Args:
        world_size: number of ranks, at least 1.
        timeout: seconds that a rank waits in a collective for the others.

    Raises:
        WorldSizeError: ``world_size`` is below 1.
        ConfigError: ``timeout`` is not positive.
    """

    def __init__(self, world_size: int, timeout: float = 20.0) -> None:
        if world_size < 1:
            raise WorldSizeError(f"a threaded world of {world_size} ranks does not exist; give at least 1")
        if timeout <= 0:
            raise ConfigError(f"a threaded world cannot wait for {timeout} seconds; give a positive timeout")
        _torch_private.settle_device_guard()
        self.world_size = world_size
        self.timeout = timeout
        self.lock = threading.RLock()
        """For the ranks' own use, around what is global to the process; the world itself never takes it."""
        self._changed = threading.Condition()
        self._meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self._running: set[Meeting] = set()
        self._issued: dict[tuple[tuple[int, ...], int], int] = {}
        self._announced: dict[int, str] = {}
        # Meetings that failed for lack of a rank or for a mismatch, by rank, until that rank has raised.
        self._diverged: dict[int, Meeting] = {}
        self._threads: dict[int, int] = {}
        self._abort_reason: str | None = None
        self._garbage = _Garbage()

    @property
    def aborted(self) -> bool:
        """Whether the world was given up; nothing more can be exchanged in it."""
        return self._abort_reason is not None

    def announce(self, rank: int, what: str) -> None:
        """``rank``'s next collective is part of ``what``: it meets those of ranks that say the same, or fails."""
        self._announced[rank] = what

    def meet(
        self, group: tuple[int, ...], rank: int, signature: str, payload: Any, perform: Callable[[Sequence[Any]], Any]
    ) -> Meeting:
        """Issue ``rank``'s next collective of ``group``; both in ranks of this world. Does not block for others.

        ``signature`` must be the same on every rank. ``perform`` is called once, by the last rank to arrive, with the
        payloads in group order; what it returns is the meeting's result.

        Raises:
            CollectiveAbortedError: the world was given up.
        """
        self._garbage.collect_due()
        what = self._announced.pop(rank, None)
        if what is not None:
            signature = f"{what}: {signature}"
        with self._changed:
            self._threads[rank] = threading.get_ident()
            self._check_alive(rank)
            number = self._issued.get((group, rank), 0)
            self._issued[group, rank] = number + 1
            meeting = self._meetings.setdefault((group, number), Meeting(group))
            meeting.signatures[rank] = signature
            if meeting.state is MeetingState.FAILED:
                return meeting
            meeting.payloads[rank] = payload
            if meeting.missing():
                return meeting
            del self._meetings[group, number]
            if len(set(meeting.signatures.values())) > 1:
                calls = [meeting.signatures[member] for member in group]
                wanted = "; ".join(f"rank {member} wants {call}" for member, call in zip(group, calls, strict=True))
                told = (
                    f"ranks issued different collectives as number {number} of group {list(group)}: {wanted}; every "
                    f"rank must issue the same operations in the same order"
                )
                # What the engine announced is a matter of modules.
                meeting.fail(RankMismatchError, told if what is None else str(different_calls(rank, calls)))
                # Ranks of other groups, too, will wait for these in vain.
                self._diverged.update(dict.fromkeys(range(self.world_size), meeting))
                self._changed.notify_all()
                return meeting
            meeting.state = MeetingState.RUNNING
            self._running.add(meeting)
        self._carry_out(meeting, perform)
        return meeting

    def _carry_out(self, meeting: Meeting, perform: Callable[[Sequence[Any]], Any]) -> None:
        failure: Exception | None = None
        try:
            meeting.result = perform([meeting.payloads[member] for member in meeting.group])
        except Exception as error:
            failure = error
        with self._changed:
            self._running.remove(meeting)
            if failure is None:
                meeting.state = MeetingState.DONE
                meeting.payloads.clear()
            else:
                described = meeting.signatures[meeting.group[0]]
                meeting.fail(
                    CollectiveAbortedError,
                    f"{described} of group {list(meeting.group)} failed: {type(failure).__name__}: {failure}",
                    failure,
                )
            self._changed.notify_all()

    def await_end(self, meeting: Meeting, rank: int, timeout: float) -> Any:
        """Block until ``meeting`` has ended, for at most ``timeout`` seconds, and return its result.

        Raises:
            RankMismatchError: the ranks issued different operations.
            CollectiveTimeoutError: some ranks did not arrive; raised on every rank of the group.
            CollectiveAbortedError: the world was given up, or the operation itself failed.
        """
        if meeting.state is MeetingState.DONE:
            return meeting.result
        deadline = time.monotonic() + timeout
        with self._changed:
            self._threads[rank] = threading.get_ident()
            while meeting.state in (MeetingState.GATHERING, MeetingState.RUNNING):
                if meeting.state is MeetingState.RUNNING:
                    # Every rank is there, and the one that carries it out always reports an end.
                    self._changed.wait()
                    continue
                self._check_alive(rank)
                earlier = self._diverged.get(rank)
                if earlier is not None:
                    # Others raised in that one, and do not come here.
                    meeting.fail(earlier.error, earlier.message)
                    self._changed.notify_all()
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    described = meeting.signatures[rank]
                    meeting.fail(
                        CollectiveTimeoutError,
                        f"{described} of group {list(meeting.group)} did not end within {timeout:g} s: waiting for "
                        f"ranks {meeting.missing()}, which did not issue it; see below where every rank stands\n"
                        f"{self.stacks()}",
                    )
                    # Those of other groups may wait for one that has given up here.
                    self._diverged.update(dict.fromkeys(range(self.world_size), meeting))
                    self._changed.notify_all()
                    break
                self._changed.wait(left)
            if meeting.state is MeetingState.FAILED:
                self._diverged.pop(rank, None)
                self._withdraw(rank, meeting.error, meeting.message)
                raise meeting.error(f"rank {rank}: {meeting.message}") from meeting.cause
            return meeting.result

    def _check_alive(self, rank: int) -> None:
        if self._abort_reason is not None:
            message = f"the threaded world was given up, because {self._abort_reason}; that failure comes first"
            self._withdraw(rank, CollectiveAbortedError, message)
            raise CollectiveAbortedError(f"rank {rank}: {message}")

    def _withdraw(self, rank: int, error: type[PolyshardError], message: str) -> None:
        """Before ``rank`` raises and its memory goes: fail all that it issued, and wait for what is written now."""
        for meeting in self._meetings.values():
            if rank in meeting.payloads:
                meeting.fail(error, message)
        self._changed.notify_all()
        self._changed.wait_for(lambda: not any(rank in meeting.group for meeting in self._running))

    def abort(self, reason: str) -> None:
        """Give the world up: ranks that wait, now or later, raise ``CollectiveAbortedError`` with the first reason."""
        with self._changed:
            if self._abort_reason is None:
                self._abort_reason = reason
            self._changed.notify_all()

    def stacks(self) -> str:
        """The Python stack of every rank's thread, as text."""
        frames = sys._current_frames()
        parts = []
        for rank, ident in sorted(self._threads.items()):
            frame = frames.get(ident)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (its thread has ended)\n"
            parts.append(f"rank {rank}:\n{stack}")
        return "".join(parts)

    def run(self, fn: Callable[[int, ThreadedWorld, *Ts], T], *args: *Ts, timeout: float = 60.0) -> list[T]:
        """Call ``fn(rank, self, *args)`` in a thread for each rank; return the results in rank order.

        When a rank raises, the others are aborted, and the first error that did not itself follow from an abort is
        raised here with a note that names the rank.

        Raises:
            CollectiveTimeoutError: threads were still running after ``timeout`` seconds; the message has their stacks.
            StateError: the world was given up in an earlier run.
        """
        if self.aborted:
            raise StateError(f"this threaded world was given up, because {self._abort_reason}; make a new one")
        self._meetings.clear()
        self._issued.clear()
        self._announced.clear()
        self._diverged.clear()
        self._threads.clear()
        results: dict[int, T] = {}
        errors: list[tuple[int, BaseException]] = []

        def one_rank(rank: int) -> None:
            self._threads[rank] = threading.get_ident()
            try:
                results[rank] = fn(rank, self, *args)
            except BaseException as error:
                errors.append((rank, error))
                self.abort(f"rank {rank} raised {type(error).__name__}: {error}")

        with self._garbage.postponed():
            self._run_threads(one_rank, errors, timeout)
        if errors:
            rank, error = next(
                (entry for entry in errors if not isinstance(entry[1], CollectiveAbortedError)), errors[0]
            )
            error.add_note(f"raised on rank {rank} of a threaded world of {self.world_size}")
            raise error
        return [results[rank] for rank in range(self.world_size)]

    def _run_threads(
        self, one_rank: Callable[[int], None], errors: Sequence[tuple[int, BaseException]], timeout: float
    ) -> None:
        threads = [
            threading.Thread(target=one_rank, args=(rank,), name=f"rank{rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if stuck:
            stacks = self.stacks()
            self.abort(f"ranks {stuck} had not returned after {timeout:g} s")
            grace_ends = time.monotonic() + _GRACE
            for rank in stuck:
                threads[rank].join(max(0.0, grace_ends - time.monotonic()))
            raise CollectiveTimeoutError(
                f"ranks {stuck} of a threaded world of {self.world_size} had not returned after {timeout:g} s; see "
                f"below where every rank stood\n{stacks}"
            ) from (errors[0][1] if errors else None)


class _Garbage:
    """Keeps automatic garbage collection away from C++ code that holds a mutex.

    Before Python 3.12 any allocation may collect, also one that torch makes under a mutex, such as that of the default
    random generator. A collection runs Python code, which can hand the interpreter lock to another rank. If that rank
    wants the same mutex, it waits with the interpreter lock held, and the process stands still for ever.
    """

    def __init__(self) -> None:
        self._postponed = False

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Collect in ``collect_due`` only, until the context ends. Nothing changes where collection is off already."""
        # From 3.12 on Python itself collects between bytecodes only.
        if sys.version_info >= (3, 12) or not gc.isenabled():
            yield
            return
        gc.disable()
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False
            gc.enable()

    def collect_due(self) -> None:
        """Collect the oldest generation that is due; called where the thread holds no mutex of C++."""
        if not self._postponed:
            return
        # Allocations are counted while collection is off, too.
        counts, thresholds = gc.get_count(), gc.get_threshold()
        for generation in reversed(range(len(counts))):
            if 0 < thresholds[generation] < counts[generation]:
                gc.collect(generation)
                return
