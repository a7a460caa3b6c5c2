"""What every stage and unit of one model shares while it steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import nn

from ...interfaces import Collectives
from ..gradients.bucket import Bucket
from ..transport.audit import Audit
from ..transport.lanes import Lanes
from .itinerary import Itinerary, Mark
from .phase import Phase


class Step(ABC):
    """The state of a model's step, and its turning points, as stages and units see them."""

    def __init__(self, collectives: Collectives, lanes: Lanes, batch_nbytes: int, *, check_ranks: bool) -> None:
        """``batch_nbytes``: of reductions sent together, at most. ``check_ranks``: compare ranks' collectives."""
        self.collectives = collectives
        self.lanes = lanes
        self.phase = Phase.IDLE
        #: The outermost stage, while its forward runs.
        self.active: object | None = None
        #: Which stages that forward, or the last one, entered and left with gradients on.
        self.itinerary: Itinerary[Any] = Itinerary(None)
        #: Whether ``unsharded_parameters`` shows whole parameters now: modules then compute with these.
        self.unsharded = False
        #: False under ``no_sync``.
        self.synchronises = True
        #: Whether the backward that runs adds to gradients: ``autograd.grad`` does not.
        self.accumulates = False
        #: Compares each collective with the other ranks' until the first backward has ended.
        self.audit = Audit() if check_ranks and collectives.capabilities.can_communicate else None
        #: Called with what all ranks issue next; None where they do not compare it.
        self.announce = collectives.announce if check_ranks and collectives.capabilities.announces else None
        #: Reductions of small units that are sent together.
        self.bucket = Bucket(batch_nbytes, lanes, audit=self.audit, announce=self.announce)

    @property
    def rank(self) -> int:
        """This process's rank among all that share the model."""
        return self.collectives.rank

    def end_audit(self) -> None:
        """Compare no more: what follows repeats what was compared."""
        self.audit = self.bucket.audit = None

    @property
    def backward_failed(self) -> bool:
        """Whether a backward started and never ended. To be asked outside of backward."""
        return self.phase is Phase.BACKWARD

    @abstractmethod
    def begin_forward(self, outermost: object, module: nn.Module) -> None:
        """The outermost forward starts."""

    @abstractmethod
    def end_forward(self, output: object) -> None:
        """The outermost forward ended and returns ``output``."""

    @abstractmethod
    def enter_backward(self) -> None:
        """A gradient reached one of the outputs."""

    @abstractmethod
    def arrive(self, itinerary: Itinerary[Any], mark: Mark[Any]) -> bool:
        """A backward came to ``mark`` of ``itinerary``: do what comes before it; whether it was not done itself yet."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up an unfinished forward or backward: release everything, drop its gradients."""

    @abstractmethod
    def modules(self) -> Iterable[nn.Module]:
        """The modules of all stages."""
