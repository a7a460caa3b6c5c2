"""A signal ends a ``Trainer``'s run behind a step, with a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any, ClassVar

import transformers
from torch import nn
from transformers.trainer_utils import SaveStrategy

from ..preemption import Preemption


class PreemptionCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Lets a signal that one rank got alone end training on all ranks, behind the same step, with a checkpoint::

        preemption = PreemptionCallback()
        trainer = PolyshardTrainer(..., callbacks=[preemption])
        trainer.train()
        if preemption.preempted:
            sys.exit(preemption.exit_code)

    The checkpoint is the trainer's own, ``checkpoint-<step>`` in ``args.output_dir``, whatever ``save_strategy`` is:
    ``train(resume_from_checkpoint=True)`` goes on from it. Signals are taken from the first step of training to the end
    of ``train``, as ``polyshard.Preemption`` takes them.

    An evaluation that is due behind the same step runs before: the run that goes on has its result, and does not repeat
    it. None runs because of the end, and no best model is loaded.
    """

    exit_code: ClassVar[int] = Preemption.exit_code
    """What a program should exit with that was ended so and can be taken up."""

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM,), *, every: int = 1) -> None:
        """As ``polyshard.Preemption``: what asks for an end, and at every how many steps ranks exchange what they know.

        Raises:
            ConfigError: ``every`` is below 1; when training begins.
        """
        self._signals = tuple(signals)
        self._every = every
        self._running: Preemption | None = None
        self._saved = -1
        self._best: str | None = None
        self.preempted = False
        """Whether the last ``train`` was ended so."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Take the signals."""
        self.preempted = False
        self._saved = -1
        self._best = None
        self._running = Preemption(model, self._signals, every=self._every).__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask for a checkpoint and the end, where a rank was told to end."""
        if self._running is not None and self._running.requested():
            self.preempted = True
            control.should_training_stop = True
            # Behind an epoch there may be an evaluation, whose random numbers and result belong into the checkpoint.
            control.should_save = not _ends_epoch(state)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask for what is missing; for nothing of what ``Trainer`` does behind an epoch where this is inside of one."""
        if not self.preempted:
            return control
        if not _ends_epoch(state):
            control.should_evaluate = False
        elif control.should_evaluate and args.save_strategy == SaveStrategy.BEST:
            # What the evaluation finds decides whether there is a checkpoint. Behind the next step one can be had.
            self.preempted = False
            control.should_training_stop = state.global_step >= state.max_steps
            return control
        # Once: a second one would be written over the first, and for a while there would be none.
        control.should_save = self._saved != state.global_step
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the checkpoint that the end is behind."""
        self._saved = state.global_step
        if self.preempted and state.best_model_checkpoint is not None:
            # At its end Trainer loads the best model, and with save_total_limit=1 removes all checkpoints but the best
            # one: right for a run that is over, and not for one that goes on from its last.
            self._best, state.best_model_checkpoint = state.best_model_checkpoint, None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put back who took the signals before."""
        if self._best is not None:
            state.best_model_checkpoint = self._best
        self.leave(None)

    def request(self) -> None:
        """Ask for an end without a signal, between the begin and the end of ``train``. One rank is enough."""
        if self._running is not None:
            self._running.request()

    def leave(self, error: BaseException | None) -> None:
        """Put back who took the signals before. ``error``: what ended training, where it did not end by itself."""
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None if error is None else type(error), error, None)


def _ends_epoch(state: Any) -> bool:
    """Whether the step was the last of an epoch."""
    return float(state.epoch).is_integer()
