"""The root of a sharded model: what its units share, and the beginning and end of each forward and backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import nn

from .. import _torch_private
from ..errors import PolyshardError, StateError, UnshardedUseError
from ..events import Events
from ..interfaces import Collectives, OffloadManager, PrecisionPlugin
from .backward import BackwardPass, ForwardRecord
from .backward_step import BackwardStep
from .budget import Budget
from .gathered import refuse_escape
from .guards import (
    RegistrationGuard,
    refuse_inner_gradients,
    refuse_outdated,
    refuse_released,
    refuse_replaced,
    refuse_unseen_gradients,
)
from .module_state import ModuleState, ModuleUse
from .order import ExecutionOrder
from .peers import Audit, Peers
from .recorder import Recorder, Watch
from .reduce import Reducer
from .states import Phase, UnitState
from .streams import CommStreams
from .used_parameters import UsedParameters

_reduced = attrgetter("gradients.reduced")


def root_of(module_state: ModuleState) -> Root:
    """The root of the model that ``module_state`` is inside. Raises StateError: there is none yet."""
    if module_state.root is None:
        raise StateError(
            f"'{module_state.name or 'The model'}' has no root before its first forward: modules around it may still "
            "be wrapped. Run a forward first, or call the wrapper's own methods."
        )
    return module_state.root


def _tell_failed_backward(held: weakref.ref[Root], reference: object) -> None:
    # Autograd's reference may not keep the model.
    root = held()
    if root is not None:
        root.tell_failed_backward(reference)


def _reduces_once(held: weakref.ref[Root]) -> bool:
    root = held()
    # Inside of ``no_all_reduce`` gradients of units without replicas arrive whole, and later ones are added.
    return root is not None and root.reduces_once and root.module_states[0].all_reduces


class Root:
    """The outermost of a model's sharded modules, and every module state inside it."""

    def __init__(
        self,
        collectives: Collectives,
        module_states: Sequence[ModuleState],
        streams: CommStreams,
        execution_order: ExecutionOrder[ModuleState],
        events: Events,
        *,
        check_ranks: bool | Literal["always"],
        timeout_s: float = 600.0,
        peers: Peers | None = None,
        same_batch: Collectives | None = None,
        data_ranks: int | None = None,
        shards_gradients: bool = False,
        owned: tuple[Collectives, ...] = (),
        owned_locally: Collection[torch.Tensor] = frozenset(),
    ) -> None:
        """``timeout_s``: how long ranks wait for each other, who tell failures to ``peers``; the others as below."""
        self.collectives = collectives
        self.streams = streams
        self.phase = Phase.IDLE
        #: The outermost module state, while its forward runs.
        self.active: ModuleState | None = None
        # The thread that the forward runs in that began last.
        self._thread = 0
        #: Which module states that forward, or the last one, entered and left with gradients on.
        self.forward_record: ForwardRecord[ModuleState] = ForwardRecord(None)
        #: Whether parameters may have come into the model that nobody reduces gradients of (``guards.py``).
        self.registered = False
        #: The units of which ``unsharded_parameters`` shows whole parameters now: modules then compute with these.
        self.unsharded: Collection[object] = ()
        #: Whether these get their former values back behind it.
        self.drops_writes = False
        #: Where masters hold other values than the trained ones: the context that the program entered, and what these
        #: are, for messages. None elsewhere.
        self.replaced: tuple[str, str] | None = None
        #: False under ``no_sync``, unless that reduces to shards.
        self.synchronises = True
        self.shards_gradients = shards_gradients
        #: Whether backwards left what ``Root.settle`` ends before an optimizer steps, or what no step may pass over.
        self.awaits_optimizer = False
        #: Whether an optimizer of torch's has stepped over the model, which is told of each step then.
        self.stepped = False
        # Whether every rank's backward that begins now does, whatever its graph reaches.
        self._named = False
        self.check_ranks = check_ranks
        #: What ranks compare of collectives.
        self.audit = Audit(collectives, check_ranks)
        #: Remembers what was issued, and names it in errors.
        self.recorder = streams.recorder = Recorder(collectives.rank)
        self.recorder.sender = streams
        if peers is not None:
            self.recorder.peers, self.recorder.watch = peers, Watch(self.recorder, peers, timeout_s)
        #: Issues the units' reductions, those of small ones together.
        self.reducer = Reducer(execution_order.batch_nbytes, streams, self.audit, self.recorder)
        self.module_states = tuple(module_states)
        #: Every unit, in module order. A merge moves one to another module state, and not in this list.
        self.units = tuple(unit for module_state in self.module_states for unit in module_state.units)
        self.events = events
        #: Decides which units stay gathered behind forward; None where nothing is left to decide.
        self.budget: Budget | None = None
        #: What it decided, and why: one line for people. Empty where the configuration asks for no budget.
        self.budget_reason = ""
        self._used_parameters: UsedParameters | None = None
        #: Whether backwards end with what ``finish_backward`` does. The same on all ranks.
        self.last_backward = True
        # Whether one ended without.
        self._unfinished = False
        #: Whether no backward came behind the forward that ended last, and had gradients on.
        self.unfollowed = False
        #: Whether a flat parameter's gradient may have zeros in the place of missing ones: ``Gradients.unfilled``.
        self.unfilled = False
        #: Gives None once the backward that was entered last cannot end any more.
        self.backward_may_end: Callable[[], object] = lambda: None
        self._when_given_up = partial(_tell_failed_backward, weakref.ref(self))
        #: The backward that runs.
        self.backward: BackwardPass[ModuleState] = BackwardPass(self.units, self._turn, execution_order)
        #: Whether an optimizer changed parameters inside of the forward that began last.
        self.outdated = False
        #: Finds modules and parameters that came into the model later; None where nobody looks.
        self.registrations: RegistrationGuard | None = None
        #: Collectives that were made for this model, closed with it in this order on every rank.
        self.owned = owned
        #: Trained parameters outside of units of which each rank has one of its own, such as experts.
        self.owned_locally = owned_locally
        #: Ranks that must see the same batch, as those of tensor parallelism, until they compared it; None elsewhere.
        self.same_batch = same_batch
        #: 1 where a gradient of some model that steps with this one is no finite number; None where it steps alone.
        self.find_infinities: Callable[[], torch.Tensor] | None = None
        #: Ranks that compute with other samples each, by the configuration.
        self.data_ranks = collectives.world_size if data_ranks is None else data_ranks
        #: How often the host still waits to compare ranks' norms of parameters outside of units.
        self.norms_to_compare = 3
        self.timeout_s = timeout_s
        #: Modules that ranks agreed on the use of: [Note: skipped modules].
        self.uses: Mapping[nn.Module, ModuleUse] = {}
        #: What is above the runtime, and what ends it before the communicators, called with this root on every rank;
        #: None for nothing.
        self.attached: tuple[Any, Callable[[Root], None]] | None = None
        #: Whether the backward that runs is the last of its step, and no inner module was called by itself before it,
        #: whose units it may reduce more than once.
        self.reduces_once = False
        #: Steps an optimizer over offloaded units in backwards; None where nobody asked for it.
        self.backward_step: BackwardStep | None = None
        self.recorder.when_failed = self._keep_memory
        self.execution_order = execution_order
        for module_state in self.module_states:
            module_state.root, module_state.execution_order = self, execution_order
            for unit in module_state.units:
                unit.root = self
                unit.gradients.stepper = None
        self._offload_managers: tuple[OffloadManager, ...] = tuple(
            {id(u.offload): u.offload for u in self.units if u.offloaded}.values()
        )
        self._encoding: tuple[PrecisionPlugin, ...] = tuple(
            {id(u.precision): u.precision for u in self.units if u.precision.capabilities.encodes}.values()
        )

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

    @contextmanager
    def meeting(self, operation: str, groups: Iterable[Collectives | None], told: str = "") -> Iterator[None]:
        """Communications between steps, in ``groups``, which are announced where that is done.

        ``told``: what else must be alike on all ranks, to be announced with ``operation``.
        """
        with self.recorder.during(operation):
            if self.audit.announces:
                for group in groups:
                    if group is not None:
                        self.streams.meet(group.announce, f"{operation}{told}")
            yield

    def use_streams(self, streams: CommStreams) -> None:
        """Send by ``streams`` from now on."""
        self.streams = self.reducer.streams = streams
        streams.recorder = self.recorder
        self.recorder.sender = streams

    def begin_forward(self, outermost: ModuleState, module: nn.Module) -> None:
        """The outermost forward starts."""
        if self.phase is not Phase.IDLE:
            self.abandon()
            self.refuse_ended("A forward")
        if self.recorder.peers is not None and self.recorder.peers.posted:
            self.recorder.peers.withdraw()
        if self.audit.compares and self.audit.done:
            self.audit.end()
        if self.backward_step is not None:
            self.backward_step.before_use("A forward")
        refuse_unseen_gradients(self)
        self.adopt_changes()
        for unit in self.units:
            if not unit.gathered.prepared:
                unit.gathered.prepare()
            unit.retention.expire()
            if unit.gradients.places or unit.gradients.input.claimed:
                unit.gradients.drop_unreduced()
        self.phase = Phase.FORWARD
        self._thread = threading.get_ident()
        self.outdated = self.unfollowed = False
        self.active = outermost
        self.forward_record = ForwardRecord(outermost, module, torch.is_grad_enabled())
        for unit in self.units:
            bindings = unit.gathered.bindings
            if bindings.shown is not bindings.elsewhere:
                unit.gathered.conceal()
        self.begin_gathers()
        self.execution_order.begin_forward()
        # Not where gathers begin: a CUDA graph that replays begins some, and measures nothing.
        if self.streams.waits is not None:
            self.streams.waits.begin_forward()
        for precision in self._encoding:
            precision.prepare([unit.spec for unit in self.units if unit.precision is precision], self.collectives)
        if self.events.steps:
            self.events.step_begin(module)

    def step_in_backward(self, optimizer: torch.optim.Optimizer | None, *, keeps_former: bool = False) -> None:
        """Step ``optimizer`` over offloaded units in backwards, and no other one from now on; None for none."""
        if self.backward_step is not None:
            self.backward_step.remove()
        # The optimizer, which has its hooks, may outlive the model.
        reduces_once = partial(_reduces_once, weakref.ref(self))
        given = self.rank, reduces_once
        self.backward_step = None if optimizer is None else BackwardStep(optimizer, keeps_former, *given)
        for unit in self.units:
            unit.gradients.stepper = self.backward_step

    def adopt_changes(self, *, trains: bool | None = None, all_modules: bool = False) -> None:
        """Take over changes that the user made to the model since the last forward.

        Args:
            trains: Whether trained parameters that came later are refused, or only noted; None: as grad mode is.
            all_modules: Look at all modules for them, and not only where something was registered.

        Raises:
            ParameterChangedError: a parameter was removed, replaced by one of another shape, dtype or device, tied to
                another, or came later and is trained. Other ranks are told.
        """
        try:
            looks = self.registrations if self.registered or all_modules else None
            if looks is not None:
                for unit in self.units:
                    # Views of what was gathered ahead are no changes.
                    unit.gathered.hide()
                looks.refuse_ties()
            for unit in self.units:
                unit.held.adopt_changes()
            if looks is not None:
                looks.refuse_new(trains=torch.is_grad_enabled() if trains is None else trains, anew=all_modules)
        except PolyshardError as error:
            self.recorder.post_error(error)
            raise

    def begin_gathers(self) -> None:
        """Let gathers from here on read the masters as they are now, whoever changed them."""
        if self.backward_step is not None:
            self.backward_step.before_use("A gather")
        self.streams.begin_forward()
        for offload in self._offload_managers:
            offload.begin_forward()

    def end_forward(self, output: object) -> None:
        """The outermost forward ended, and returns ``output``, which may not lie in memory of a unit."""
        try:
            self.refuse_escape(output)
        except UnshardedUseError:
            self.abandon()
            raise
        if self.active is not self.module_states[0]:
            self.backward.keep_apart(self.forward_record)
        self.active = None
        self.phase = Phase.IDLE
        self.unfollowed = torch.is_grad_enabled()
        self.execution_order.end_forward()
        self.audit.done = True
        for module_state in self.module_states:
            module_state.end_forward()
        if self.events.steps and not any(module_state.awaits_backward for module_state in self.module_states):
            self.events.step_end(self.module_states[0].module)

    def refuse_escape(self, output: object) -> None:
        """Raise UnshardedUseError if ``output`` lies in memory of a unit."""
        refuse_escape(self.units, output, "")

    def enter_backward(self) -> None:
        """A gradient reached one of the outputs."""
        if self.phase is Phase.BACKWARD:
            if self.backward_may_end() is not None:
                return
            # An earlier one raised.
            self.abandon()
        elif self.phase is not Phase.IDLE:
            self.refuse_open_stream("A backward")
        self.refuse_ended("A backward")
        if self.outdated and self.active is not None:
            refuse_outdated(self)
        self.phase = Phase.BACKWARD
        self.unfollowed = False
        self.reduces_once = self.last_backward and self.backward.reduces_once
        self.backward.accumulates = self._named or any(
            leaf.requires_grad and _torch_private.will_accumulate(leaf)
            for module_state in reversed(self.module_states)
            for unit in module_state.units
            for leaf in unit.gathered.leaves
        )
        if self.backward.accumulates:
            refuse_replaced(self)
        elif not self.last_backward:
            refuse_released(self)
        self.backward_may_end = _torch_private.queue_after_backward(self.end_backward, self._when_given_up)

    def end_inner_backward(self) -> None:
        """Reduce gradients of backwards that ended inside of the forward that runs in this thread, if one does.

        Gradients of modules that are entered came through no output, at which a module state would have
        noticed it. A module that returns has them reduced, and an optimizer that steps inside of the forward.

        Raises StateError: they are gradients of averages or of outdated values, or are to be differentiated again.
        """
        if not self.runs_here:
            return
        pending = [unit for unit in self.units if unit.gathered.pending]
        if not pending:
            return
        refuse_inner_gradients(self, pending)
        self._follow_last_forward()

    def _follow_last_forward(self) -> None:
        """A backward that came through no output, as other ranks' does that followed the last forward's record."""
        self.phase = Phase.BACKWARD
        self.backward.accumulates = True
        self.backward.begin(self.forward_record)
        self.forward_record.followed = True
        self.end_backward()

    @contextmanager
    def backward_to_named(self) -> Iterator[None]:
        """Inside, a backward to parameters that all ranks named: each takes part, whichever its graph reaches."""
        self.leave_failed_backward()
        before, self._named = self.backward_may_end, True
        try:
            yield
        finally:
            self._named = False
        if self.backward_may_end is before and self.phase is Phase.IDLE and self.forward_record.records:
            self._follow_last_forward()

    def _turn(self) -> None:
        """A backward leaves one forward, and goes on with an earlier one. For subclasses."""

    def end_backward(self) -> None:
        """All gradients of this backward have been accumulated."""
        self.backward.end()
        # In one order on all ranks, whichever of them had gradients.
        for module_state in reversed(self.module_states):
            if module_state.lacks_post_backward():
                module_state.late_post_backward()
        self.reducer.flush()
        if self.last_backward:
            self.finish_backward()
        else:
            self._unfinished = self.awaits_optimizer = True
            self.reducer.settle()
        self.reduces_once = False
        for module_state in self.module_states:
            if not module_state.entered:
                module_state.reset()
        self._decide_budget()
        # A forward that differentiates inside itself goes on.
        self.phase = Phase.IDLE if self.active is None else Phase.FORWARD
        if self.audit.compares:
            self.audit.end()
        if self.events.steps:
            self.events.step_end(self.module_states[0].module)

    def reduce_waiting(self) -> None:
        """Reduce gradients that backwards left whole, and hand them over. Every rank calls it, between backwards."""
        self.leave_failed_backward()
        self.refuse_ended("A reduction")
        self.phase = Phase.BACKWARD
        self.backward.accumulates = True
        self.end_backward()

    def finish_backward(self) -> None:
        """Wait for reductions, and hand over what they delivered. Every rank calls it."""
        used_parameters = self._counted_parameters()
        self._unfinished = False
        if used_parameters is not None:
            if self.audit.announces:
                with self.recorder.during("end of a backward", backward=True):
                    self.streams.meet(self.collectives.announce, "end of a backward")
            used_parameters.exchange(self.streams)
        self.streams.drain()
        for offload in self._offload_managers:
            offload.sync_for_step()
        if self.backward_step is not None:
            self.backward_step.end()
        if used_parameters is not None:
            used_parameters.drop_unused()
            self.unfilled = used_parameters.unfilled
        for unit in self.units:
            if unit.gradients.reduced:
                unit.gradients.end_backward()

    def settle(self) -> None:
        """End what backwards left: hand over their gradients, and let parameters that they kept be old."""
        self.awaits_optimizer = False
        self.finish()
        self.outdate()

    def finish(self) -> None:
        """End backwards that ended without ``finish_backward``, if any did. Every rank calls it."""
        if self._unfinished and self.phase is Phase.IDLE:
            self.finish_backward()

    def outdate(self) -> None:
        """Masters get other values: gather what backwards left whole for later forwards again at its next use."""
        for unit in self.units:
            unit.retention.outdate()

    def _decide_budget(self) -> None:
        decides = self.last_backward and self.synchronises and self.backward.accumulates
        if self.budget is not None and self.active is None and decides:
            decided = self.budget.decide(self.units, self.execution_order, self.collectives)
            self.budget_reason = self.budget.reason
            if decided:
                self.budget = None

    def _counted_parameters(self) -> UsedParameters | None:
        """Tells parameters that no rank used from those with a zero gradient; None where nothing is reduced."""
        if not ((self.synchronises and self.backward.accumulates) or self._unfinished):
            return None
        if not any(map(_reduced, self.units)) and not all(
            each.synchronises and each.all_reduces for each in self.module_states
        ):
            # Nothing was sent.
            return None
        if self._used_parameters is None:
            self._used_parameters = UsedParameters(self.units, self.collectives)
        return self._used_parameters

    def abandon(self) -> None:
        """Give up an unfinished forward or backward: release everything, drop its gradients. Or ``refuse_ended``."""
        # A forward of a closed model is found here, and not by a check in every step.
        if self.phase in (Phase.CLOSED, Phase.FAILED):
            self.refuse_ended("A forward")
        self.refuse_open_stream("A forward")
        self.active = None
        self._unfinished = self.reduces_once = False
        self.phase = Phase.IDLE if self.recorder.failure is None else Phase.FAILED
        self.backward.give_up()
        self.reducer.forget()
        self.streams.give_up()
        if self.backward_step is not None and self.recorder.failure is None:
            # Gradients of a communication that failed may never arrive.
            self.backward_step.give_up()
        self.reducer.discard()
        for module_state in self.module_states:
            module_state.reset()
            for unit in module_state.units:
                unit.gathered.reshard()
                unit.gradients.reduced = False
                unit.discard_gradients()

    def start_over(self) -> None:
        """As ``abandon``, and drop gradients that wait to be reduced."""
        self.abandon()
        for unit in self.units:
            unit.gradients.discard_sums()

    def tell_failed_backward(self, reference: object) -> None:
        """Let other ranks know what the backward of ``reference`` raises, if autograd gave up the one that runs.

        Modules hold the originals again: a program that catches the error may read and change them. All else waits for
        ``abandon``, since communications in flight may wait for ranks that have not heard of it.
        """
        if reference is not self.backward_may_end or self.phase is not Phase.BACKWARD:
            return
        if self.active is None:
            for unit in self.units:
                unit.gathered.conceal()
        if not _torch_private.when_backward_raises(self.recorder.post_error):
            self.recorder.post_error(StateError(f"A backward raised on rank {self.rank}, whose output has the error."))

    def leave_failed_backward(self) -> None:
        """Abandon a backward that raised: no hook ran behind it. One that still runs goes on."""
        if self.phase is Phase.BACKWARD and not _torch_private.in_backward():
            self.abandon()

    def _keep_memory(self) -> None:
        """A communication failed, and may still read and write: its memory stays, and no other one follows."""
        for unit in self.units:
            unit.keep_memory()
        self.reducer.keep_memory()
        if self.phase is Phase.IDLE:
            self.phase = Phase.FAILED

    def close(self) -> None:
        """Release the gather buffers and the collectives that were made for this model.

        Raises:
            StateError: inside a forward, a backward or ``unsharded``.
            PolyshardError: of work that ends first; everything is released all the same.
        """
        if self.phase is Phase.CLOSED:
            return
        self.leave_failed_backward()
        self.refuse_open_stream("close()")
        if self.phase not in (Phase.IDLE, Phase.FAILED) or self.unsharded:
            where = "polyshard.unsharded()" if self.unsharded else f"a {self.phase.value} of the model"
            raise StateError(f"close() was called inside {where} (rank {self.rank}). Call it between steps.")
        if self.phase is not Phase.FAILED:
            self.abandon()
        attached, self.attached = self.attached, None
        try:
            if attached is not None:
                attached[1](self)
        finally:
            if self.streams.current() is not None:
                # What was issued must have run before its communicators end.
                torch.cuda.synchronize(self.collectives.device)
            self.phase = Phase.CLOSED
            if self.recorder.watch is not None:
                self.recorder.watch.stop()
            if self.backward_step is not None:
                self.backward_step.close()
            for collectives in self.owned:
                collectives.close()

    @property
    def budget_pending(self) -> bool:
        """Whether it is still to be decided which units are kept: a step must not be captured before."""
        return self.budget is not None

    @property
    def gathered(self) -> tuple[str, ...]:
        """Names of the units whose parameters are gathered, or on their way."""
        there = (UnitState.GATHERING, UnitState.UNSHARDED)
        return tuple(u.name for u in self.units if not u.permanent and u.gathered.state in there)
