"""Ends of a run: signals behind which all ranks leave at the same step, exceptions that other ranks should learn of,
and random states for a checkpoint, so that a resumed run draws the numbers of a run that never stopped.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, ClassVar

import torch
from torch import nn

from .errors import ConfigError, StateError
from .inspect import ShardedModel, idle_model
from .state.exchange import Round, speaks, summing

#: Seconds within which signals are one request.
_SAME_S = 1.0


class Preemption:
    """Notes signals that ask for an end, and lets all ranks agree behind which step they leave::

        with polyshard.Preemption(model) as preemption:
            for step in range(first, last):
                train(step)
                if preemption.requested():
                    polyshard.checkpoint.save(root, step + 1, model, optimizer)
                    sys.exit(preemption.exit_code)

    What ranks know is summed up by a collective that is issued at one call of ``requested`` and read at the next one,
    when it has long ended: the host does not wait for it, and all ranks read the same at the same call. A signal is
    thus followed at the call behind the next exchange, at most ``every + 1`` calls after it came.

    A second signal ends the process at once, as it would have without. Within a second it counts as the first:
    schedulers signal every process, and launchers pass on what they got themselves.
    """

    exit_code: ClassVar[int] = 75
    """The exit code of a program that ended so and can be resumed: ``EX_TEMPFAIL`` of ``sysexits.h``."""

    def __init__(self, model: nn.Module, signals: Iterable[signal.Signals] = (signal.SIGTERM,), *, every: int = 1):
        """Raises ``ConfigError`` for ``every`` below 1.

        Args:
            model: The outermost sharded module.
            signals: What asks for an end. With none, ``request`` alone does.
            every: At every how many calls of ``requested`` ranks exchange what they know.
        """
        if every < 1:
            raise ConfigError(f"every must be a number of calls, 1 or more, not {every!r}.")
        self._model = model
        self._signals = tuple(signals)
        self._every = every
        self._former: dict[signal.Signals, Any] = {}
        self._entered = False
        self._noted = False
        # The time of the first signal.
        self._first_at: float | None = None
        self._agreed = False
        self._calls = 0
        self._round: Round | None = None
        self._root: ShardedModel | None = None

    def __enter__(self) -> Preemption:
        """Raises ``StateError`` outside of the main thread, where signals cannot be taken, and inside of itself."""
        if self._entered:
            raise StateError("A Preemption was entered twice. Enter it once, around the loop of training.")
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise StateError(
                "A Preemption was entered outside of the main thread, where Python takes no signals. Enter it in the "
                "main thread, or give signals=() and call request()."
            )
        self._root = idle_model(self._model, "Preemption")
        try:
            for each in self._signals:
                self._former[each] = signal.signal(each, self._note)
        except BaseException:
            # Some signals, such as SIGKILL, cannot be taken: put back the others.
            self._put_back()
            raise
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()
        self._entered = False
        pending, self._round = self._round, None
        if pending is not None and kind is None:
            # Communicators may be closed next. After an exception another rank may never reach the exchange, which
            # then keeps its memory by itself.
            pending.read()

    def request(self) -> None:
        """Ask for an end, as a signal does: where a program knows its time limit, for example. One rank is enough."""
        self._noted = True

    def requested(self) -> bool:
        """Whether to save and leave. Every rank calls it once a step, between steps; all get the same answer.

        Raises:
            StateError: outside of the ``with``.
            RankMismatchError: another rank does something else, where the collectives compare that.
            CollectiveError: another rank did not come.
        """
        root = self._root
        if not self._entered or root is None:
            raise StateError("requested() was called outside of 'with polyshard.Preemption(model)'.")
        if not speaks(root.collectives):
            return self._noted
        if self._agreed:
            return True
        self._calls += 1
        pending, self._round = self._round, None
        exchanges = self._calls % self._every == 0
        if pending is not None or exchanges:
            with root.meeting("exchange of requests to end", (root.collectives,)):
                if pending is not None:
                    self._agreed = pending.read()[0] > 0
                if exchanges and not self._agreed:
                    self._round = summing(root.collectives, float(self._noted))
        return self._agreed

    def _put_back(self) -> None:
        for each, former in self._former.items():
            # None: a handler that was not installed from Python, and cannot be put back from there.
            signal.signal(each, signal.SIG_DFL if former is None else former)
        self._former.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        elif now - self._first_at > _SAME_S:
            former = self._former.get(signal.Signals(number))
            signal.signal(number, signal.SIG_DFL if former is None else former)
            os.kill(os.getpid(), number)
        self._noted = True


@contextmanager
def tell_failures(model: nn.Module) -> Iterator[None]:
    """Let other ranks know of an exception that leaves the block: around the whole loop of training, say.

    Ranks that wait for this one then raise ``PeerFailedError`` with its text and traceback, instead of an error that
    knows only that it is missing. Exceptions of the model's forward or backward reach other ranks without this; those
    of a data loader, of an optimizer or of a save do not. ``KeyboardInterrupt`` and ``SystemExit`` never do. Over NCCL
    no rank raises: the text is in the report that ``docs/reliability.md`` describes.

    Args:
        model: The outermost sharded module. No rank waits for another here, and each may enter it by itself.

    Raises:
        StateError: inside of a step, or ``model`` is not the outermost sharded module.
    """
    sharded = idle_model(model, "tell_failures()")
    try:
        yield
    except Exception as error:
        sharded.tell_failure(error)
        raise


def random_states(model: nn.Module) -> list[dict[str, Any]]:
    """The state of every rank's generators, in rank order: for ``extra`` of ``polyshard.checkpoint.save``.

    Python's, numpy's where a program has imported it, torch's for the CPU, and that of the device of a model on CUDA.
    Tensors and numbers alone. Every rank calls it, between steps; each gets all of them.

    Raises:
        StateError: inside a step, or ``model`` is not the outermost sharded module.
    """
    root = idle_model(model, "random_states()")
    own = own_state(root.collectives.device)
    if root.topology:
        own["topology"] = root.topology
    if not speaks(root.collectives):
        return [own]
    with root.meeting("exchange of random states", (root.collectives,)):
        return list(root.collectives.all_gather_object(own))


def restore_random_states(model: nn.Module, states: Sequence[Mapping[str, Any]]) -> None:
    """Go on with this rank's of ``states``, which ``random_states`` gave at the save. Every rank calls it.

    Raises:
        ConfigError: as many ranks saved them as there are not now, or ranks that hold different parts of the model
            shared it otherwise: they cannot be shared out. Nothing was changed. Draw from new seeds then, on every
            rank, and other numbers follow.
        StateError: inside a step, or ``model`` is not the outermost sharded module.
    """
    sharded = idle_model(model, "restore_random_states()")
    collectives = sharded.collectives
    ranks = collectives.world_size if speaks(collectives) else 1
    if len(states) != ranks:
        raise ConfigError(
            f"There are random states of {len(states)} ranks, and rank {collectives.rank} is one of {ranks}: they "
            "cannot be shared out. Go on with as many ranks as before, or leave them out and seed every rank anew."
        )
    mine = states[collectives.rank if ranks > 1 else 0]
    if mine.get("topology", "") != sharded.topology:
        raise ConfigError(
            f"The random states are of units over other ranks ({mine.get('topology') or 'all alike'}) than rank "
            f"{collectives.rank} has now ({sharded.topology or 'all alike'}): ranks with one batch would draw "
            "different numbers. Go on over the same mesh, or leave them out and seed every rank anew."
        )
    restore_own_state(mine, collectives.device)


def own_state(device: torch.device) -> dict[str, Any]:
    """Of this process, of tensors and numbers alone."""
    own: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, *rest = numpy.random.get_state()
        own["numpy"] = (name, torch.from_numpy(numpy.asarray(words).astype(numpy.int64)), *rest)
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    return own


def restore_own_state(own: Mapping[str, Any], device: torch.device) -> None:
    """Go on with ``own``, which ``own_state`` gave."""
    torch.set_rng_state(own["torch"])
    random.setstate(own["python"])
    if "numpy" in own:
        import numpy as np

        name, words, *rest = own["numpy"]
        np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], device)
