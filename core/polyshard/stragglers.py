"""Ranks that hold up the others: whose own part of a step takes longer than that of most."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from types import TracebackType

from torch import nn

from .engine.step.root import Root
from .engine.transport.stalls import Stalls
from .errors import ConfigError, StateError
from .state.exchange import speaks
from .state.resting import resting_root
from .state.rounds import Round, gathering

_LOGGER = logging.getLogger(__name__)

#: Steps of each ``every`` that are measured, at most.
_MEASURED = 10
#: Of a step's time, by which a straggler is behind the median at least: less is not worth a machine.
_WORTH = 0.05


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that was slower than most."""

    rank: int
    """Among those that share the model."""
    host: str
    """The name of its machine."""
    own_s: float
    """Seconds of a step that it did not spend waiting for other ranks, on average."""
    median_s: float
    """The same of the median rank."""
    times: int
    """Judgements in a row, this one counted, that found it slow: 1 may have been chance."""

    def __str__(self) -> str:
        row = f", {self.times} times in a row" if self.times > 1 else ""
        return (
            f"rank {self.rank} on {self.host!r} takes {self.own_s:.3g} s of a step for itself, {self.median_s:.3g} s "
            f"is the median{row}"
        )


class Stragglers:
    """Finds ranks that the others wait for::

        with polyshard.Stragglers(model) as stragglers:
            for batch in batches:
                train(batch)
                for slow in stragglers.step():
                    print(slow)

    Of each ``every`` steps, the first ten at most are measured, or the first half. What each rank measured is exchanged
    at the last of them, and read at the call after that, which thereby waits for nothing; with ``every=1`` each call
    waits for the device.

    A rank's own time is a step's without what compute spent waiting for gathers, reductions, and the comparison of what
    ranks issue. Waits in the program's own collectives count as its own.
    """

    def __init__(self, model: nn.Module, *, every: int = 100, factor: float = 1.5) -> None:
        """Raises ``ConfigError`` for ``every`` below 1 and for a ``factor`` that is not above 1.

        Args:
            model: The outermost sharded module.
            every: At every how many steps ranks are judged.
            factor: A straggler's own time is at least so many times the median's, and behind it by a twentieth of a
                step at least.
        """
        if every < 1:
            raise ConfigError(f"every must be a number of steps, 1 or more, not {every!r}.")
        if not factor > 1:
            raise ConfigError(f"factor must be above 1, not {factor!r}.")
        self._model = model
        self._every = every
        self._factor = factor
        self._measured = max(1, min(_MEASURED, every // 2))
        self._root: Root | None = None
        self._hosts: Sequence[str] = ()
        # Calls since the one that ended the last window; None before the first, which ends the steps that warm up.
        self._calls: int | None = None
        self._stalls: Stalls | None = None
        self._round: Round | None = None
        self._times: dict[int, int] = {}
        self._told_unseen = False

    def __enter__(self) -> Stragglers:
        """Every rank enters it, between steps: they exchange the names of their machines.

        Raises:
            StateError: entered twice, inside of a step, or the model is not the outermost sharded module.
        """
        if self._root is not None:
            raise StateError("A Stragglers was entered twice. Enter it once, around the loop of training.")
        root = resting_root(self._model, "Stragglers")
        if speaks(root.collectives):
            with root.meeting("exchange of the names of machines", (root.collectives,)):
                self._hosts = root.collectives.all_gather_object(socket.gethostname())
        self._root = root
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        root, self._root = self._root, None
        if root is not None:
            root.lanes.stalls = None
        self._calls = self._stalls = None
        pending, self._round = self._round, None
        if pending is not None and kind is None:
            # Communicators may be closed next. Behind an exception another rank may never come to it; what is on its
            # way then keeps its memory by itself.
            pending.read()

    def step(self) -> tuple[Straggler, ...]:
        """Every rank calls it behind each step; all get the same answer. Also logged as a warning by rank 0.

        Returns:
            The stragglers, where this call judges: the slowest first. Empty for none and between judgements.

        Raises:
            StateError: outside of the ``with``.
            RankMismatchError: another rank does something else, where the collectives compare that.
            CollectiveError: another rank did not come.
        """
        root = self._root
        if root is None:
            raise StateError("step() was called outside of 'with polyshard.Stragglers(model)'.")
        if not speaks(root.collectives):
            return ()
        found: tuple[Straggler, ...] = ()
        if self._round is not None:
            pending, self._round = self._round, None
            found = self._judge(pending.read(), root)
        if self._calls is None:
            self._begin(root)
            return found
        self._calls += 1
        if self._calls == self._measured and self._stalls is not None:
            self._stalls.stop()
            root.lanes.stalls = None
        if self._calls == self._every:
            with root.meeting("exchange of step times", (root.collectives,)):
                self._round = gathering(root.collectives, self._measurement())
            self._begin(root)
        return found

    def _begin(self, root: Root) -> None:
        self._calls = 0
        self._stalls = root.lanes.stalls = root.lanes.measure()

    def _measurement(self) -> tuple[float, float]:
        """Own and whole seconds of a step; not a number where they are not known."""
        stalls = self._stalls
        assert stalls is not None
        if stalls.forwards < self._measured:
            # Steps that a CUDA graph replays: its waits are inside of it.
            return math.nan, math.nan
        times = stalls.read()
        return times.own_s / self._measured, times.wall_s / self._measured

    def _judge(self, told: Sequence[float], root: Root) -> tuple[Straggler, ...]:
        own, whole = told[::2], told[1::2]
        known = [seconds for seconds in own if not math.isnan(seconds)]
        if not known:
            if not self._told_unseen and root.rank == 0:
                _LOGGER.warning("Stragglers saw no step: those that a CUDA graph replays cannot be measured.")
            self._told_unseen = True
            return ()
        median = median_low(known)
        worth = _WORTH * median_low([seconds for seconds in whole if not math.isnan(seconds)])
        slow = {r: s for r, s in enumerate(own) if s >= self._factor * median and s - median >= worth}
        self._times = {rank: self._times.get(rank, 0) + 1 for rank in slow}
        found = tuple(
            Straggler(rank, self._hosts[rank], slow[rank], median, self._times[rank])
            for rank in sorted(slow, key=lambda rank: -slow[rank])
        )
        if found and root.rank == 0:
            _LOGGER.warning("Other ranks wait: %s", "; ".join(map(str, found)))
        return found
