"""The hooks of one module state: what a module's forward calls, and what gradients call in its backward.

[Note: one module state's forward and backward]
Left to right; each arrow is one hook::

    pre_forward ──► forward ──► post_forward ··· pre_backward ──► backward ──► post_backward
    gather, show                hide, reshard    gather, show                  reshard, reduce

``pre_backward`` runs before the first of the module's autograd nodes. The root begins its backward there, and does what
the backward order has before that point; then the module state gathers. ``post_backward`` runs once the gradients of
the module's inputs are there, and so all others: the root does what is left before that point, and the module state
releases and reduces. Where no input needs a gradient, the root calls it when the backward comes to the module state
before this one, or ends.

Activation checkpointing runs forwards again inside a backward. Their ``pre_forward`` and ``post_forward`` show
parameters and leave everything else to ``pre_backward`` and ``post_backward``. Where ``torch.utils.checkpoint`` called
them first, they are on the record of that forward ([Note: recomputation]). Forwards that another function runs again
are on no record, since no forward that other ranks know of called them: all of their gradients have come when the
inputs of each have theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn

from .. import _torch_private
from ..errors import ParameterMovedError, StateError, UnshardedUseError, UnsupportedError
from ..interfaces import UnitEvent, UnitOperation
from ..nested import CopiedContainers, distinct_tensors
from .activation_checkpoint import Checkpointed, Region, Running, may_have_backward, running
from .backward import BackwardAction, ForwardRecord, Point
from .boundary import Hook, adopt_in_place, exchanged, pass_through, pass_through_in, watch_output
from .gathered import gradient_of, refuse_escape, show_whole, unshard_ahead
from .guards import compare_batch, gradients_without_graph
from .module_state import ModuleState
from .root import Root
from .states import BackwardState, Phase, Reshard

_version_of = attrgetter("_version")
_trains = attrgetter("requires_grad")


class ForwardHooks:
    """The hooks of one module state's forward."""

    def __init__(self, module_state: ModuleState, module: nn.Module) -> None:
        """``module``: the one whose forward it is."""
        self.module_state = module_state
        self.module = module
        # Id of the exception that was being handled when the forward began: another one behind it is the forward's own.
        # The exception itself would keep its frames, and these their tensors.
        self._outer_error = id(None)
        # Id of the hook that calls ``post_forward``.
        self._post_forward_id = 0
        # Of forwards that run, by depth: the caller's tensors, those that the module got for them, the sum of versions.
        self._inputs: dict[int, tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], int]] = {}
        # Of the same: containers that the module got copies of.
        self._copied: dict[int, CopiedContainers] = {}

    def attach(self) -> None:
        # First and last in line: the user's own hooks, but for forward hooks added later, see whole parameters. The
        # last one is called on errors too, so that nothing stays gathered.
        module = self.module
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        self._post_forward_id = module.register_forward_hook(self.post_forward, with_kwargs=True, always_call=True).id

    @_torch_private.uncompiled
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the parameters, and let the module see them whole."""
        if torch.compiler.is_dynamo_compiling():
            args, kwargs = _hidden(self, "_pre_forward", args, kwargs)
            return args, kwargs
        return self._pre_forward(args, kwargs)

    @_torch_private.uncompiled
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Release the parameters, and watch for a backward where there can be one."""
        if torch.compiler.is_dynamo_compiling():
            return _hidden(self, "_post_forward", output)
        return self._post_forward(output)

    def _pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module_state, root = self.module_state, self.module_state.root
        if root.unsharded:
            self._refuse_pieces(root.unsharded)
            return args, kwargs
        given = args, kwargs
        recomputes = _torch_private.backward_number() != _torch_private.NO_BACKWARD
        records = torch.is_grad_enabled()
        if _torch_private.transforms_active():
            served = _torch_private.transforms_leave_graph()
            with _torch_private.outside_of_transforms():
                self._gather(root, records, recomputes, served, args, kwargs)
        else:
            self._gather(root, records, recomputes, True, args, kwargs)
        if module_state.input_cast is not None and not module_state.in_full_precision:
            args, kwargs = module_state.input_cast(args, kwargs)
        if records and module_state.units and (not recomputes or self._has_graph()):
            args, kwargs = self._watch_inputs(args, kwargs)
        # Nearly all modules get one tensor, or one and plain values.
        if kwargs or len(args) != 1 or type(args[0]) is not torch.Tensor:
            self._note_copies(given, args, kwargs)
        return args, kwargs

    def _gather(
        self, root: Root, records: bool, recomputes: bool, served: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Enter the module state, show it whole, and gather what is used next; refuse what is not ``served``."""
        module_state = self.module_state
        ahead: Sequence[Sequence[ModuleState]] = ()
        kept = False
        if recomputes:
            kept = self._begin_recomputation(records)
        elif self._begin(root, records, args, kwargs):
            ahead = module_state.execution_order.enter(module_state)
        if not served:
            self._refuse_transforms()
        show_whole(module_state.units, module_state.governing.training, recomputes=recomputes, kept=kept)
        if not module_state.reads_in_backward:
            module_state.keep_gathered(self._computes_otherwise())
        if ahead:
            unshard_ahead(ahead)

    def _refuse_transforms(self) -> NoReturn:
        raise UnsupportedError(
            f"torch.func (grad, vjp, jacrev, hessian, nested jvp) called '{self.module_state.label}', a "
            f"{type(self.module).__name__} that is sharded (rank {self.module_state.rank}): it differentiates by a "
            "graph of its own, for which nothing is gathered. Use torch.autograd.grad(create_graph=True), "
            "torch.func.jvp or jacfwd, or call it inside of 'with polyshard.unsharded(model)'."
        )

    def _note_copies(
        self, given: tuple[tuple[Any, ...], dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Let ``post_forward`` write into containers of ``given`` what the module writes into copies of them."""
        before = *given[0], *given[1].values()
        passed = *args, *map(kwargs.get, given[1])
        if any(
            one is not other and not isinstance(one, torch.Tensor) for one, other in zip(before, passed, strict=True)
        ):
            copied = CopiedContainers(before, passed)
            if copied:
                self._copied[self.module_state.entered] = copied

    def _refuse_pieces(self, whole: Collection[object]) -> None:
        """Raise inside of ``unsharded`` of another module, where the units in ``whole`` alone are whole."""
        holder = self.module_state
        while holder.merged and holder.parent is not None:
            holder = holder.parent
        if any(unit.ranks.owner is not None and unit not in whole for unit in holder.units):
            raise UnshardedUseError(
                f"'{self.module_state.label}' was called inside of polyshard.unsharded() of another module (rank "
                f"{self.module_state.rank}), while its own parameters are sharded. Open unsharded() of a module that "
                "has both inside, or call it outside of the context."
            )

    def enter_for_others(self) -> None:
        """Gather as ``pre_forward`` does: other ranks run this forward, and this one passes it by."""
        root = self.module_state.root
        self._gather(root, torch.is_grad_enabled(), False, True, (), {})

    def leave_for_others(self) -> None:
        """Release as ``post_forward`` does."""
        root = self.module_state.root
        self._end(root, None)
        self._end_record(root)

    def _computes_otherwise(self) -> bool:
        """Whether an embedding's forward may save parameters for backward, since something was put on it."""
        module = self.module
        return (
            "forward" in module.__dict__
            or type(module).forward is not nn.Embedding.forward
            or module.max_norm is not None
            # Behind ``pre_forward``, in front of ``post_forward``: other hooks see shards.
            or len(module._forward_pre_hooks) > 1
            or next(iter(module._forward_hooks), self._post_forward_id) != self._post_forward_id
        )

    def _begin(self, root: Root, records: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note that the module state is entered; returns whether that is a place in the execution order."""
        module_state = self.module_state
        # In a backward that raised, too: none runs.
        if root.phase is not Phase.FORWARD:
            if root.same_batch is not None:
                compare_batch(root, self.module, args, kwargs)
            root.begin_forward(module_state, self.module)
        self._outer_error = id(sys.exception())
        module_state.entered += 1
        if records:
            module_state.enters_first = root.forward_record is not module_state.forward_record
            module_state.forward_record, module_state.post_backward_at = root.forward_record, module_state.entry
        here: Running | None = None
        if _torch_private.hooks_of_saved_tensors(True) is not None or not _torch_private.forward_mode_enabled():
            # Noted as where it runs again, whatever comes of it.
            here = running(records=root.forward_record.records)
        if module_state.merged:
            return False
        if here is not None and here.call.region.recorded:
            self._enter_region(here.call.region, root.forward_record)
        elif records:
            root.forward_record.points.append(module_state.entry)
        return True

    def _enter_region(self, region: Region, forward_record: ForwardRecord[ModuleState]) -> None:
        """Note that a checkpoint computes the module state, and will compute it again."""
        module_state = self.module_state
        numbers = region.enter(forward_record)
        alone = region.differentiated
        if alone is None:
            forward_record.points.append(module_state.entry)
        elif not alone.several:
            forward_record.points.append(module_state.point_in(BackwardAction.POST_BACKWARD, alone.number))
        forward_record.points += [module_state.point_in(BackwardAction.RECOMPUTE, number) for number in numbers]

    def _recomputed_call(self) -> Checkpointed | None:
        """The checkpointed call that a backward runs again, if the forward that it was called in is known."""
        here = running()
        again = None if here is None else here.again
        if again is None or again.region.forward_record is None or again.region.several:
            return None
        outermost = again.region.forward_record.outermost
        # One checkpoint may call several models.
        return again if isinstance(outermost, ModuleState) and outermost.root is self.module_state.root else None

    def _begin_recomputation(self, records: bool) -> bool:
        """Note that a backward enters the module state; returns whether its post-backward came on other ranks."""
        module_state, again = self.module_state, self._recomputed_call()
        root = module_state.root
        # Also where no gradient comes of it: what it gathers is released when the backward ends.
        root.enter_backward()
        if again is None:
            root.backward.accumulate_reentrantly()
            if records:
                module_state.forward_record, module_state.enters_first, module_state.post_backward_at = (
                    None,
                    True,
                    module_state.entry,
                )
            return False
        region = again.region
        assert region.forward_record is not None
        comes_first = root.backward.arrive(
            region.forward_record, module_state.point_in(BackwardAction.RECOMPUTE, region.number)
        )
        if records and region.reentrant:
            module_state.enters_first = module_state not in again.entered
            again.entered.add(module_state)
            module_state.forward_record, module_state.post_backward_at = (
                region.forward_record,
                module_state.point_in(BackwardAction.POST_BACKWARD, region.number),
            )
        return not comes_first

    def _has_graph(self) -> bool:
        """Whether a backward goes through what it computes again, and not through what the forward computed."""
        again = self._recomputed_call()
        return not self.module_state.awaits_backward if again is None else again.region.reentrant

    def _post_forward(self, output: Any) -> Any:
        module_state, root = self.module_state, self.module_state.root
        records = torch.is_grad_enabled()
        if root.unsharded:
            # What torch.func differentiates adds to no parameter's gradient.
            return self._watch_output(output)[0] if records and not _torch_private.in_transform() else output
        recomputes = _torch_private.backward_number() != _torch_private.NO_BACKWARD
        inputs = self._inputs.pop(module_state.entered, None)
        if self._copied:
            copied = self._copied.pop(module_state.entered, None)
            if copied is not None:
                copied.write_back()
        if output is None:
            error = sys.exception()
            if error is not None and id(error) != self._outer_error:
                if root.active is module_state and not recomputes:
                    root.recorder.post_error(error)
                self._give_up(root, recomputes)
                return None
        if module_state.output_cast is not None and not module_state.in_full_precision:
            output = module_state.output_cast(output)
        watched = False
        if records and (not recomputes or self._has_graph()):
            output, watched = self._watch_output(output)
            if inputs is not None and not recomputes:
                given, passed, version = inputs
                # Nearly all modules have one input: no list is made for it.
                if (given[0]._version if len(given) == 1 else sum(map(_version_of, given))) != version:
                    watched |= adopt_in_place(given, passed, output_hook(module_state))
        if recomputes:
            self._computed(True)
        else:
            self._end(root, output)
        module_state.awaits_backward |= watched
        if not recomputes:
            self._end_record(root)
            if root.active is module_state and not module_state.entered:
                root.end_forward(output)
        return output

    def _end(self, root: Root, output: Any) -> None:
        """The module state is left, and keeps what its backward follows at once for."""
        module_state = self.module_state
        module_state.entered -= 1
        if module_state.entered:
            return
        outermost = root.active is module_state
        turns = outermost or module_state.execution_order.turns_at(module_state)
        for unit in module_state.units:
            # As ``gathered.pending``, without a call: a backward inside of the forward came through no output.
            if unit.trainable and list(map(gradient_of, unit.gathered.leaves)) != unit.gathered.no_gradients:
                root.end_inner_backward()
            for observer in unit.observers:
                observer(UnitEvent(UnitOperation.COMPUTE, unit.spec, begins=False))
            stays = not unit.retention.policy.releases[turns]
            try:
                if unit.packed:
                    unit.gathered.refuse_moved_views()
                if not stays:
                    refuse_escape((unit,), output, module_state.name)
            except (ParameterMovedError, UnshardedUseError):
                unit.gathered.hide()
                if outermost:
                    # No hook of an outer module will see this error and clean up.
                    root.abandon()
                raise
            if stays:
                unit.gathered.hide()
            elif unit.retention.policy is Reshard.PARTLY and may_have_backward():
                with _torch_private.outside_of_transforms() if _torch_private.transforms_active() else nullcontext():
                    unit.gathered.reshard_post_forward()
            else:
                unit.gathered.reshard()

    def _end_record(self, root: Root) -> None:
        module_state = self.module_state
        if module_state.merged or not torch.is_grad_enabled():
            return
        root.forward_record.points.append(module_state.exit)

    def _give_up(self, root: Root, recomputes: bool) -> None:
        module_state = self.module_state
        if recomputes:
            # Usually no error: a checkpoint stops a recomputation as soon as it has what it needs.
            self._computed(True)
            return
        # Nothing was entered where the error came from beginning the forward.
        module_state.entered = max(0, module_state.entered - 1)
        # Other ranks may have come through. A module around this one may go on without it.
        self._end_record(root)
        if module_state.entered:
            return
        if root.active is module_state:
            root.abandon()
        else:
            # Whoever catches this goes on with the other ranks, which keep what is kept for a backward.
            module_state.awaits_backward |= bool(module_state.units) and torch.is_grad_enabled()
            module_state.reshard(module_state.execution_order.turns_at(module_state))

    def _computed(self, backward: bool) -> None:
        for unit in self.module_state.units:
            for observer in unit.observers:
                observer(UnitEvent(UnitOperation.COMPUTE, unit.spec, begins=False, backward=backward))

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.module_state.enters_first:
            # Further forwards have had their gradients when the first one's inputs get theirs.
            return args, kwargs
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
            found: Sequence[torch.Tensor] = args
            args = passed = pass_through(input_hook(self.module_state), list(args))
            version = found[0]._version
        else:
            found = distinct_tensors((args, kwargs), _trains)
            if not found:
                # The end of the backward takes over: an integer input, or the first unit of the model.
                return args, kwargs
            passed = pass_through(input_hook(self.module_state), found)
            args, kwargs = exchanged(found, passed, (args, kwargs))
            version = sum(map(_version_of, found))
        self._inputs[self.module_state.entered] = found, passed, version
        return args, kwargs

    def _watch_output(self, output: Any) -> tuple[Any, bool]:
        return watch_output(output, output_hook(self.module_state))


# torch.compile does not look inside. Eager steps go around it, and so never import the compiler.
@_torch_private.hidden_from_compile
def _hidden(forward: ForwardHooks, method: str, *args: Any) -> Any:
    return getattr(forward, method)(*args)


class Recomputation:
    """A forward inside a backward; alive as long as its graph, which holds the hook of its inputs."""


def output_hook(module_state: ModuleState) -> Hook:
    """The hook for gradients of an output of the forward of ``module_state`` that runs."""
    root = module_state.root
    if root.unsharded:
        return partial(_refuse, module_state)
    if module_state.merged:
        assert module_state.parent is not None
        return output_hook(module_state.parent)
    if not module_state.full_precision_in_eval:
        return partial(pre_backward, module_state, module_state.forward_record, module_state.post_backward_at)
    return partial(
        _pre_backward_in_mode,
        module_state,
        module_state.governing.training,
        module_state.forward_record,
        module_state.post_backward_at,
    )


def input_hook(module_state: ModuleState) -> Hook:
    """The hook for the time when the inputs of the forward that begins have their gradients."""
    if module_state.forward_record is not None:
        return partial(post_backward, module_state, module_state.forward_record, module_state.post_backward_at)
    call = Recomputation()
    if module_state.recomputations is None:
        module_state.recomputations = WeakSet()
    module_state.recomputations.add(call)
    return partial(_recomputation_done, module_state, call)


def pre_backward(
    module_state: ModuleState,
    forward_record: ForwardRecord[ModuleState] | None,
    post_backward_at: Point[ModuleState],
    *gradients: Any,
) -> Any:
    """A gradient reached an output of a forward.

    Args:
        module_state: Whose forward.
        forward_record: The record of that forward; None for a recomputation that is on none.
        post_backward_at: Point of the module state's post-backward on it.
        gradients: Those of its outputs, as one tuple, where the hook may replace them.

    Returns:
        What replaces them; without them, the hook for what takes their place; None where nothing does.
    """
    root = module_state.root
    # Nearly always another module's output was first.
    if root.phase is not Phase.BACKWARD or root.backward_may_end() is None:
        root.enter_backward()
    again = torch.is_grad_enabled()
    if again and root.backward.accumulates:
        raise gradients_without_graph(module_state.label, module_state.rank)
    batches: Sequence[Sequence[ModuleState]] | None = None
    if forward_record is None:
        # On no record that other ranks know of: they must recompute, too.
        module_state.joins_reduction = True
    elif post_backward_at is module_state.entry:
        # None on the way to an inner module that returned the same tensor.
        batches = root.backward.arrive_at(forward_record, module_state.exit)
    # Otherwise gathered where the checkpoint entered it again, on all ranks alike.
    module_state.pre_backward(batches)
    if not again:
        return None
    left = partial(_when_differentiated_again, module_state)
    return pass_through_in(left, gradients[0], distinct_tensors(gradients, _trains)) if gradients else left


def pre_backward_again(module_state: ModuleState, *_: Any) -> None:
    """A backward comes to what one with ``create_graph=True`` computed in the module state's backward.

    Threads count the nodes that they create by themselves, so autograd may run these behind some of the forward's. The
    parameters stay whole until this backward ends.
    """
    root = module_state.root
    root.enter_backward()
    module_state.differentiated_again = True
    module_state.pre_backward(None)


def _when_differentiated_again(module_state: ModuleState, *_: Any) -> Hook | None:
    return partial(pre_backward_again, module_state) if torch.is_grad_enabled() else None


def post_backward(
    module_state: ModuleState, forward_record: ForwardRecord[ModuleState], post_backward_at: Point[ModuleState]
) -> Hook | None:
    """The gradients of the inputs of the first forward on ``forward_record`` are there, and so are all others."""
    root = module_state.root
    if root.phase is Phase.FORWARD and module_state.entered:
        # Inside of this forward, and through no output of it: gradients are reduced when the module returns.
        return None
    if module_state.backward_state is not BackwardState.PRE_BACKWARD:
        module_state.refuse_unseen_backward()
    if (
        root.backward.arrive(forward_record, post_backward_at)
        or module_state.backward_state is BackwardState.PRE_BACKWARD
    ):
        module_state.post_backward()
    return partial(pre_backward_again, module_state) if torch.is_grad_enabled() else None


def _recomputation_done(module_state: ModuleState, call: Recomputation) -> Hook | None:
    if not module_state.in_backward:
        module_state.refuse_unseen_backward()
    if module_state.recomputations is not None:
        module_state.recomputations.discard(call)
    if not module_state.recomputations:
        module_state.post_backward()
    return _when_differentiated_again(module_state)


def _pre_backward_in_mode(
    module_state: ModuleState,
    training: bool,
    forward_record: ForwardRecord[ModuleState] | None,
    post_backward_at: Point[ModuleState],
    *gradients: Any,
) -> Any:
    # Autograd saved views of the buffer that this forward computed with; the mode may have changed since.
    if module_state.in_backward and training is not module_state.trained_in_forward:
        raise StateError(
            f"One backward reached '{module_state.label}' through a forward in training mode and one in eval "
            f"mode, which compute in different dtypes (rank {module_state.rank}). Run a backward for each."
        )
    module_state.trained_in_forward = training
    for unit in module_state.units:
        unit.gathered.choose_buffer(training)
    return pre_backward(module_state, forward_record, post_backward_at, *gradients)


def _refuse(module_state: ModuleState, *_: Any) -> NoReturn:
    raise StateError(
        f"A backward reached an output of '{module_state.label}' whose forward ran inside unsharded() on rank "
        f"{module_state.rank}: its gradients would be whole and this rank's alone. Run that forward outside of "
        "unsharded(), or inside torch.no_grad()."
    )
