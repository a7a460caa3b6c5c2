"""In which order modules are gathered: recorded in forwards, so that all ranks issue collectives alike.

``ExecutionOrder`` answers which modules to prefetch, from recorded order and sizes alone, never from timing. Batches
are planned in ``planning/launches.py``; in which order a backward comes through modules is ``backward.py``'s to say.

[Note: routes]
Not every forward takes the same way: an encoder and a decoder are called in turns, blocks of a mixture change places,
an evaluation skips one. The last few recorded orders are kept. A forward is expected to take the order that last
followed the order before it, so that orders in turns are foreseen from their first module. Where it departs, it follows
another order that begins with the modules entered so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from ..planning import thresholds
from ..planning.launches import batch_ends


class Gathered(Protocol):
    """A module, as an execution order sees it."""

    @property
    def launch_nbytes(self) -> int:
        """Bytes by which its gathers are planned, the same on all ranks; 0 where it gathers nothing."""

    @property
    def is_split(self) -> bool:
        """Whether it was split off the module around it."""


S = TypeVar("S", bound=Gathered)

#: The most orders that are kept. A forward that departs compares its beginning with each.
MOST_ROUTES = 8


class Order(Generic[S]):
    """Module states in the order in which they are expected, in batches."""

    def __init__(self, module_states: Sequence[S], ahead: int, batch_nbytes: int) -> None:
        self.module_states = list(module_states)
        #: The order that the next forward took when one had taken this.
        self.then: Order[S] = self
        # The first one is entered before anything can be prefetched.
        sizes = [module_state.launch_nbytes for module_state in self.module_states[1:]]
        batched = batch_ends(sizes, batch_nbytes) if batch_nbytes else range(1, len(sizes) + 1)
        ends = [1, *(1 + end for end in batched)]
        #: How many batches there are.
        self.launches = len(set(ends))
        #: By position: the batches of the ``ahead`` modules behind it, and of one module of the next batch at least.
        self.behind: list[list[list[S]]] = [[] for _ in self.module_states]
        for position in range(len(self.module_states)) if ahead else ():
            last, next_one = max(position + ahead, ends[position]), position + 1
            while next_one <= min(last, len(sizes)):
                self.behind[position].append(self.module_states[next_one : ends[next_one]])
                next_one = ends[next_one]


class ExecutionOrder(Generic[S]):
    """Records the order of module states in forward, and answers what to prefetch.

    Args:
        forward_ahead: how many module states ahead of the computing one are prefetched in forward.
        backward_ahead: the same in backward.
        batch_nbytes: bytes up to which neighbouring module states are prefetched together; 0 for each by itself.
    """

    def __init__(self, forward_ahead: int, backward_ahead: int, batch_nbytes: int = 0) -> None:
        self._forward_ahead = forward_ahead
        self.backward_ahead = backward_ahead
        self.batch_nbytes = batch_nbytes
        #: Of modules that say it: what is gathered behind them, in the place of what was recorded.
        self.forward_hints: Mapping[S, list[list[S]]] = {}
        self.backward_hints: Mapping[S, list[list[S]]] = {}
        # Those that finished forwards took, the last one first. One that is kept leads to one that is kept: what came
        # after it is more recent.
        self._routes: list[Order[S]] = []
        self._entered: list[S] = []
        # The one that the forward follows; None where it follows none.
        self._route: Order[S] | None = None

    @property
    def ahead(self) -> int:
        """The most modules whose gathers are issued before they are needed."""
        hints = (*self.forward_hints.values(), *self.backward_hints.values())
        return max(self._forward_ahead, self.backward_ahead, *map(len, hints))

    @property
    def order(self) -> tuple[S, ...]:
        """The modules in the order in which the last finished forward entered them."""
        return tuple(self._routes[0].module_states) if self._routes else ()

    @property
    def reason(self) -> str:
        """One line for people: how many launches gather the modules of a forward, and why."""
        if not self.batch_nbytes:
            return "each module is gathered by itself"
        most = f"neighbours go together up to {self.batch_nbytes / 2**20:g} MiB, at most {thresholds.LARGEST_BATCH}"
        if not self._routes:
            return f"{most}; by the order that the first forward records"
        route = self._routes[0]
        return f"{len(route.module_states)} modules in {route.launches} launches: {most}"

    def begin_forward(self) -> None:
        """An outermost forward starts."""
        self._entered = []
        self._route = self._routes[0].then if self._routes else None

    def end_forward(self) -> None:
        """The outermost forward ended; the order that it recorded is one of those expected of the next."""
        taken = self._route
        if taken is None or taken.module_states != self._entered:
            taken = next((route for route in self._routes if route.module_states == self._entered), None)
        if taken is None:
            taken = Order(self._entered, self._forward_ahead, self.batch_nbytes)
        if self._routes:
            self._routes[0].then = taken
            if self._routes[0] is taken:
                return
            self._routes = [route for route in self._routes if route is not taken][: MOST_ROUTES - 1]
        self._routes.insert(0, taken)

    def enter(self, module_state: S) -> list[list[S]]:
        """``module_state`` starts its forward; returns the batches to gather now, unless they are already.

        Once a forward departs from all recorded orders, nothing more is prefetched in it: a wrong guess costs a gather
        and memory.
        """
        position = len(self._entered)
        self._entered.append(module_state)
        hinted = self.forward_hints.get(module_state) if self.forward_hints else None
        route = self._route
        if route is None:
            return hinted or []
        if position >= len(route.module_states) or route.module_states[position] is not module_state:
            taken = (each for each in self._routes if each.module_states[: position + 1] == self._entered)
            route = self._route = next(taken, None)
            if route is None:
                return hinted or []
        return hinted or route.behind[position]

    @property
    def turning(self) -> S | None:
        """The inner module whose backward is expected to follow its forward at once; None before the first forward.

        The last one entered, if it was split off the outermost module, or if that has nothing to gather: else the
        outermost module's backward comes in between.
        """
        return _turning(self._routes[0].module_states) if self._routes else None

    def turns_at(self, module_state: S) -> bool:
        """Whether ``module_state``, whose forward ends, is the ``turning`` one of the order that is followed."""
        route = self._route
        return (
            route is not None
            and len(self._entered) == len(route.module_states)
            and _turning(route.module_states) is module_state
        )


def _turning(module_states: Sequence[S]) -> S | None:
    if not module_states:
        return None
    first, last = module_states[0], module_states[-1]
    return last if last.is_split or not first.launch_nbytes else None
