"""What a run says while it goes on: a live line in a terminal, plain lines elsewhere, and scalars for trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from metrics import Memory, Speed, readable
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from trackers import Tracker


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


class Tracked(Silent):
    """Gives scalars to ``trackers`` beside what another reporter shows."""

    def __init__(self, shown: Reporter, trackers: Sequence[Tracker]) -> None:
        self._shown = shown
        self._trackers = trackers

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)
        for tracker in self._trackers:
            tracker.close()

    def trained(self, now: Trained) -> None:
        self._shown.trained(now)
        rows = [
            {"loss/train": loss, "gradient_norm": norm}
            for loss, norm in zip(now.losses, now.gradient_norms, strict=True)
        ]
        for row, balance in zip(rows, now.balances, strict=False):  # none without experts
            row["loss/balance"] = balance
        rows[-1] |= {
            "learning_rate": now.rate,
            "speed/tokens_per_second": now.speed.tokens_per_second,
            "speed/seconds_per_step": now.speed.seconds_per_step,
            "memory/peak_GiB": now.memory.peak_nbytes / 2**30,
            "memory/allocator_retries": now.memory.retries,
        }
        if now.speed.mfu is not None:
            rows[-1]["speed/mfu"] = now.speed.mfu
        for step, row in enumerate(rows, now.step - len(rows) + 1):
            self._add(step, row)

    def evaluated(self, step: int, loss: float) -> None:
        self._shown.evaluated(step, loss)
        self._add(step, {"loss/held_out": loss})

    def note(self, text: str) -> None:
        self._shown.note(text)

    def _add(self, step: int, scalars: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.add(step, scalars)


def make_reporter(steps: int, done: int, trackers: Sequence[Tracker]) -> Reporter:
    """What fits the standard output of the rank that reports. ``done``: steps that an earlier start has done."""
    console = Console()
    reporter = Live(steps, done, console) if console.is_terminal else Lines(steps)
    return Tracked(reporter, trackers) if trackers else reporter
