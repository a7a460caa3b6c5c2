"""What one model saved and loaded so far, and the save that goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..engine.step.root import Root
from ..state.agreement import together
from .folder import Line
from .pending import PendingSave


@dataclass
class History:
    """Kept with the model."""

    line: Line | None = None
    """The checkpoints of the folder that it saved to or loaded from last; on the rank that coordinates."""
    pending: PendingSave | None = None
    """The last save in the background, until it is known how it ended."""

    @classmethod
    def of(cls, owner: Root) -> History:
        """That of a model."""
        if not isinstance(owner.checkpoint_line, cls):
            owner.checkpoint_line = cls()
        assert isinstance(owner.checkpoint_line, cls)
        return owner.checkpoint_line

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
        with together(owner.collectives, f"The save of {pending.directory} in the background"):
            if not pending.told:
                pending.result()
