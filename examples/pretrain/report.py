"""What a run says while it goes on: a live line in a terminal, plain lines elsewhere, and TensorBoard's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from metrics import Memory, Speed, readable
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class Trained:
    """What is known at a report."""

    step: int
    """Steps done."""
    losses: list[float]
    """Of each step since the last report, over all ranks and before that step's update, nats a token."""
    balances: list[float]
    """The load-balancing loss of experts in each of these steps, as many as a token meets where all are as busy."""
    gradient_norms: list[float]
    """Over all parameters, before clipping."""
    rate: float
    """The learning rate of step ``step``."""
    speed: Speed
    memory: Memory
    """The worst of all ranks."""

    @property
    def line(self) -> str:
        """Everything but the step, in words."""
        mfu = "" if self.speed.mfu is None else f"  MFU {self.speed.mfu:.1%}"
        balance = f"  balance {self.balances[-1]:.3f}" if self.balances else ""
        return (
            f"loss {self.losses[-1]:.4f}{balance}  norm {self.gradient_norms[-1]:.2f}  lr {self.rate:.2e}  "
            f"{self.speed.tokens_per_second:,.0f} tokens/s{mfu}  memory {readable(self.memory.peak_nbytes)}  "
            f"retries {self.memory.retries}"
        )

    @property
    def short_line(self) -> str:
        """What fits in 80 columns beside the step and the time that is left."""
        mfu = "" if self.speed.mfu is None else f"  MFU {self.speed.mfu:.0%}"
        return (
            f"loss {self.losses[-1]:.3f}  {self.speed.tokens_per_second:,.0f} tokens/s{mfu}  "
            f"{readable(self.memory.peak_nbytes)}  {self.memory.retries} retries"
        )


class Reporter(Protocol):
    """Told how a run goes. A context: what is open ends when it is left."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def trained(self, now: Trained) -> None:
        """A report is due."""

    def evaluated(self, step: int, loss: float) -> None:
        """The loss on held-out text after ``step`` steps, nats a token."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""


class Silent:
    """On every rank but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def trained(self, now: Trained) -> None:
        return None

    def evaluated(self, step: int, loss: float) -> None:
        return None

    def note(self, text: str) -> None:
        return None


class Lines(Silent):
    """Where the output is a file or a pipe."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def trained(self, now: Trained) -> None:
        self.note(f"step {now.step:>6}/{self._steps}  {now.line}")

    def evaluated(self, step: int, loss: float) -> None:
        self.note(f"step {step:>6}/{self._steps}  held-out loss {loss:.4f}")

    def note(self, text: str) -> None:
        print(text, flush=True)


class Live(Silent):
    """In a terminal: one line that changes, and above it what stays."""

    def __init__(self, steps: int, done: int, console: Console) -> None:
        self._bar = Progress(
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def trained(self, now: Trained) -> None:
        self._bar.update(self._task, completed=now.step, description=now.short_line)

    def evaluated(self, step: int, loss: float) -> None:
        self.note(f"step {step:>6}  held-out loss {loss:.4f}")

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


class Board(Silent):
    """Writes scalars for TensorBoard beside what another reporter shows."""

    def __init__(self, shown: Reporter, folder: Path, done: int) -> None:
        self._shown = shown
        # What was written behind the checkpoint from which this run goes on is hidden.
        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)
        self._writer.close()

    def trained(self, now: Trained) -> None:
        self._shown.trained(now)
        first = now.step - len(now.losses) + 1
        for step, (loss, norm) in enumerate(zip(now.losses, now.gradient_norms, strict=True), first):
            self._writer.add_scalar("loss/train", loss, step)
            self._writer.add_scalar("gradient_norm", norm, step)
        for step, balance in enumerate(now.balances, first):
            self._writer.add_scalar("loss/balance", balance, step)
        scalars = {
            "learning_rate": now.rate,
            "speed/tokens_per_second": now.speed.tokens_per_second,
            "speed/seconds_per_step": now.speed.seconds_per_step,
            "memory/peak_GiB": now.memory.peak_nbytes / 2**30,
            "memory/allocator_retries": now.memory.retries,
        }
        if now.speed.mfu is not None:
            scalars["speed/mfu"] = now.speed.mfu
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, now.step)

    def evaluated(self, step: int, loss: float) -> None:
        self._shown.evaluated(step, loss)
        self._writer.add_scalar("loss/held_out", loss, step)

    def note(self, text: str) -> None:
        self._shown.note(text)


def make_reporter(steps: int, *, shown: bool, board: Path | None, done: int) -> Reporter:
    """What fits this rank, ``shown`` on one alone, and its standard output.

    ``board``: TensorBoard's folder; None for none. ``done``: steps that an earlier start has done.
    """
    if not shown:
        return Silent()
    console = Console()
    reporter = Live(steps, done, console) if console.is_terminal else Lines(steps)
    return reporter if board is None else Board(reporter, board, done)
