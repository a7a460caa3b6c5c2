"""A module that owns units: its hooks' work in forward and backward, and its state between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import is_not, methodcaller
from typing import TYPE_CHECKING, Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch import nn
from typing_extensions import override

from ..errors import StateError, UnshardedUseError
from ..interfaces import InputCast, OutputCast, UnitEvent, UnitOperation
from ..planning.groups import UnitRanks
from ..planning.plan import ManagedParameter, modules_called
from .activation_checkpoint import may_have_backward
from .backward import BackwardAction, ForwardRecord, Point
from .gathered import show_whole, unshard_ahead, unshard_due
from .order import ExecutionOrder
from .parameters import Shown
from .reduce import Contribution
from .states import BackwardState, Fresh, Reshard, UnitState
from .unit import Unit

if TYPE_CHECKING:
    from .root import Root


class ModuleState:
    """A module with hooks, and the units of the parameters that are its own.

    Usually one unit; more where parameters differ in dtype, or in whether they are trained. ``hooks.py`` calls it from
    the module's forward, and from the gradients of its outputs and inputs.
    """

    #: That of its model; None before a drop-in has composed the model.
    root: Root = cast("Root", None)

    def __init__(
        self,
        name: str,
        module: nn.Module,
        units: Sequence[Unit],
        *,
        input_cast: InputCast | None = None,
        output_cast: OutputCast | None = None,
        full_precision_in_eval: bool = False,
        signature: object = None,
        parent: ModuleState | None = None,
        reads_in_backward: bool = True,
        releases_after_backward: bool = True,
    ) -> None:
        """``parent``: the module state that this one was split off, see [Note: split modules]."""
        self.name = name
        self.module = module
        #: Those that have hooks: ``module``, or those that it groups.
        self.modules = modules_called(module)
        self.parent = parent
        #: The module whose mode counts, and whose inputs and outputs are cast: the parent's of a split module.
        self.governing = self.modules[0] if parent is None else parent.module
        #: Whether its backward gathers. The same on every rank, whatever hooks come later on one of them.
        self.reads_in_backward = reads_in_backward
        #: The root's: in which order module states are entered and prefetched.
        self.execution_order: ExecutionOrder[ModuleState]
        self.input_cast = input_cast
        self.output_cast = output_cast
        self.full_precision_in_eval = full_precision_in_eval
        #: Module states of equal signature can share collectives.
        self.signature = signature
        #: Whether its backwards reduce gradients, where the root does. The same on all ranks, as the next two.
        self.synchronises = True
        #: Whether reductions of its gradients are over the replicas, too, or reach owners in other groups.
        self.all_reduces = True
        #: Whether backwards release its parameters; where not, later forwards use them.
        self.releases_after_backward = self.releases_by_default = releases_after_backward
        self.own(units)
        #: Forwards of it that run: more than one where it calls itself.
        self.entered = 0
        #: Points of the backward order: where a forward left the module state, and where it first entered it.
        self.exit: Point[ModuleState] = Point(self, BackwardAction.PRE_BACKWARD)
        self.entry: Point[ModuleState] = Point(self, BackwardAction.POST_BACKWARD)
        #: Points where checkpoints entered it, by action and number of the checkpoint.
        self._checkpointed: dict[tuple[BackwardAction, int], Point[ModuleState]] = {}
        #: Record of the forward that entered it last, and whether that was the first entry in it.
        self.forward_record: ForwardRecord[ModuleState] | None = None
        self.enters_first = True
        #: Point of its post-backward: its first entry, or that of a re-entrant checkpoint.
        self.post_backward_at: Point[ModuleState] = self.entry
        #: Whether a checkpoint entered it in the forward that the backward goes back through.
        self.recomputed = False
        #: Its recomputed forwards whose backward is still to come. Weak: a graph that is dropped takes its own along.
        self.recomputations: WeakSet[object] | None = None
        #: Whether an output may bring a backward; until its gradients were taken.
        self.awaits_backward = False
        self.backward_state = BackwardState.NOT_REACHED
        #: Whether the module was training in the forward that the backward goes back through.
        self.trained_in_forward = True
        #: Whether the backward that runs goes through what another one computed.
        self.differentiated_again = False
        #: Whether some ranks compute with it, and others pass it by; and whether that ever was so.
        self.shared = self.was_shared = False
        #: Whether other ranks may have gradients where this one has none, so that it reduces with them.
        self.joins_reduction = False

    def own(self, units: Sequence[Unit]) -> None:
        """Hold ``units`` from now on, and no others."""
        self.units = tuple(units)
        #: Whether it was split off its parent, which has its units now.
        self.merged = self.parent is not None and not self.units
        for unit in self.units:
            unit.module_state = self

    def join(
        self,
        name: str,
        ranks_of: Callable[[UnitRanks], UnitRanks] | None,
        names_of: Callable[[ManagedParameter], tuple[str, ...]] | None = None,
    ) -> None:
        """Become part of a larger model, under ``name``, with its collectives where ``ranks_of`` tells them.

        ``names_of``: all names of a parameter there; None where the larger model puts one prefix before all of them.
        """
        before, self.name = self.name, name
        prefix = name.removesuffix(before).rstrip(".") if before else name
        for unit in self.units:
            own = unit.spec.module_name
            # Units that were merged keep the name of their module.
            module_name = name if own == before else f"{prefix}.{own}" if prefix else own
            unit.join(module_name, names_of or methodcaller("names_behind", prefix), ranks_of)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name or "(root)"

    @property
    def rank(self) -> int:
        return self.root.rank

    @property
    def is_split(self) -> bool:
        """Whether it was split off its parent, and is not merged."""
        return self.parent is not None and not self.merged

    @property
    def in_backward(self) -> bool:
        """Whether a backward computes its gradients."""
        return self.backward_state is BackwardState.PRE_BACKWARD

    @property
    def in_full_precision(self) -> bool:
        """Whether it computes in the master dtype, and casts nothing."""
        return self.full_precision_in_eval and not self.governing.training

    @property
    def launch_nbytes(self) -> int:
        """Bytes by which its gathers are planned, the same on all ranks; 0 where it gathers nothing."""
        return sum(unit.launch_numel * unit.dtypes.compute.itemsize for unit in self.units if not unit.permanent)

    def point_in(self, action: BackwardAction, checkpoint: int) -> Point[ModuleState]:
        """The point where ``checkpoint``, by its number in the forward, entered the module state."""
        found = self._checkpointed.get((action, checkpoint))
        if found is None:
            found = self._checkpointed[action, checkpoint] = Point(self, action, checkpoint)
        return found

    def unshard(self) -> None:
        """Issue the gathers of all units, as one communication."""
        unshard_due(self.units)

    def reshard(self, turns: bool) -> None:
        """Release units behind a forward, as their policies say. ``turns``: the backward is expected at once."""
        for unit in self.units:
            if not unit.retention.policy.releases[turns]:
                unit.gathered.hide()
            elif unit.retention.policy is Reshard.PARTLY and may_have_backward():
                unit.gathered.reshard_post_forward()
            else:
                unit.gathered.reshard()

    def end_forward(self) -> None:
        """The outermost forward ended: release units that no backward comes back to."""
        self.entered = 0
        # What is kept for backward may not depend on who computed.
        self.awaits_backward |= self.shared and torch.is_grad_enabled()
        for unit in self.units:
            if unit.gathered.state is UnitState.SHARDED:
                if unit.gathered.bindings.shown is not Shown.ORIGINALS:
                    unit.gathered.conceal()
            elif unit.gathered.fresh is Fresh.RETAINED or unit.gathered.state is UnitState.SHARDED_POST_FORWARD:
                # Whether a part is kept may not depend on this rank's outputs, as ``awaits_backward`` does: others
                # gather from their parts.
                unit.gathered.hide()
            elif not self.awaits_backward or unit.gathered.state is UnitState.GATHERING:
                unit.gathered.reshard()
            elif not self.releases_after_backward:
                unit.retention.retain()
            elif self.reads_in_backward:
                unit.gathered.hide()
            else:
                unit.gathered.reshard()

    def pre_backward(self, batches: Sequence[Sequence[ModuleState]] | None) -> None:
        """Gather the parameters again, before the first of the module's autograd nodes runs.

        ``batches``: module states that come next, to be gathered, too; None where they were issued already.
        """
        if self.backward_state is BackwardState.PRE_BACKWARD:
            for unit in self.units:
                # This output may have been computed on another stream than the first.
                unit.gathered.wait()
            return
        self.backward_state = BackwardState.PRE_BACKWARD
        for unit in self.units:
            unit.held.refuse_changes()
        reads = self.reads_in_backward
        for unit in self.units:
            if reads and unit.gathered.fresh.due:
                unshard_due(self.units)
                break
        for unit in self.units:
            if reads:
                unit.gathered.wait()
                # A checkpoint inside the module's own forward recomputes from its parameters.
                unit.gathered.show()
            for observer in unit.observers:
                observer(UnitEvent(UnitOperation.COMPUTE, unit.spec, backward=True))
        if batches is not None:
            self.prefetch(batches)

    def gather_for_others(self, batches: Sequence[Sequence[ModuleState]]) -> None:
        """Gather with the other ranks, whose backward may come through here where this one's does not.

        ``batches``: as of ``pre_backward``.
        """
        if self.backward_state is BackwardState.PRE_BACKWARD:
            return
        if self.reads_in_backward:
            self.unshard()
        self.prefetch(batches)

    def prefetch(self, batches: Sequence[Sequence[ModuleState]]) -> None:
        """Gather the module states that come next in the backward."""
        unshard_ahead(batches)

    def post_backward(self) -> None:
        """Take the gradients, release the parameters, start the reductions."""
        root = self.root
        self.recomputations = None
        # Not reached here, but a recomputation for another module state may still come through.
        keeps, self.recomputed = self.recomputed and self.backward_state is not BackwardState.PRE_BACKWARD, False
        if self.backward_state is BackwardState.PRE_BACKWARD:
            self.backward_state = BackwardState.POST_BACKWARD
        self.awaits_backward = False
        joins, self.joins_reduction = self.joins_reduction, False
        synchronises = root.synchronises and self.synchronises
        reduced: list[tuple[Contribution, list[torch.Tensor | None]]] = []
        for unit in self.units:
            for observer in unit.observers:
                observer(UnitEvent(UnitOperation.COMPUTE, unit.spec, begins=False, backward=True))
            gradients = unit.gathered.take_gradients() if unit.trainable else []
            # At C speed, as every unit asks in every backward.
            arrived = bool(gradients) and (gradients[0] is not None or any(map(is_not, gradients, repeat(None))))
            # Before the reduction takes its buffers: the two are never alive together. A forward around this backward
            # goes on with the parameters.
            if not self.releases_after_backward:
                if not self.entered:
                    unit.retention.retain()
            elif keeps:
                unit.retention.keep()
            elif not (self.entered or self.differentiated_again):
                unit.gathered.reshard()
            if arrived:
                root.backward.accumulates = True
            elif synchronises and root.backward.accumulates and self._waits(unit):
                # Earlier microbatches left gradients that nothing else would reduce.
                pass
            elif not (unit.trainable and joins and root.backward.accumulates) or unit.ranks.alone:
                # Not part of this step, or autograd.grad, which accumulates nowhere: no rank has anything to reduce.
                continue
            its = unit.gradients
            if synchronises and (self.all_reduces or not unit.ranks.defers):
                reduced.append((its.contribute(gradients, root.streams), gradients))
                its.reduced = True
            elif synchronises and unit.ranks.reduction is not None:
                reduced.append((its.contribute_among_near(gradients, root.streams), gradients))
            else:
                its.keep(gradients, root.streams)
                root.awaits_optimizer = True
        if len(reduced) == 1:
            root.reducer.reduce(*reduced[0])
        elif reduced:
            root.reducer.reduce_together(reduced)

    def _waits(self, unit: Unit) -> bool:
        """Whether gradients of earlier backwards are to be reduced in one that synchronises."""
        if self.all_reduces or not unit.ranks.defers:
            return unit.gradients.unreduced
        # Anything of its reduction is left without the second part of that.
        sums = unit.gradients.sums
        return sums.has_sum and sums.gradients is None and unit.ranks.reduction is not None

    def late_post_backward(self) -> None:
        """``post_backward`` where no gradient called it: the backward ended, or does not come through here."""
        if self.backward_state is BackwardState.NOT_REACHED and any(unit.gathered.pending for unit in self.units):
            self.refuse_unseen_backward()
        self.post_backward()

    def lacks_post_backward(self) -> bool:
        """Whether gradients arrived after ``post_backward``, or nothing called it."""
        root = self.root
        if self.backward_state is BackwardState.PRE_BACKWARD:
            return True
        reduces = root.synchronises and self.synchronises and root.backward.accumulates
        for unit in self.units:
            if unit.trainable and unit.gathered.pending:
                return True
            if reduces and (unit.gradients.unreduced if self.all_reduces else self._waits(unit)):
                return True
        return False

    def reset(self) -> None:
        """Back to the state between steps."""
        self.entered = 0
        self.recomputations = None
        self.backward_state = BackwardState.NOT_REACHED
        self.awaits_backward = False
        self.joins_reduction = self.recomputed = self.differentiated_again = False
        for unit in self.units:
            if self.releases_after_backward:
                unit.gathered.reshard()
            else:
                unit.retention.retain()
            if unit.ranks.route is not None or not self.releases_by_default:
                unit.retention.outlive()

    def keep_gathered(self, keeps: bool) -> None:
        """Whether gathered parameters keep their memory and values when they are released.

        For a backward that gathers nothing, and may need them on this rank.

        Raises StateError: the memory is the backend's, which gives it to others meanwhile.
        """
        for unit in self.units:
            if not keeps:
                unit.gathered.buffer.unpin()
            elif not unit.gathered.buffer.pin() and not unit.permanent:
                raise StateError(
                    f"Something was put on '{self.label}' after it was sharded that may compute with its parameters on "
                    f"rank {self.rank}: a hook that runs inside of its forward, or another forward. Its backward "
                    "gathers nothing, and these collectives keep no parameters for it. Put it there before sharding, "
                    "on every rank."
                )

    def refuse_unseen_backward(self) -> None:
        """Raise if gradients came while the parameters were not whole.

        Raises StateError: a backward came through no tensor that the forward returned.
        """
        if all(unit.permanent or unit.gathered.state is UnitState.UNSHARDED for unit in self.units):
            return
        raise StateError(
            f"A backward went through '{self.label}' on rank {self.rank} without coming through a tensor "
            "that its forward returned, so its parameters were not gathered and its gradients are not right. Return "
            "every tensor that leaves the forward, in a tuple, list, dict, dataclass or plain object."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise StateError(
            f"A sharded module cannot be deep-copied ({self._label_and_rank}). Copy the model before sharding it, or "
            "exchange values through a state dict: polyshard.checkpoint, or state_dict() inside polyshard.unsharded. "
            "For averaged weights, as of AveragedModel, use polyshard.optim.AveragedWeights."
        )

    @override
    def __reduce__(self) -> NoReturn:
        raise StateError(
            f"A sharded module cannot be pickled ({self._label_and_rank}). Save a state dict instead: with "
            "polyshard.checkpoint, or inside polyshard.unsharded."
        )

    @property
    def _label_and_rank(self) -> str:
        # Without a root only before the first use of a model that is composed.
        where = f", rank {self.root.rank}" if self.root is not None else ""
        return f"unit '{self.label}'{where}"


@dataclass(slots=True)
class ModuleUse:
    """Which ranks use a module in the forwards that follow, as they agreed."""

    name: str
    states: tuple[ModuleState, ...]
    """The module states inside."""
    here: bool = False
    """Whether this rank does."""
    anywhere: bool = False
    """Whether any rank does."""
    everywhere: bool = False
    """Whether all do."""


def merge_on_use(module_state: ModuleState, parent: ModuleState) -> None:
    """Give the units of a split module to ``parent`` as soon as another module reads one of their parameters.

    ``LazyParameters`` notice that: a split module may not change what a forward may do.
    """
    for unit in module_state.units:
        unit.on_lazy_use = partial(_merge, module_state, parent)


def _merge(module_state: ModuleState, parent: ModuleState, unit: Unit, module: nn.Module, key: str) -> None:
    """Another module reads ``key`` of ``module``, a parameter of ``unit``: from now on ``parent`` owns the units.

    Raises UnshardedUseError: outside of a forward and of a backward of the parent.
    """
    if not (parent.entered or parent.in_backward):
        name = next((each.names[0] for each in unit.parameters if (module, key) in each.sites), key)
        raise UnshardedUseError(
            f"The parameter '{name}' was used while it is sharded, outside of the forward of "
            f"'{parent.label}' (rank {module_state.rank}). Compute with it inside that forward, or name the "
            "method that does with polyshard.register_forward_method."
        )
    moved = module_state.units
    if moved:
        module_state.own(())
        parent.own((*parent.units, *moved))
    show_whole(moved or (unit,), parent.module.training, recomputes=False)
