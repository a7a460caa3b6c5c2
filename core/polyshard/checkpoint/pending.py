"""A save that goes on in the background while the model is trained.

[Note: ranks in the background]
Collectives belong to the training, which uses them at the same time. Ranks exchange notes through the directory that
all of them write to: each leaves one when its part is written, the first rank waits for all notes and commits, and
the others see the checkpoint appear under its name, or a note that it was given up.
"""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from ..errors import (
    BackgroundSaveError,
    CheckpointDamagedError,
    CollectiveTimeoutError,
    PolyshardError,
    RankMismatchError,
    words,
)
from ..inspect import Phase, ShardedModel
from ..state.exchange import Answers, coordinates, named
from .encoding import checked, parse, render
from .folder import Contents, Line
from .manifest import Marker
from .storage import LOCK, MARKER, AnyPlace, JobLock, Place, is_written, storage_of
from .writing import Plan

_LOGGER = logging.getLogger(__name__)

#: Seconds between looks: first and last.
_SOON, _LATER = 0.01, 0.5
#: Looks of all ranks together in a second that a file system is asked for.
_LOOKS_PER_S = 2048
#: How often within its patience the first rank looks whether files grow.
_LOOKS_AT_SIZES = 8
#: Of the first rank's patience, which the others have with it: it gives up first, and says so.
_OTHERS = 1.25
#: Seconds in which nothing changed until a program ends without having heard of its last save.
_AT_EXIT_S = 30.0
_GIVEN_UP = "given-up.txt"
_FAILED, _REPORTED = 1, 2


class Notes:
    """What ranks say to each other in the directory of a save."""

    def __init__(self, directory: Place, rank: int, ranks: int, patience_s: float) -> None:
        """``ranks``: how many write; ``patience_s``: seconds without a byte more from any rank until the first one
        gives up.
        """
        self.ranks = ranks
        self._directory = directory
        self._storage = storage_of(directory)
        self._rank = rank
        self._patience_s = patience_s
        self._abandoned = False
        self._wakes = threading.Event()

    def leave(self, results: Any, failure: str | None) -> None:
        """Say that this rank's part is written, or that it failed."""
        content = render({"written": results, "failure": failure})
        self._storage.replace_whole(self._directory / _note_of(self._rank), content)

    def abandon(self) -> None:
        """Wait for no other rank any more: it is known that one of them failed."""
        self._abandoned = True
        self._wakes.set()

    def look_now(self) -> None:
        self._wakes.set()

    def collect(self) -> list[Any]:
        """Wait for all ranks; returns what each had to say of its part, in their order. The first rank calls it.

        One listing a look, whatever the number of ranks: files would have to be asked for one by one.

        Raises:
            RankMismatchError: one failed.
            CollectiveTimeoutError: nothing more came.
        """
        found: dict[int, Any] = {}
        missing = dict.fromkeys(range(self.ranks))
        sizes: dict[str, int] = {}
        since = looked = time.monotonic()
        for _ in self._looks(_LATER):
            names = frozenset(self._storage.names(self._directory))
            # The others wait for this rank as long as it says that it is there.
            self._storage.beat(self._directory)
            arrived = [rank for rank in missing if _note_of(rank) in names]
            for rank in arrived:
                found[rank], failure = self._read(rank)
                del missing[rank]
                if failure is not None:
                    raise RankMismatchError(f"Writing in the background failed on rank {rank}: {failure}")
            if not missing:
                break
            now = time.monotonic()
            if arrived:
                since = now
            elif self._abandoned:
                raise RankMismatchError(f"Writing in the background failed on another rank than {self._rank}.")
            elif now - looked > self._patience_s / _LOOKS_AT_SIZES:
                looked, before = now, sizes
                sizes = self._storage.sizes(self._directory)
                if sizes != before:
                    since = now
                elif now - since > self._patience_s:
                    raise CollectiveTimeoutError(
                        f"Of {named(list(missing))} nothing more came to {self._directory} for {self._patience_s:g} s "
                        f"(rank {self._rank}). Look whether they are still there."
                    )
        for rank in range(self.ranks):
            self._storage.remove(self._directory / _note_of(rank))
        return [found[rank] for rank in range(self.ranks)]

    def give_up(self, text: str) -> None:
        """Tell the others that there will be no checkpoint. What they wrote is removed."""
        # The reason first: whoever misses its file then finds it. Where there is no room for it, once there is. Without
        # it, the others wait for too long and raise.
        for _ in range(2):
            with suppress(OSError):
                if not self._storage.exists(self._directory / _GIVEN_UP):
                    self._storage.replace_whole(self._directory / _GIVEN_UP, text.encode(errors="backslashreplace"))
            with suppress(OSError):
                for name in self._storage.names(self._directory):
                    if is_written(name) and name != _GIVEN_UP:
                        # Another rank may write meanwhile, and give its note the name that it is to have.
                        self._storage.remove(self._directory / name)

    def given_up(self, target: Place) -> RankMismatchError | None:
        """The error where the first rank gave ``target`` up; None where it did not."""
        try:
            why = self._storage.read_whole(self._directory, _GIVEN_UP).decode(errors="replace")
        except (OSError, CheckpointDamagedError):
            return None
        return RankMismatchError(f"The checkpoint {target} was given up by rank 0 (rank {self._rank}): {why}")

    def remove(self) -> None:
        """Remove the directory: all ranks know that there will be no checkpoint."""
        self._storage.remove_tree(self._directory)

    def await_end(self, target: Place, identity: str) -> None:
        """Return when ``target`` is the checkpoint. All ranks but the first call it.

        Raises:
            RankMismatchError: it never will be.
            CollectiveTimeoutError: nothing changed for longer than the first rank waits for others.
        """
        beat, since = None, time.monotonic()
        for _ in self._looks(max(_LATER, self.ranks / _LOOKS_PER_S)):
            beat_now = self._storage.beat_of(self._directory)
            looked, is_there = True, False
            try:
                is_there = self._storage.exists(target / MARKER) and Marker.found(target).identity == identity
            except OSError:
                if not self._storage.errors_pass:
                    raise
                looked = False
            # Where the two are one directory, the first rank may yet take the marker back.
            if is_there and self._storage.beat_of(self._directory) is None:
                return
            over = self.given_up(target)
            if over is not None:
                raise over
            if beat_now is None and looked and not is_there:
                raise RankMismatchError(f"The save of {target} did not end on rank 0 (rank {self._rank}).")
            if self._abandoned:
                raise RankMismatchError(f"Writing in the background failed on another rank than {self._rank}.")
            now = time.monotonic()
            if beat_now != beat:
                beat, since = beat_now, now
            # A program that ends because rank 0's machine is gone should end.
            ends = not threading.main_thread().is_alive()
            limit = min(_OTHERS * self._patience_s, _AT_EXIT_S if ends else math.inf)
            if now - since > limit:
                if is_there:
                    return
                raise CollectiveTimeoutError(
                    f"Rank 0 did nothing for the checkpoint {target} for {limit:g} s, so that rank {self._rank} cannot "
                    "know whether that will be there. Look whether rank 0 is."
                )

    def _looks(self, latest: float) -> Iterator[None]:
        """Returns at once, then after pauses that grow to ``latest`` seconds."""
        pause = _SOON
        while True:
            yield
            if self._wakes.wait(pause):
                self._wakes.clear()
                pause = _SOON
            else:
                pause = min(2 * pause, latest)

    def _read(self, rank: int) -> tuple[Any, str | None]:
        name = _note_of(rank)
        with checked(self._directory, name):
            note = parse(self._storage.read_whole(self._directory, name))
            return note["written"], note["failure"]


class PendingSave(Generic[AnyPlace]):
    """What ``async_save`` returns: a checkpoint that will be, or the reason why it will not."""

    def __init__(
        self,
        directory: AnyPlace,
        rank: int,
        work: Callable[[Callable[[], None]], None],
        notify: Callable[[], None],
        notes: Notes,
    ) -> None:
        """``work``: in the background, until there is a checkpoint, or raises; calls what it is given when this rank's
        own part is written, and waits for others by ``notes``. ``notify``: calls listeners.
        """
        self.directory: AnyPlace = directory
        """That of the checkpoint, once it is committed."""
        self.reported = False
        """Whether the program knows how it ended."""
        self._rank = rank
        self._work = work
        self._notify = notify
        self._notes = notes
        #: Of this rank's own part: where that is written, a later failure is another rank's, or the commit's.
        self._part: Future[None] = Future()
        self._failure: BaseException | None = None
        # No daemon: a program that ends right behind its last save has it.
        self._thread = threading.Thread(target=self._run, name=f"save of {directory.name}")
        self._heard = False

    def start(self) -> None:
        self._thread.start()

    def own_failure(self) -> BaseException | None:
        """Wait until this rank's own part is written, or was not; returns why it was not."""
        return self._part.exception()

    def failure(self, *, wait: bool) -> BaseException | None:
        """Why there is no checkpoint. ``wait``: until that is known here; else as far as it is known."""
        if wait:
            self._notes.look_now()
            self._thread.join()
        return self._failure

    def heard_failure(self) -> BaseException | None:
        """Wait until there is a checkpoint, and call listeners, once; returns what failed."""
        self._thread.join()
        if self._failure is None and not self._heard:
            self._heard = True
            try:
                self._notify()
            except Exception as error:
                self._failure = error
        return self._failure

    def abandon(self) -> BaseException | None:
        """Wait for no other rank any more: one failed, as all know. Returns what failed here."""
        self._notes.abandon()
        self._thread.join()
        self._notes.remove()
        return self._failure

    def note_reported(self, failure: BaseException | None = None) -> None:
        """The program knows how it ended. ``failure``: what ``result`` raises from now on, where it says more."""
        self.reported = True
        self._failure = failure or self._failure
        atexit.unregister(self._print_at_exit)

    def done(self) -> bool:
        """Whether ``result`` would return, or raise, at once."""
        if self._thread.is_alive():
            return False
        self.heard_failure()
        return True

    def result(self, timeout: float | None = None) -> AnyPlace:
        """Wait until the checkpoint is committed; returns its directory. This rank waits alone.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Raises:
            CollectiveTimeoutError: it takes longer; the save goes on.
            RankMismatchError: another rank failed.
            ConfigError: another job committed the step meanwhile.
            PolyshardError, OSError: writing failed; nothing is left of it.
        """
        self._notes.look_now()
        self._thread.join(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            raise CollectiveTimeoutError(
                f"The save of {self.directory} has not ended yet (rank {self._rank}). It goes on; ask again later."
            )
        failure = self.heard_failure()
        self.note_reported()
        if failure is not None:
            raise failure
        return self.directory

    def _run(self) -> None:
        try:
            self._work(partial(self._part.set_result, None))
        except Exception as error:
            self._failure = error
        except BaseException as error:
            # No Exception to Python, torch's CheckpointException among them: it would pass by the caller's handlers.
            self._failure = PolyshardError(f"Writing {self.directory} failed (rank {self._rank}): {words(error)}")
            self._failure.__cause__ = error
        # Copies of the state are not kept until somebody asks.
        del self._work
        if self._failure is not None:
            _forget_locals(self._failure)
            # Nobody may ask: of a program's last save, say.
            _LOGGER.error("%s", self._failure_text())
            atexit.register(self._print_at_exit)
            if not self._part.done():
                self._part.set_exception(self._failure)

    def _failure_text(self) -> str:
        assert self._failure is not None
        return f"The save of {self.directory} in the background failed on rank {self._rank}: {words(self._failure)}"

    def _print_at_exit(self) -> None:
        """The program ends, and has not asked: what is logged may go nowhere."""
        if sys.stderr is not None:
            print(f"polyshard: {self._failure_text()}. The program ended without asking.", file=sys.stderr)


def _note_of(rank: int) -> str:
    return f"written-by-{rank}"


def _forget_locals(error: BaseException | None) -> None:
    """Release the objects in the frames of ``error`` and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@dataclass
class History:
    """The saves of one model, kept with it."""

    line: Line | None = None
    """The checkpoints of the folder that it saved to or loaded from last; on the rank that coordinates."""
    pending: PendingSave[Any] | None = None
    """The last save in the background, until it is known how it ended."""
    plan: Plan | None = None
    """Of the last save: the next one is mostly of the same tensors."""
    lock: JobLock[Any] | None = None
    """The claim to the folder that it saved to last; on the rank that coordinates."""

    def claim(self, folder: Place) -> None:
        """Have ``folder`` for this process alone, as long as the model saves there.

        Raises:
            ConfigError: another job has it, which it may have got since the last save, where somebody removed the lock.
            OSError: the lock cannot be made.
        """
        before = self.lock if self.lock is not None and self.lock.folder == folder.resolve() else None
        if before is not None and before.held:
            return
        removed = before is not None and before.removed
        claimed = storage_of(folder).claim(folder)
        # Whoever removed the whole folder has begun a new one.
        if removed and self.line_in(folder).known & Contents.of(folder).identities:
            warnings.warn(
                f"{folder / LOCK} was removed while this job saves there, so that another job could have taken the "
                "folder. It was made anew; leave it there until the job ends.",
                stacklevel=5,
            )
        if self.lock is not None:
            self.lock.release()
        self.lock = claimed

    def line_in(self, folder: Place) -> Line:
        """The line in ``folder``; a new one where the model was elsewhere last."""
        if self.line is not None and self.line.folder == folder.resolve():
            return self.line
        return Line.begun(folder)

    def close(self, model: ShardedModel) -> None:
        """The model is closed: nothing of it is saved any more. Errors as ``finish_pending``."""
        try:
            # Behind a communication that failed no rank can ask another: the log and the end of the program say it.
            if self.pending is not None and model.phase is not Phase.FAILED:
                with model.meeting("end of a save in the background", (model.collectives,)):
                    self.finish_pending(model, "The model is closed all the same.")
        finally:
            if self.lock is not None:
                self.lock.release()

    def finish_pending(self, model: ShardedModel, then: str = "This call was not begun: call it again.") -> None:
        """Wait for the save in the background. Every rank calls it; does nothing where there is none.

        ``model``: the history's. ``then``: what a failure means for the call that raises it.
        Raises BackgroundSaveError: it failed on any rank, and ``result`` did not raise it on all. On all ranks alike.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        what = f"The save of {pending.directory} in the background failed"
        heard = f"Listeners failed that were told of the checkpoint {pending.directory}, which is committed"
        commits = coordinates(model.collectives)
        # Parts come first: the rank that commits may be waiting for a note that cannot be written. Then that rank,
        # which may be unable to write one. Where both went well, the others see the checkpoint soon.
        for words_for, ask in (
            (what, pending.own_failure),
            (what, partial(pending.failure, wait=commits)),
            (what, partial(pending.failure, wait=True)),
            (heard, pending.heard_failure),
        ):
            failure = ask()
            number = _FAILED * (failure is not None) + _REPORTED * pending.reported
            answers = Answers(model.collectives, number, "" if failure is None else words(failure))
            failed = [rank for rank, each in enumerate(answers.numbers) if each & _FAILED]
            if failed:
                text = f"{words_for}:\n{answers.quoted(failed)}"
                own = pending.abandon()
                pending.note_reported(RankMismatchError(text) if failure is None else None)
                if not all(each & _REPORTED for each in answers.numbers):
                    raise BackgroundSaveError(f"{text}\n{then}") from own
                return
        pending.note_reported()
