"""The step of a model: its phase, and everything that its module states and units share in it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from ..errors import StateError
from ..interfaces import Collectives
from .order import ForwardRecord
from .peers import Audit
from .recorder import Recorder
from .reduce import Reducer
from .streams import CommStreams


class Phase(enum.Enum):
    """Where the model stands in a step.

    ========  ========  ===============================================================
    from      to        by
    ========  ========  ===============================================================
    IDLE      FORWARD   the outermost forward starts
    FORWARD   IDLE      it ends, or raises
    IDLE      BACKWARD  a gradient reaches an output, or what backwards left is reduced
    BACKWARD  IDLE      the backward ends; after one that raised, the next forward
    FORWARD   BACKWARD  a forward differentiates inside itself, and goes on after
    IDLE      STREAM    the first weights of ``polyshard.stream`` are asked for
    STREAM    IDLE      the stream ends, or is closed
    IDLE      CLOSED    ``polyshard.close``; there is no way back
    any       FAILED    a communication did not end; ``polyshard.close`` alone follows
    ========  ========  ===============================================================
    """

    IDLE = "idle"
    """Between forwards and backwards: parameters may be read, changed and saved."""
    FORWARD = "forward"
    """Inside the outermost module's forward."""
    BACKWARD = "backward"
    """Inside a backward."""
    STREAM = "stream"
    """Whole weights are handed out, and the next ones on their way: masters must not change, and no step begins."""
    FAILED = "failed"
    """Nothing can be gathered or reduced any more: ranks stand at different places of their order."""
    CLOSED = "closed"
    """Nothing can be gathered or reduced any more: the collectives were closed."""


class Step:
    """The step that a model is in, and its streams and reducer. The root of the model drives it."""

    def __init__(
        self,
        collectives: Collectives,
        streams: CommStreams,
        batch_nbytes: int,
        *,
        check_ranks: bool | Literal["always"],
    ) -> None:
        """``batch_nbytes``: of reductions sent together, at most. ``check_ranks``: compare ranks' collectives, in the
        first step or always.
        """
        self.collectives = collectives
        self.streams = streams
        self.phase = Phase.IDLE
        #: The outermost module state, while its forward runs.
        self.active: object | None = None
        # The thread that the forward runs in that began last.
        self._thread = 0
        #: Which module states that forward, or the last one, entered and left with gradients on.
        self.forward_record: ForwardRecord[Any] = ForwardRecord(None)
        #: Whether parameters may have come into the model that nobody reduces gradients of (``guards.py``).
        self.registered = False
        #: The units of which ``unsharded_parameters`` shows whole parameters now: modules then compute with these.
        self.unsharded: Collection[object] = ()
        #: Whether these get their former values back behind it.
        self.drops_writes = False
        #: Where masters hold other values than the trained ones: the context that the program entered, and what these
        #: are, for messages. None elsewhere.
        self.replaced: tuple[str, str] | None = None
        #: False under ``no_sync``.
        self.synchronises = True
        #: Whether backwards left what ``Root.settle`` ends before an optimizer steps, or what no step may pass over.
        self.awaits_optimizer = False
        #: Whether the backward that runs adds to gradients: ``autograd.grad`` does not.
        self.accumulates = False
        self.check_ranks = check_ranks
        self._always = check_ranks == "always"
        #: Compares each collective with the other ranks', always or until the first backward has ended.
        self.audit: Audit | None = None
        #: Called with what all ranks issue next; None where they do not compare it.
        self.announce = collectives.announce if check_ranks and collectives.capabilities.announces else None
        #: Remembers what was issued, and names it in errors.
        self.recorder = streams.recorder = Recorder(collectives.rank)
        self.recorder.sender = streams
        #: Issues the units' reductions, those of small ones together.
        self.reducer = Reducer(batch_nbytes, streams, audit=None, announce=self.announce, recorder=self.recorder)
        self.begin_audit()

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def runs_here(self) -> bool:
        """Whether a forward of the model runs in this thread, and no backward inside of it."""
        return self.phase is Phase.FORWARD and self._thread == threading.get_ident()

    def refuse_ended(self, call: str) -> None:
        """Raise StateError if the model was closed, or if a communication failed; ``call`` begins the message."""
        if self.phase is Phase.CLOSED:
            raise StateError(
                f"{call} came after polyshard.close (rank {self.rank}): the model's ranks cannot exchange anything any "
                "more, and its parameters are this rank's shards. Close a model behind its last use."
            )
        self.recorder.refuse_behind_failure(call)

    def refuse_open_stream(self, call: str) -> None:
        """Raise StateError while weights are handed out; ``call`` begins the message."""
        if self.phase is Phase.STREAM:
            raise StateError(
                f"{call} came while a polyshard.stream() of the model is open (rank {self.rank}). Go through all of "
                "it, or end it by its close(), on every rank."
            )

    def _refuse_replaced(self) -> None:
        if self.replaced is not None:
            context, values = self.replaced
            raise StateError(
                f"A backward inside of {context} would give the parameters gradients of their {values} (rank "
                f"{self.rank}). Train outside of it; torch.autograd.grad of inputs is served."
            )

    @contextmanager
    def meeting(self, operation: str, groups: Iterable[Collectives | None], told: str = "") -> Iterator[None]:
        """Communications between steps, in ``groups``, which are announced where that is done.

        ``told``: what else must be alike on all ranks, to be announced with ``operation``.
        """
        with self.recorder.during(operation):
            if self.announce is not None:
                for group in groups:
                    if group is not None:
                        self.streams.meet(group.announce, f"{operation}{told}")
            yield

    def use_streams(self, streams: CommStreams) -> None:
        """Send by ``streams`` from now on."""
        self.streams = self.reducer.streams = streams
        streams.recorder = self.recorder
        self.recorder.sender = streams

    def begin_audit(self) -> None:
        """Compare collectives with the other ranks' until the next backward has ended, as in the first step."""
        if self.check_ranks and self.collectives.capabilities.can_communicate:
            self.audit = self.reducer.audit = Audit()

    def end_audit(self) -> None:
        """Compare no more, unless always: what follows repeats what was compared."""
        if self._always:
            return
        self.audit = self.reducer.audit = None
