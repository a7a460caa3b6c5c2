"""What one model saved and loaded so far, and the save that goes on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import BackgroundSaveError, RankMismatchError
from ..runtime.peers import error_text
from ..runtime.root import Root
from ..runtime.step import Phase
from ..state.agreement import Answers
from ..state.exchange import coordinates
from .folder import Contents, Line
from .job_lock import NAME, JobLock
from .pending import PendingSave

_FAILED, _TOLD = 1, 2


@dataclass
class History:
    """Kept with the model."""

    line: Line | None = None
    """The checkpoints of the folder that it saved to or loaded from last; on the rank that coordinates."""
    pending: PendingSave | None = None
    """The last save in the background, until it is known how it ended."""

    lock: JobLock | None = None
    """The claim to the folder that it saved to last; on the rank that coordinates."""

    @classmethod
    def of(cls, owner: Root) -> History:
        """That of a model."""
        if not isinstance(owner.history, cls):
            owner.history = cls()
        assert isinstance(owner.history, cls)
        return owner.history

    def claim(self, folder: Path) -> None:
        """Have ``folder`` for this process alone, as long as the model saves there.

        Raises:
            ConfigError: another job has it, which it may have got since the last save, where somebody removed the lock.
            OSError: the lock cannot be made.
        """
        before = self.lock if self.lock is not None and self.lock.folder == folder.resolve() else None
        if before is not None and before.held:
            return
        claimed = JobLock(folder)
        # Whoever removed the whole folder has begun a new one.
        if before is not None and before.removed and self.line_in(folder).known & Contents.of(folder).identities:
            warnings.warn(
                f"{folder / NAME} was removed while this job saves there, so that another job could have taken the "
                "folder. It was made anew; leave it there until the job ends.",
                stacklevel=5,
            )
        if self.lock is not None:
            self.lock.release()
        self.lock = claimed

    def line_in(self, folder: Path) -> Line:
        """The line in ``folder``; a new one where the model was elsewhere last."""
        if self.line is not None and self.line.folder == folder.resolve():
            return self.line
        return Line.begun(folder)

    def close(self, root: Root) -> None:
        """The model is closed: nothing of it is saved any more.

        Raises:
            As ``settle``.
        """
        try:
            # Behind a communication that failed no rank can ask another: the log and the end of the program tell.
            if self.pending is not None and root.phase is not Phase.FAILED:
                with root.meeting("end of a save in the background", (root.collectives,)):
                    self.settle(root, "The model is closed all the same.")
        finally:
            if self.lock is not None:
                self.lock.release()

    def settle(self, owner: Root, then: str = "This call was not begun: call it again.") -> None:
        """Wait for the save in the background. Every rank calls it; does nothing where there is none.

        Args:
            owner: The model's.
            then: What a failure means for the call that tells of it.

        Raises:
            BackgroundSaveError: it failed on any rank, and ``result`` has not told of it on all. On all ranks alike.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        what = f"The save of {pending.directory} in the background failed"
        heard = f"Listeners failed that were told of the checkpoint {pending.directory}, which is committed"
        commits = coordinates(owner.collectives)
        # Parts come first: the rank that commits may be waiting for a note that cannot be written. Then that rank,
        # which may be unable to tell the others by one. Where both went well, the others see the checkpoint soon.
        for words_for, ask in (
            (what, pending.own_failure),
            (what, partial(pending.failure, wait=commits)),
            (what, partial(pending.failure, wait=True)),
            (heard, pending.heard_failure),
        ):
            failure = ask()
            number = _FAILED * (failure is not None) + _TOLD * pending.told
            answers = Answers(owner.collectives, number, "" if failure is None else error_text(failure))
            failed = [rank for rank, each in enumerate(answers.numbers) if each & _FAILED]
            if failed:
                text = f"{words_for}:\n{answers.told(failed)}"
                own = pending.abandon()
                pending.note_told(RankMismatchError(text) if failure is None else None)
                if not all(each & _TOLD for each in answers.numbers):
                    raise BackgroundSaveError(f"{text}\n{then}") from own
                return
        pending.note_told()
