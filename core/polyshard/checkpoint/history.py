"""What one model saved and loaded so far, and the save that goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..engine.step.root import Root
from ..state.agreement import together
from ..state.exchange import speaks
from .folder import Line
from .job_lock import JobLock
from .pending import PendingSave


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
        if not isinstance(owner.checkpoint_line, cls):
            owner.checkpoint_line = cls()
        assert isinstance(owner.checkpoint_line, cls)
        return owner.checkpoint_line

    def claim(self, folder: Path) -> None:
        """Have ``folder`` for this process alone, as long as the model saves there.

        Raises:
            ConfigError: another job has it.
            OSError: the lock cannot be made.
        """
        if self.lock is None or self.lock.folder != folder.resolve():
            claimed = JobLock(folder)
            if self.lock is not None:
                self.lock.release()
            self.lock = claimed

    def line_in(self, folder: Path) -> Line:
        """The line in ``folder``; a new one where the model was elsewhere last."""
        if self.line is not None and self.line.folder == folder.resolve():
            return self.line
        return Line.begun(folder)

    def settle(self, owner: Root) -> None:
        """Wait for the save in the background. Every rank calls it; does nothing where there is none.

        Raises:
            PolyshardError, OSError: it failed, and ``result`` has not told on this rank.
            RankMismatchError: another rank is told so.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        what = f"The save of {pending.directory} in the background"
        try:
            # Parts come first: the rank that commits may be waiting for a note that cannot be written.
            for ask in (pending.own_failure, pending.failure):
                if not self._is_whole(owner, pending, ask(), what):
                    return
            with together(owner.collectives, what):
                if not pending.told:
                    pending.result()
        except Exception as error:
            error.add_note(f"{what} failed. What was called now, which tells of it, was not begun: call it again.")
            raise

    def _is_whole(self, owner: Root, pending: PendingSave, failure: BaseException | None, what: str) -> bool:
        """Whether no rank failed; where one did, raise on all, unless all have been told."""
        mine = (None if failure is None else f"{type(failure).__name__}: {failure}", pending.told)
        everyone: list[tuple[str | None, bool]] = [mine]
        if speaks(owner.collectives):
            everyone = list(owner.collectives.all_gather_object(mine))
        failures = [f"  rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text is not None]
        if not failures:
            return True
        failed = pending.abandon(f"{what} failed on other ranks than {owner.rank}:\n" + "\n".join(failures))
        if not all(told for _, told in everyone):
            raise failed
        return False
