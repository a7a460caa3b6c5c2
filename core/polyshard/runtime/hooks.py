"""Where tensors enter and leave a stage's forward: how a backward is noticed there, and what must not leave."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter, is_, methodcaller
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from .. import _torch_private
from ..errors import StateError, UnshardedUseError
from ..nested import distinct_tensors, iter_hidden_tensors, iter_tensors, map_tensors
from .activation_checkpoint import Checkpointed, Region, running
from .module_state import Holds, Stage, show_whole, unshard_ahead
from .order import Act, Itinerary, Mark
from .root import root_of
from .step import Phase, Step
from .unit import refuse_escape

T = TypeVar("T")
Hook = Callable[..., None]

_detached = methodcaller("detach")
#: Attributes of every module, which are nobody's results.
_TORCHS = frozenset(nn.Module().__dict__)


class Boundary(torch.autograd.Function):
    """Passes tensors through and calls ``callback`` in backward, before passing their gradients on.

    On a unit's inputs it runs once everything on the way to them has its gradient: autograd executes ready nodes in
    the reverse order of their creation, and this node was created before any of the unit's own. On an output it runs
    before any of the unit's nodes, and, unlike a tensor hook, survives in-place changes of an output that is a view.
    """

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``tensors`` as new tensors over the same memory: an in-place first operation on an input itself raises."""
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        return tuple(map(_detached, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Call back, then pass every gradient on."""
        ctx.callback()
        return (None, *gradients)


def pass_through(callback: Callable[[], None], tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``tensors``, with ``callback`` called in backward before their gradients leave."""
    passed: tuple[torch.Tensor, ...] = Boundary.apply(callback, *tensors)  # type: ignore[no-untyped-call]
    return passed


def pass_through_in(callback: Callable[[], None], value: T, tensors: list[torch.Tensor]) -> T:
    """``value`` with ``tensors``, which are distinct, passed through: each is one tensor still wherever it occurs."""
    passed = dict(zip(map(id, tensors), pass_through(callback, tensors), strict=True))
    return map_tensors(lambda tensor: passed.get(id(tensor), tensor), value)


def watch_output(output: Any, hook: Hook) -> tuple[Any, bool]:
    """``output``, with ``hook`` called before a backward goes through any tensor in it; and whether it can.

    Tensors are found in containers, and in the attributes of objects that are none. Through a leaf no backward goes on,
    and a hook on it would outlive the step.
    """
    if isinstance(output, torch.Tensor):
        if not _has_graph(output):
            return output, False
        if not output._is_view():
            _torch_private.on_gradient(output, hook)
            return output, True
    hidden = [tensor for tensor in iter_hidden_tensors(output) if _has_graph(tensor)]
    found = distinct_tensors(output, _has_graph)
    for tensor in hidden:
        _torch_private.on_gradient(tensor, hook)
    if not any(tensor._is_view() for tensor in found):
        for tensor in found:
            _torch_private.on_gradient(tensor, hook)
        return output, bool(found or hidden)
    # An in-place change of a view rewrites its history and would drop a hook on it, and backward would then read
    # released memory. The boundary's output is no view.
    return pass_through_in(hook, output, found), True


class SideOutputs:
    """Tensors that a forward leaves in attributes of its modules: the losses of a mixture's routers, say.

    A backward may enter the unit through them as through its output. Which attributes of ``modules()`` they are is
    found after the first forward, and again when there are others than then, or something in the place of nothing.
    Forwards look at those alone; whether others have come is compared at C speed.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]]) -> None:
        self._modules = modules
        self._places: list[tuple[dict[str, Any], str]] = []
        # The attributes of each module, and how many there were.
        self._attributes: list[dict[str, Any]] = []
        self._sizes = [-1]
        # Those that were nothing: where they stand, under which name, and what they were.
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._blank: list[Any] = []

    def watch(self, hook: Hook) -> bool:
        """Call ``hook`` before a backward goes through any of them; whether there is one."""
        if list(map(len, self._attributes)) != self._sizes or (
            self._keys and not all(map(is_, map(dict.get, self._holders, self._keys), self._blank))
        ):
            self._find()
        watched = False
        for attributes, key in self._places:
            for tensor in iter_tensors(attributes.get(key)):
                if _has_graph(tensor):
                    _torch_private.on_gradient(tensor, hook)
                    watched = True
        return watched

    def _find(self) -> None:
        modules = list(self._modules())
        buffers = [module._buffers for module in modules if module._buffers]
        self._attributes = [*(module.__dict__ for module in modules), *buffers]
        self._sizes = list(map(len, self._attributes))
        found = [(each, key, value) for each in self._attributes for key, value in each.items() if key not in _TORCHS]
        blank = [each for each in found if each[2] is None or (type(each[2]) in (int, float) and not each[2])]
        # Buffers are many, and nearly always stay the tensors that they are.
        held = {id(value) for each in buffers for value in each.values() if value is not None and not _has_graph(value)}
        blank += [each for each in found if id(each[2]) in held]
        self._places = [(each, key) for each, key, value in found if id(value) not in held and _may_hold_a_graph(value)]
        self._holders = [each for each, _, _ in blank]
        self._keys = [key for _, key, _ in blank]
        self._blank = [value for _, _, value in blank]


def _may_hold_a_graph(value: Any) -> bool:
    """Whether it does, or is a tensor or a container that may next time."""
    if isinstance(value, torch.Tensor) or (isinstance(value, list | dict | set | deque) and not value):
        return True
    return any(_has_graph(tensor) for tensor in iter_tensors(value))


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None


# What gradients call: where they reach a stage's outputs, and where its inputs have theirs.
#
# [Note: one stage's backward]
# ``come_back`` is called before the first of the stage's nodes runs. It lets the root begin its backward and do what the
# forward's itinerary says comes before, and the stage gather. ``inputs_done`` is called once everything on the way to the
# stage's inputs has its gradient: the root does what is left behind it, and the stage finishes. A stage without an input
# that needs a gradient is finished by the root, when the backward comes to the stage before it, or ends.
#
# Forwards inside a backward, which activation checkpointing runs again, are on the itinerary of the forward where
# ``torch.utils.checkpoint`` called them first (``checkpointed.py``). Those of another function are on none: no forward
# that other ranks know of called them. What tells that all of their gradients have come is that the inputs of each have
# theirs.


class Recomputation:
    """A forward inside a backward; alive as long as its graph, which holds what is called behind it."""


def output_hook(stage: Stage) -> Callable[..., None]:
    """What a gradient calls that reaches an output of the forward of ``stage`` that runs."""
    if root_of(stage).unsharded:
        return partial(_refuse, stage)
    if stage.holds is Holds.GIVEN_BACK:
        assert stage.host is not None
        return output_hook(stage.host)
    if not stage.full_precision_in_eval:
        return partial(come_back, stage, stage.itinerary, stage.finishes_at)
    return partial(_come_back_as, stage, stage.governing.training, stage.itinerary, stage.finishes_at)


def input_hook(stage: Stage) -> Callable[[], None]:
    """What is called when the inputs of the forward of ``stage`` that begins have their gradients."""
    if stage.itinerary is not None:
        return partial(inputs_done, stage, stage.itinerary, stage.finishes_at)
    call = Recomputation()
    stage.recomputations.add(call)
    return partial(_recomputation_done, stage, call)


def come_back(stage: Stage, itinerary: Itinerary[Stage] | None, finish: Mark[Stage], *_: Any) -> None:
    """A gradient reached an output of the forward that was on ``itinerary``; None for a recomputation's.

    ``finish``: where the stage is finished on it.
    """
    if torch.is_grad_enabled():
        raise StateError(
            f"polyshard does not support gradients of gradients: backward(create_graph=True) reached "
            f"'{stage.label}' on rank {stage.rank}. Differentiate twice outside of sharded modules."
        )
    root = root_of(stage)
    root.enter_backward()
    if itinerary is None:
        # On no way that other ranks would know of: they must recompute, too.
        stage.owes = True
    elif finish is not stage.entry:
        # Gathered where the checkpoint entered it again, on all ranks alike.
        stage.pre_backward(prefetches=False)
        return
    elif not root.arrive(itinerary, stage.exit):
        # Passed by already, on the way to a stage inside of it whose output is its own: what comes next is on its way.
        stage.pre_backward(prefetches=False)
        return
    stage.pre_backward()


def inputs_done(stage: Stage, itinerary: Itinerary[Stage], finish: Mark[Stage]) -> None:
    """The gradients of the inputs of its first forward on ``itinerary`` are there, and so are all others."""
    if not stage.in_backward:
        stage.refuse_back_door()
    if root_of(stage).arrive(itinerary, finish) or stage.in_backward:
        stage.finish()


def _recomputation_done(stage: Stage, call: Recomputation) -> None:
    if not stage.in_backward:
        stage.refuse_back_door()
    stage.recomputations.discard(call)
    if not stage.recomputations:
        stage.finish()


def _come_back_as(
    stage: Stage, training: bool, itinerary: Itinerary[Stage] | None, finish: Mark[Stage], *_: Any
) -> None:
    # Autograd saved views of the buffer that this forward computed with; the mode may have changed since.
    if stage.in_backward and training is not stage.trained_in_forward:
        raise StateError(
            f"One backward reached '{stage.label}' through a forward in training mode and one in eval "
            f"mode, which compute in different dtypes (rank {stage.rank}). Run a backward for each."
        )
    stage.trained_in_forward = training
    for unit in stage.units:
        unit.choose_buffer(training)
    come_back(stage, itinerary, finish)


def _refuse(stage: Stage, *_: Any) -> NoReturn:
    raise StateError(
        f"A backward reached an output of '{stage.label}' whose forward ran inside unsharded() on rank "
        f"{stage.rank}: its gradients would be whole and this rank's alone. Run that forward outside of "
        "unsharded(), or inside torch.no_grad()."
    )


# What a module's forward calls: parameters become whole before it, and are let go of behind it.
#
# [Note: one stage's forward]
# Left to right; each arrow is one hook, those of the backward stand in ``backward.py``::
#
# enter ──► forward ──► leave ··· come_back ──► backward ──► inputs_done
# gather, show          hide, reshard     gather, show       reshard, reduce
#
# Recomputation under activation checkpointing runs ``enter`` and ``leave`` inside a backward; they then show parameters
# and leave everything else to ``come_back`` and what ends the recomputation. See [Note: recomputation].


class Forward:
    """The forward of one stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        # Which exception was being handled when the forward began: another one behind it is the forward's own. Its id
        # alone, which no other has meanwhile: the exception would keep its frames, and these their tensors.
        self._outer_error = id(None)
        # Of the hook that leaves.
        self._leaves = 0
        self.side_outputs = SideOutputs(self._own_modules)

    def attach(self) -> None:
        """Put the hooks on the module."""
        # First and last in line: the user's own hooks, but for forward hooks added later, see whole parameters. Called
        # on errors too: nothing stays gathered.
        module = self.stage.module
        module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
        self._leaves = module.register_forward_hook(self.leave, with_kwargs=True, always_call=True).id

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the parameters whole."""
        if torch.compiler.is_compiling():
            return _hidden_enter(self, args, kwargs)
        return self._enter(args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Let go of the parameters, and wait for a backward where there can be one."""
        if torch.compiler.is_compiling():
            return _hidden_leave(self, output)
        return self._leave(output)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stage, step = self.stage, self.stage.step
        assert step is not None
        if step.unsharded:
            return args, kwargs
        recomputes = _torch_private.in_backward()
        records = torch.is_grad_enabled()
        if not recomputes:
            ahead, kept = self._begin(step, records), False
        else:
            ahead, kept = [], self._begin_again(records)
        show_whole(stage.units, stage.governing.training, recomputes=recomputes, kept=kept)
        if not stage.reads_in_backward:
            stage.keep_gathered(self._computes_otherwise())
        unshard_ahead(ahead)
        if stage.input_cast is not None and not stage.in_full_precision:
            args, kwargs = stage.input_cast(args, kwargs)
        if records and stage.holds is Holds.SHARDED and (not recomputes or self._has_graph()):
            args, kwargs = self._watch_inputs(args, kwargs)
        return args, kwargs

    def _computes_otherwise(self) -> bool:
        """Whether an embedding's forward may save parameters for backward since something was put on it."""
        module = self.stage.module
        return (
            "forward" in module.__dict__
            or type(module).forward is not nn.Embedding.forward
            or module.max_norm is not None
            # Behind ``enter``, in front of ``leave``: other hooks see pieces.
            or len(module._forward_pre_hooks) > 1
            or next(iter(module._forward_hooks), self._leaves) != self._leaves
        )

    def _begin(self, step: Step, records: bool) -> list[list[Stage]]:
        """The stage is entered; what is to be gathered ahead, as batches."""
        stage = self.stage
        # In a backward that raised, too: none runs.
        if step.phase is not Phase.FORWARD:
            root_of(stage).begin_forward(stage, stage.module)
        self._outer_error = id(sys.exception())
        stage.entered += 1
        if records:
            stage.enters_first = step.itinerary is not stage.itinerary
            stage.itinerary, stage.finishes_at = step.itinerary, stage.entry
        if stage.holds is Holds.GIVEN_BACK:
            return []
        call = running()
        if call is not None and call.region.recorded:
            self._enter_region(call.region, step.itinerary)
        elif records:
            step.itinerary.marks.append(stage.entry)
        return stage.schedule.enter(stage)

    def _enter_region(self, region: Region, itinerary: Itinerary[Stage]) -> None:
        """Note that a checkpoint computes the stage, and will again."""
        stage = self.stage
        numbers = region.enter(itinerary)
        alone = region.differentiated
        if alone is None:
            itinerary.marks.append(stage.entry)
        elif not alone.several:
            itinerary.marks.append(stage.mark_in(Act.FINISH, alone.number))
        itinerary.marks += [stage.mark_in(Act.RECOMPUTE, number) for number in numbers]

    def _again(self) -> Checkpointed | None:
        """The checkpoint that a backward computes again, if the forward that it was called in is known."""
        call = running()
        again = None if call is None else call.again
        if again is None or again.region.itinerary is None or again.region.several:
            return None
        outermost = again.region.itinerary.outermost
        # One checkpoint may call several models.
        return again if isinstance(outermost, Stage) and outermost.step is self.stage.step else None

    def _begin_again(self, records: bool) -> bool:
        """The stage is entered inside of a backward; whether that comes after it was finished for the other ranks."""
        stage, again = self.stage, self._again()
        root = root_of(stage)
        # Also where no gradient comes of it: what it gathers is released when the backward ends.
        root.enter_backward()
        if again is None:
            root.accumulate_reentrantly()
            if records:
                stage.itinerary, stage.enters_first, stage.finishes_at = None, True, stage.entry
            return False
        region = again.region
        assert region.itinerary is not None
        comes_first = root.arrive(region.itinerary, stage.mark_in(Act.RECOMPUTE, region.number))
        if records and region.reentrant:
            stage.enters_first = stage not in again.entered
            again.entered.add(stage)
            stage.itinerary, stage.finishes_at = region.itinerary, stage.mark_in(Act.FINISH, region.number)
        return not comes_first

    def _has_graph(self) -> bool:
        """Whether what a backward computes again is gone back through, and not what was computed first."""
        again = self._again()
        return not self.stage.awaits_backward if again is None else again.region.reentrant

    def _leave(self, output: Any) -> Any:
        stage, step = self.stage, self.stage.step
        assert step is not None
        records = torch.is_grad_enabled()
        if step.unsharded:
            # What torch.func differentiates adds to no parameter's gradient.
            return self._watch_output(output)[0] if records and not _torch_private.in_transform() else output
        recomputes = _torch_private.in_backward()
        if output is None:
            error = sys.exception()
            if error is not None and id(error) != self._outer_error:
                if step.active is stage and not recomputes:
                    step.recorder.tell(error)
                self._give_up(step, recomputes)
                return None
        if stage.output_cast is not None and not stage.in_full_precision:
            output = stage.output_cast(output)
        watched = False
        if records and stage.holds is not Holds.RESIDENT and (not recomputes or self._has_graph()):
            output, watched = self._watch_output(output)
        if recomputes:
            self._computed(True)
        else:
            self._end(step, output)
        stage.awaits_backward |= watched
        if not recomputes:
            self._end_itinerary(step)
            if step.active is stage and not stage.entered:
                root_of(stage).end_forward(output)
        return output

    def _end(self, step: Step, output: Any) -> None:
        """The stage is left, and keeps what its backward follows at once for."""
        stage = self.stage
        stage.entered -= 1
        if stage.entered:
            return
        outermost = step.active is stage
        turns = outermost or stage.schedule.turns_at(stage)
        for unit in stage.units:
            for observer in unit.observers:
                observer.computed(unit.spec, False)
            if unit.permanent or not unit.releases(turns):
                unit.hide()
                continue
            try:
                refuse_escape((unit,), output, stage.name)
            except UnshardedUseError:
                unit.hide()
                if outermost:
                    # No hook of an outer module will see this error and clean up.
                    root_of(stage).abandon()
                raise
            unit.reshard()

    def _end_itinerary(self, step: Step) -> None:
        stage = self.stage
        if stage.holds in (Holds.GIVEN_BACK, Holds.RESIDENT) or not torch.is_grad_enabled():
            return
        step.itinerary.marks.append(stage.exit)
        if stage.reads_in_backward:
            stage.schedule.leave(stage)

    def _give_up(self, step: Step, recomputes: bool) -> None:
        stage = self.stage
        if recomputes:
            # Usually no error: a checkpoint stops a recomputation as soon as it has what it needs.
            self._computed(True)
            return
        # Nothing was entered where the error came from beginning the forward.
        stage.entered = max(0, stage.entered - 1)
        # Other ranks may have come through. A module around this one may go on without it.
        self._end_itinerary(step)
        if stage.entered:
            return
        if step.active is stage:
            root_of(stage).abandon()
        else:
            # Whoever catches this goes on with the other ranks, which keep what is kept for a backward.
            stage.awaits_backward |= stage.holds is Holds.SHARDED and torch.is_grad_enabled()
            stage.reshard(stage.schedule.turns_at(stage))

    def _computed(self, backward: bool) -> None:
        for unit in self.stage.units:
            for observer in unit.observers:
                observer.computed(unit.spec, backward)

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.stage.enters_first:
            # Further forwards have had their gradients when the first one's inputs get theirs.
            return args, kwargs
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
            return pass_through(input_hook(self.stage), list(args)), kwargs
        found = distinct_tensors((args, kwargs), attrgetter("requires_grad"))
        if not found:
            # The end of the backward takes over: an integer input, or the first unit of the model.
            return args, kwargs
        return pass_through_in(input_hook(self.stage), (args, kwargs), found)

    def _watch_output(self, output: Any) -> tuple[Any, bool]:
        hook = output_hook(self.stage)
        output, watched = watch_output(output, hook)
        return output, self.side_outputs.watch(hook) or watched

    def _own_modules(self) -> list[nn.Module]:
        """The stage's module and those inside it that are inside of no other stage's."""
        staged = {stage.module for stage in root_of(self.stage).stages}
        found: list[nn.Module] = []
        waiting = [self.stage.module]
        while waiting:
            module = waiting.pop()
            found.append(module)
            waiting += [child for child in module.children() if child not in staged]
        return found


# torch.compile does not look inside these. Eager steps go around them, and so never import the compiler.
@_torch_private.hidden_from_compile
def _hidden_enter(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return forward._enter(args, kwargs)


@_torch_private.hidden_from_compile
def _hidden_leave(forward: Forward, output: Any) -> Any:
    return forward._leave(output)
