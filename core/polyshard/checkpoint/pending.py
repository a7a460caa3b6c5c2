"""A save that goes on in the background while the model is trained.

[Note: how ranks meet in the background]
Collectives belong to the training, which uses them at the same time. What ranks have to say to each other is said
through the directory that all of them write to: each leaves a note there when its part is written, the first one
waits for all notes and commits, and others see the checkpoint appear under its name, or a note that it was given up.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import CollectiveTimeoutError, PolyshardError, RankMismatchError, StateError
from .marker import MARKER, Marker

#: Seconds between looks: first and last.
_SOON, _LATER = 0.01, 0.5
#: Seconds without a byte more from any rank until the first one gives up.
_PATIENCE = 600.0
_GIVEN_UP = "given-up.txt"


class Notes:
    """What ranks say to each other in the directory of a save."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank

    def leave(self, results: Any, failure: str | None) -> None:
        """Say that this rank's part is written, or that it failed."""
        temporary = self._path(self._rank).with_suffix(".tmp")
        temporary.write_bytes(pickle.dumps((results, failure)))
        temporary.replace(self._path(self._rank))

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
                found[rank] = pickle.loads(self._path(rank).read_bytes())
            failures = [f"  rank {rank}: {text}" for rank, (_, text) in sorted(found.items()) if text is not None]
            if failures:
                raise RankMismatchError("Writing in the background failed on:\n" + "\n".join(failures))
            if len(found) == ranks:
                break
            grown = sum(path.stat().st_size for path in self._directory.iterdir() if not path.name.endswith(".tmp"))
            if grown != size:
                size, since = grown, time.monotonic()
            elif time.monotonic() - since > _PATIENCE:
                missing = [rank for rank in range(ranks) if rank not in found]
                raise CollectiveTimeoutError(
                    f"Ranks {missing} wrote nothing to {self._directory} for {_PATIENCE:g} s (rank {self._rank})."
                )
        for rank in range(ranks):
            self._path(rank).unlink()
        return [found[rank][0] for rank in range(ranks)]

    def give_up(self, text: str) -> None:
        """Tell the others that there will be no checkpoint. What they wrote is removed."""
        for path in list(self._directory.iterdir()):
            path.unlink()
        temporary = self._directory / f"{_GIVEN_UP}.tmp"
        temporary.write_text(text)
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
                why = "the save did not end there" if gone else note.read_text()
                raise RankMismatchError(f"The checkpoint {target} was given up by rank 0 (rank {self._rank}): {why}")
            if deadline is not None and time.monotonic() > deadline:
                raise _too_late(target, self._rank)

    def _path(self, rank: int) -> Path:
        return self._directory / f"written-by-{rank}"


class PendingSave:
    """What ``async_save`` returns: a checkpoint that will be, or the reason why it will not."""

    def __init__(
        self, directory: Path, rank: int, work: Callable[[], None], end: Callable[[float | None], None]
    ) -> None:
        """``work``: in the background. ``end``: behind it, until a deadline. Both raise if there is no checkpoint."""
        self.directory = directory
        """That of the checkpoint, once it is committed."""
        self.told = False
        """Whether ``result`` returned or raised what came of it."""
        self._rank = rank
        self._work = work
        self._end = end
        self._failure: BaseException | None = None
        # No daemon: a program that ends right behind its last save has it.
        self._thread = threading.Thread(target=self._run, name=f"save of {directory.name}")
        self._ended = False

    def start(self) -> None:
        """Begin. Called once."""
        self._thread.start()

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

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._failure = error
        except BaseException as error:
            # No Exception to Python, torch's CheckpointException among them: it would pass by the caller's handlers.
            self._failure = PolyshardError(f"Writing {self.directory} failed (rank {self._rank}): {error}")
            self._failure.__cause__ = error
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


def _nothing() -> None:
    raise StateError("a save runs once")
