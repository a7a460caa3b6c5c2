"""A save that goes on in the background while the model is trained.

[Note: how ranks meet in the background]
Collectives belong to the training, which uses them at the same time. What ranks have to say to each other is said
through the directory that all of them write to: each leaves a note there when its part is written, the first one
waits for all notes and commits, and others see the checkpoint appear under its name, or a note that it was given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import CollectiveTimeoutError, PolyshardError, RankMismatchError, StateError
from . import disk
from .documents import a_count, a_list, a_text, an_object, checked, parse, render
from .marker import MARKER, Marker

_LOGGER = logging.getLogger(__name__)

#: Seconds between looks: first and last.
_SOON, _LATER = 0.01, 0.5
_GIVEN_UP = "given-up.txt"


class Notes:
    """What ranks say to each other in the directory of a save."""

    def __init__(self, directory: Path, rank: int, patience_s: float) -> None:
        """``patience_s``: seconds without a byte more from any rank until the first one gives up."""
        self._directory = directory
        self._rank = rank
        self._patience_s = patience_s
        self._abandoned = threading.Event()

    def leave(self, results: Any, failure: str | None) -> None:
        """Say that this rank's part is written, or that it failed."""
        path = self._path(self._rank)
        temporary = path.with_suffix(".tmp")
        with disk.naming(temporary):
            temporary.unlink(missing_ok=True)
            disk.write_whole(temporary, render({"written": results, "failure": failure}))
            temporary.replace(path)

    def abandon(self) -> None:
        """Wait for no other rank any more: it is known that one of them failed."""
        self._abandoned.set()

    def collect(self, ranks: int) -> list[Any]:
        """Wait for all ranks; returns what each had to say of its part, in their order.

        Raises:
            RankMismatchError: one failed.
            CollectiveTimeoutError: nothing more came.
        """
        found: dict[int, tuple[Any, str | None]] = {}
        size, since = -1, time.monotonic()
        for _ in _looks():
            for rank in [each for each in range(ranks) if each not in found and self._path(each).exists()]:
                found[rank] = self._read(rank)
            failures = [f"  rank {rank}: {text}" for rank, (_, text) in sorted(found.items()) if text is not None]
            if failures:
                raise RankMismatchError("Writing in the background failed on:\n" + "\n".join(failures))
            if len(found) == ranks:
                break
            grown = sum(path.stat().st_size for path in self._directory.iterdir() if not path.name.endswith(".tmp"))
            if grown != size:
                size, since = grown, time.monotonic()
            elif self._abandoned.is_set():
                raise RankMismatchError(f"Writing in the background failed on another rank than {self._rank}.")
            elif time.monotonic() - since > self._patience_s:
                missing = [rank for rank in range(ranks) if rank not in found]
                raise CollectiveTimeoutError(
                    f"Ranks {missing} wrote nothing to {self._directory} for {self._patience_s:g} s (rank "
                    f"{self._rank}). Look whether they are still there."
                )
        for rank in range(ranks):
            self._path(rank).unlink()
        return [found[rank][0] for rank in range(ranks)]

    def give_up(self, text: str) -> None:
        """Tell the others that there will be no checkpoint. What they wrote is removed."""
        # Whatever cannot be told is seen when they wait for too long.
        with suppress(OSError):
            for path in list(self._directory.iterdir()):
                path.unlink()
            temporary = self._directory / f"{_GIVEN_UP}.tmp"
            disk.write_whole(temporary, text.encode())
            temporary.replace(self._directory / _GIVEN_UP)

    def await_end(self, target: Path, identity: str, deadline: float | None) -> None:
        """Return when ``target`` is the checkpoint.

        Raises:
            RankMismatchError: it never will be.
            CollectiveTimeoutError: not until ``deadline``, by ``time.monotonic``.
        """
        for _ in _looks():
            gone = not self._directory.exists()
            if (target / MARKER).exists() and Marker.read(target).identity == identity:
                return
            note = self._directory / _GIVEN_UP
            if gone or note.exists():
                why = "the save did not end there" if gone else note.read_text(errors="replace")
                raise RankMismatchError(f"The checkpoint {target} was given up by rank 0 (rank {self._rank}): {why}")
            if deadline is not None and time.monotonic() > deadline:
                raise _too_late(target, self._rank)

    def _read(self, rank: int) -> tuple[Any, str | None]:
        path = self._path(rank)
        with checked(self._directory, path.name):
            told = an_object(parse(disk.read_whole(self._directory, path.name)), "the note")
            failure = told["failure"]
            if failure is not None:
                return None, a_text(failure, "failure")
            written = an_object(told["written"], "written")
            a_text(written["file"], "file")
            a_count(written["size"], "size")
            for each in a_list(written["digests"], "digests"):
                a_text(each, "digests")
            return written, None

    def _path(self, rank: int) -> Path:
        return self._directory / f"written-by-{rank}"


class PendingSave:
    """What ``async_save`` returns: a checkpoint that will be, or the reason why it will not."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        work: Callable[[Callable[[], None]], None],
        end: Callable[[float | None], None],
        abandon: Callable[[], None],
    ) -> None:
        """``work``: in the background; calls what it is given when this rank's own part is written. ``end``: behind it,
        until a deadline. Both raise if there is no checkpoint. ``abandon``: lets ``work`` wait for no other rank.
        """
        self.directory = directory
        """That of the checkpoint, once it is committed."""
        self.told = False
        """Whether ``result`` returned or raised what came of it."""
        self._rank = rank
        self._work = work
        self._end = end
        self._abandon = abandon
        self._written = threading.Event()
        self._written_here = False
        self._failure: BaseException | None = None
        # No daemon: a program that ends right behind its last save has it.
        self._thread = threading.Thread(target=self._run, name=f"save of {directory.name}")
        self._ended = False

    def start(self) -> None:
        """Begin. Called once."""
        self._thread.start()

    def own_failure(self) -> BaseException | None:
        """Wait until this rank's own part is written, or was not; returns why it was not."""
        self._written.wait()
        # Where it was written, what came behind it is another rank's, or the commit's.
        return None if self._written_here else self._failure

    def failure(self) -> BaseException | None:
        """Wait until this rank's thread has ended, behind the commit on the rank that commits; returns what failed."""
        self._thread.join()
        return self._failure

    def abandon(self, why: str) -> BaseException:
        """Wait for no other rank any more: ``why`` tells which failed. Returns what ``result`` raises from now on."""
        self._abandon()
        self._thread.join()
        if self._failure is None or self._written_here:
            self._failure = RankMismatchError(why)
        return self._failure

    def done(self) -> bool:
        """Whether ``result`` would return, or raise, at once."""
        if self._thread.is_alive():
            return False
        if not self._ended and self._failure is None:
            try:
                self._finish(time.monotonic())
            except CollectiveTimeoutError:
                return False
            except Exception as error:
                self._failure = error
        return True

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is committed; returns its directory. This rank waits alone.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Raises:
            CollectiveTimeoutError: it takes longer; the save goes on.
            RankMismatchError: another rank failed.
            ConfigError: another job committed the step meanwhile.
            PolyshardError, OSError: writing failed; nothing is left of it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise _too_late(self.directory, self._rank)
        if self._failure is None and not self._ended:
            try:
                self._finish(deadline)
            except CollectiveTimeoutError:
                raise
            except Exception as error:
                self._failure = error
        self.told = True
        if self._failure is not None:
            raise self._failure
        return self.directory

    def _finish(self, deadline: float | None) -> None:
        self._end(deadline)
        self._ended = True

    def _note_written(self) -> None:
        self._written_here = True
        self._written.set()

    def _run(self) -> None:
        try:
            self._work(self._note_written)
        except Exception as error:
            self._failure = error
        except BaseException as error:
            # No Exception to Python, torch's CheckpointException among them: it would pass by the caller's handlers.
            self._failure = PolyshardError(f"Writing {self.directory} failed (rank {self._rank}): {error}")
            self._failure.__cause__ = error
        if self._failure is not None:
            # Before anybody asks: of a program's last save nobody may.
            _LOGGER.error(
                "The save of %s in the background failed on rank %d: %s", self.directory, self._rank, self._failure
            )
        self._written.set()
        # Copies of the state are not kept until somebody asks.
        self._work = _nothing


def _looks() -> Iterator[None]:
    """Returns at once, then after pauses that grow."""
    pause = _SOON
    while True:
        yield
        time.sleep(pause)
        pause = min(2 * pause, _LATER)


def _too_late(target: Path, rank: int) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(f"The save of {target} has not ended yet (rank {rank}). It goes on; ask again later.")


def _nothing(_: Callable[[], None]) -> None:
    raise StateError("a save runs once")
