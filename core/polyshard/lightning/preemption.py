"""A signal ends ``Trainer.fit`` behind a step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer

from ..preemption import Preemption


class PreemptionCallback(Callback):  # type: ignore[misc]
    """Lets a signal that one rank got alone end ``fit`` on all ranks, behind the same step, with a checkpoint::

        trainer = Trainer(strategy=PolyshardStrategy(config), callbacks=[PreemptionCallback("checkpoints")])
        trainer.fit(module, data, ckpt_path=PreemptionCallback.newest("checkpoints"))

    ``fit`` writes ``preempted-step=<step>.ckpt`` and raises ``SystemExit(75)``: the process ends with that code where
    nobody catches it. Validation runs before only where the step is the last of an epoch. From its first batch, of
    training or of the validation ahead of it, to the end of ``fit`` this callback takes the signals in place of
    Lightning, which broadcasts inside of its handler: where one rank alone was signalled, it would wait there for the
    others. A second signal goes to who took them before ``fit``, and so ends the process where nobody did.
    """

    exit_code: ClassVar[int] = Preemption.exit_code
    """Of a program that was ended so and can be taken up."""

    def __init__(
        self, folder: str | Path, signals: Iterable[signal.Signals] = (signal.SIGTERM,), *, every: int = 1
    ) -> None:
        """As ``polyshard.Preemption``.

        Args:
            folder: Where the checkpoint is written; made where missing, and seen by all ranks.
            signals: What asks for an end.
            every: At every how many steps of optimizers ranks exchange what they know, 1 or more.
        """
        self._folder = Path(folder)
        self._signals = tuple(signals)
        self._every = every
        self._running: Preemption | None = None
        self._step = 0
        # Of each signal, before Lightning has taken it.
        self._former: dict[signal.Signals, Any] = {}

    @staticmethod
    def newest(folder: str | Path) -> str | None:
        """What ``fit`` takes as ``ckpt_path``: the checkpoint of the latest step in ``folder``; None without one."""
        found = sorted(Path(folder).glob("preempted-step=*.ckpt"))
        return str(found[-1]) if found else None

    def request(self) -> None:
        """Ask for an end without a signal, while ``fit`` trains. One rank is enough."""
        if self._running is not None:
            self._running.request()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look who takes the signals: Lightning does next."""
        if stage == "fit":
            self._former = {each: signal.getsignal(each) for each in self._signals}

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals; a request is followed behind the first step."""
        self._enter(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals."""
        self._step = trainer.global_step
        self._enter(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a checkpoint and raise, where a rank was told to end.

        Raises:
            SystemExit: on every rank, with ``exit_code``.
        """
        # A loader that goes on behind its last batch has none for the next epoch: Lightning would leave that one out.
        if not trainer.is_last_batch:
            self._end_if_told(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As ``on_train_batch_end``, behind the last batch of an epoch.

        Raises:
            SystemExit: on every rank, with ``exit_code``.
        """
        self._end_if_told(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put back who took the signals before."""
        self._leave(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put back who took the signals before."""
        self._leave(exception)

    def _enter(self, module: LightningModule) -> None:
        if self._running is not None:
            return
        preemption = Preemption(module, self._signals, every=self._every)
        if threading.current_thread() is threading.main_thread():
            # Else a second signal would go to Lightning. At the end of fit it puts back all that it found.
            for number, former in self._former.items():
                if former is not None:
                    signal.signal(number, former)
        self._running = preemption.__enter__()

    def _end_if_told(self, trainer: Trainer) -> None:
        # Between batches whose gradients are accumulated there is nothing that a checkpoint could go on from.
        if self._running is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._running.requested():
            trainer.save_checkpoint(self._folder / f"preempted-step={self._step:08d}.ckpt")
            raise SystemExit(self.exit_code)

    def _leave(self, error: BaseException | None) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None if error is None else type(error), error, None)
