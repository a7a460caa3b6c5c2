"""A module that owns units, and what its forward and backward make of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn

from ...errors import StateError, UnshardedUseError
from ...interfaces import InputCast, OutputCast
from .. import _torch_private
from ..planning.managed_parameter import ManagedParameter, names_behind
from ..planning.ranks import RankGrid
from ..tensors import distinct_tensors
from .boundary import pass_through, pass_through_in
from .gathers import show_whole, unshard_ahead
from .itinerary import Act, Itinerary, Mark
from .outputs import SideOutputs, refuse_escape, watch_output
from .schedule import Schedule
from .step import Step
from .unit import Unit, UnitState


class _Recomputation:
    """One forward of a stage inside a backward, on no itinerary; alive as long as its graph."""

    __slots__ = ("__weakref__",)


class Stage:
    """A module with hooks, and the units of the parameters that are its own.

    Usually one unit; more where parameters differ in dtype, or in whether they are trained.

    The step of a stage, left to right; each arrow is one hook::

        pre_forward ──► forward ──► post_forward ··· pre_backward ──► backward ──► post_backward
        gather, install             reshard          gather                        reshard, reduce

    Recomputation under activation checkpointing runs ``pre_forward`` and ``post_forward`` inside backward; they then
    install parameters and leave everything else to ``pre_backward`` and ``post_backward``.
    """

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
        host: Stage | None = None,
    ) -> None:
        """``host``: the stage that this one is a part of, for as long as nobody else uses its parameters."""
        self.name = name
        self.module = module
        self.host = host
        # A part computes in the dtypes of its host, whose inputs and outputs are the ones that are cast.
        self._ruled_by = module if host is None else host.module
        self._gave_back = False
        #: Whether methods of the module beside its forward compute with its parameters.
        self.has_methods = False
        #: Whether its backward needs whole parameters.
        self.reads_in_backward = self._needs_parameters_in_backward()
        self.root: Step | None = None
        self.schedule: Schedule[Stage] | None = None
        self.input_cast = input_cast
        self.output_cast = output_cast
        self._full_precision_in_eval = full_precision_in_eval
        #: Stages of equal signature can share collectives.
        self.signature = signature
        self._own(units)
        self._entered = 0
        #: What a backward does where a forward left the stage, and where it first entered it.
        self.exit: Mark[Stage] = Mark(self, Act.GATHER)
        self.entry: Mark[Stage] = Mark(self, Act.FINISH)
        # That of the forward that it was entered in last, and whether that was the first time in it.
        self._itinerary: Itinerary[Stage] | None = None
        self._enters_first = True
        # Recomputations whose backward is still to come. Weak: a graph that was dropped takes its own along.
        self._outstanding: WeakSet[_Recomputation] = WeakSet()
        self._outer_error: BaseException | None = None
        self._backward_mode = True
        self._reached = False
        self._side_outputs: SideOutputs | None = None
        self.awaits_backward = False
        self.in_backward = False
        #: Other ranks may have gradients for it where this one has none, so that it must reduce with them.
        self.owes = False
        if host is not None:
            for unit in self.units:
                unit.lender = self._lend

    def _own(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        # A single rank without casts: autograd works on the originals, and backward needs no help.
        self._unmanaged = bool(self.units) and all(unit.resident for unit in self.units)
        self._managed = bool(self.units) and not self._unmanaged

    def attach(self) -> None:
        """Put the hooks on the module."""
        # First and last in line: the user's own hooks, but for forward hooks added later, see whole parameters. Called
        # on errors too: nothing stays gathered.
        self.module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        self.module.register_forward_hook(self.post_forward, with_kwargs=True, always_call=True)

    def join(
        self,
        name: str,
        grid: RankGrid | None,
        names_of: Callable[[ManagedParameter], tuple[str, ...]] | None = None,
    ) -> None:
        """Become part of a larger model, under ``name``, with its collectives where ``grid`` is given.

        ``names_of``: all names of a parameter there; None where the larger model puts one prefix before all of them.
        """
        before, self.name = self.name, name
        prefix = name.removesuffix(before).rstrip(".") if before else name
        for unit in self.units:
            own = unit.spec.module_name
            # A part that was given back keeps the name of its module.
            module_name = name if own == before else f"{prefix}.{own}" if prefix else own
            unit.join(module_name, names_of or partial(names_behind, prefix), grid)

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the parameters whole."""
        if torch.compiler.is_compiling():
            return _hidden_pre_forward(self, module, args, kwargs)
        return self._pre_forward(module, args, kwargs)

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Let go of the parameters, and wait for a backward where there can be one."""
        if torch.compiler.is_compiling():
            return _hidden_post_forward(self, module, output)
        return self._post_forward(module, output)

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        root = self.root
        assert root is not None
        if root.unsharded:
            return args, kwargs
        recomputes = _torch_private.in_backward()
        if not recomputes:
            if root.active is None or root.backward_failed:
                root.begin_forward(self, self.module)
            self._outer_error = sys.exception()
            self._entered += 1
            self.reads_in_backward = self._needs_parameters_in_backward()
            ahead = [] if self._gave_back else self._order.enter(self)
        else:
            ahead = []
        if torch.is_grad_enabled():
            self._enter_on(None if recomputes else root.itinerary)
        show_whole(self.units, self._ruled_by.training, recomputes=recomputes)
        unshard_ahead(ahead)
        if self.input_cast is not None and not self._in_full_precision:
            args, kwargs = self.input_cast(args, kwargs)
        if self._managed and torch.is_grad_enabled() and not (recomputes and self.awaits_backward):
            args, kwargs = self._watch_inputs(args, kwargs)
        return args, kwargs

    def _enter_on(self, itinerary: Itinerary[Stage] | None) -> None:
        self._enters_first = itinerary is None or itinerary is not self._itinerary
        self._itinerary = itinerary
        if itinerary is not None and not self._gave_back:
            itinerary.add(self.entry)

    def _post_forward(self, module: nn.Module, output: Any) -> Any:
        root = self.root
        assert root is not None
        if root.unsharded:
            return self._watch_output(output)[0] if torch.is_grad_enabled() else output
        recomputes = _torch_private.in_backward()
        if output is None:
            error = sys.exception()
            if error is not None and error is not self._outer_error:
                self._give_up(recomputes)
                return None
        if self.output_cast is not None and not self._in_full_precision:
            output = self.output_cast(output)
        watched = False
        if not self._unmanaged and torch.is_grad_enabled() and not (recomputes and self.awaits_backward):
            output, watched = self._watch_output(output)
        if recomputes:
            for unit in self.units:
                for observer in unit.observers:
                    observer.computed(unit.spec, True)
            self.awaits_backward |= watched
            return output
        self._entered -= 1
        outermost = root.active is self and self._entered == 0
        if self._entered == 0:
            turns = outermost or self._order.turns_at(self)
            for unit in self.units:
                for observer in unit.observers:
                    observer.computed(unit.spec, False)
                unit.hide()
                if unit.permanent:
                    continue
                if unit.releases(turns):
                    self._refuse_escape(unit, output, outermost)
                    unit.reshard()
        self.awaits_backward |= watched
        self._leave()
        if outermost:
            root.end_forward(output)
        return output

    def _leave(self) -> None:
        if self._gave_back or self._unmanaged or not torch.is_grad_enabled():
            return
        assert self.root is not None
        self.root.itinerary.add(self.exit)
        if self.reads_in_backward:
            self._order.leave(self)

    def unshard(self) -> None:
        """Issue the gathers of all units."""
        for unit in self.units:
            unit.unshard()

    def come_back(self, itinerary: Itinerary[Stage] | None, *_: Any) -> None:
        """A gradient reached an output of the forward that was on ``itinerary``; None for a recomputation's."""
        root = self.root
        assert root is not None
        if torch.is_grad_enabled():
            raise StateError(
                f"polyshard does not support gradients of gradients: backward(create_graph=True) reached "
                f"'{self.name or '(root)'}' on rank {self._rank}. Differentiate twice outside of sharded modules."
            )
        root.enter_backward()
        if itinerary is None:
            # On no way that other ranks would know of: they must recompute, too.
            self.owes = True
        else:
            root.arrive(itinerary, self.exit)
        self.pre_backward()

    def pre_backward(self) -> None:
        """Make the parameters whole again, before the first of the module's nodes runs."""
        if self.in_backward:
            for unit in self.units:
                # This output may have been computed on another stream than the first.
                unit.wait()
            return
        self.in_backward = True
        self._reached = True
        for unit in self.units:
            unit.refuse_changes()
            if self.reads_in_backward:
                unit.unshard()
        for unit in self.units:
            if self.reads_in_backward:
                unit.wait()
                # A checkpoint inside the module's own forward recomputes from its parameters.
                unit.show()
            for observer in unit.observers:
                observer.compute(unit.spec, True)
        self._prefetch(self._order.enter_backward(self))

    def pass_by(self) -> None:
        """Gather with the other ranks, whose backward may come by here where this one's went past."""
        if self.in_backward:
            return
        if self.reads_in_backward:
            self.unshard()
        self._prefetch(self._order.enter_backward(self))

    def _prefetch(self, batches: Sequence[Sequence[Stage]]) -> None:
        unshard_ahead(batches)

    def post_backward(self, itinerary: Itinerary[Stage]) -> None:
        """The gradients of the inputs of its first forward on ``itinerary`` are there, and so are all others."""
        if not self.in_backward:
            self._refuse_back_door()
        root = self.root
        assert root is not None
        if root.arrive(itinerary, self.entry) or self.in_backward:
            self.finish()

    def _post_recomputation(self, call: _Recomputation) -> None:
        if not self.in_backward:
            self._refuse_back_door()
        self._outstanding.discard(call)
        if not self._outstanding:
            self.finish()

    def finish(self) -> None:
        """Take the gradients, release the parameters, start the reductions."""
        root = self.root
        assert root is not None
        self._outstanding.clear()
        self.in_backward = False
        self.awaits_backward = False
        owes, self.owes = self.owes, False
        for unit in self.units:
            if unit.resident:
                continue
            for observer in unit.observers:
                observer.computed(unit.spec, True)
            gradients = unit.take_gradients() if unit.trainable else []
            arrived = bool(gradients) and (
                gradients[0] is not None or any(gradient is not None for gradient in gradients)
            )
            # Released before the reduction's buffers are taken: the two are never alive together.
            if not self.entered:
                unit.reshard()
            if arrived:
                root.accumulates = True
            elif root.synchronises and root.accumulates and unit.gradients.unreduced:
                # Earlier microbatches left gradients that nothing else would reduce.
                pass
            elif not (unit.trainable and owes and root.accumulates) or unit.grid.alone:
                # Not part of this step, or autograd.grad, which accumulates nowhere: no rank has anything to reduce.
                continue
            if root.synchronises:
                unit.gradients.reduce(gradients, root.bucket)
                unit.reduced = True
            else:
                unit.gradients.keep(gradients, root.lanes)

    def catch_up(self) -> None:
        """Finish where a backward went past, or has ended."""
        if not (self.in_backward or self._reached) and any(unit.pending for unit in self.units):
            self._refuse_back_door()
        self.finish()

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of all units' gather buffers."""
        return sum(unit.gathered_nbytes for unit in self.units)

    @property
    def entered(self) -> bool:
        """Whether its forward is running: a backward inside of it must not release its parameters."""
        return self._entered > 0

    def late(self) -> bool:
        """Whether gradients arrived after ``finish``, or nothing finished it."""
        root = self.root
        assert root is not None
        if self.in_backward:
            return True
        if root.synchronises and root.accumulates and any(unit.gradients.unreduced for unit in self.units):
            return True
        return any(unit.trainable and unit.pending for unit in self.units)

    @property
    def is_part(self) -> bool:
        """Whether its units are a part of what belongs to the stage around it."""
        return self.host is not None and not self._gave_back

    def _lend(self, unit: Unit, parameter: str) -> None:
        """Somebody else computes with ``parameter`` of ``unit``: from now on the host owns all units of this part."""
        host = self.host
        assert host is not None
        if not (host.entered or host.in_backward):
            raise UnshardedUseError(
                f"The parameter '{parameter}' was used while it is sharded, outside of the forward of "
                f"'{host.name or '(root)'}' (rank {self._rank}). Compute with it inside that forward, or name the "
                "method that does with polyshard.register_forward_method."
            )
        moved, self.units, self._gave_back = self.units, (), True
        if moved:
            host._own((*host.units, *moved))
            show_whole(moved, host.module.training, recomputes=False)
        else:
            # In backward, where autograd kept a stand-in.
            unit.unshard()
            unit.wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise StateError(
            f"A sharded module cannot be deep-copied ({self._described}). Copy the model before sharding it, or "
            "exchange values through a state dict."
        )

    def __reduce__(self) -> NoReturn:
        raise StateError(f"A sharded module cannot be pickled ({self._described}). Save a state dict instead.")

    def left_forward(self) -> None:
        """The outermost forward ended: release what no backward will come back to."""
        self._entered = 0
        for unit in self.units:
            unit.hide()
            if not (self.awaits_backward and self.reads_in_backward) or unit.state is UnitState.GATHERING:
                unit.reshard()

    def reset(self) -> None:
        """Back to the state between steps, whatever went wrong."""
        self._entered = 0
        self._outstanding.clear()
        self._reached = False
        self.in_backward = False
        self.awaits_backward = False
        self.owes = False
        for unit in self.units:
            unit.reshard()

    @property
    def _in_full_precision(self) -> bool:
        return self._full_precision_in_eval and not self._ruled_by.training

    def _needs_parameters_in_backward(self) -> bool:
        """Whether there is anything to gather for: torch's embedding makes its gradient from indices alone."""
        module = self.module
        return (
            type(module) is not nn.Embedding
            or module.max_norm is not None
            or self.has_methods
            or "forward" in module.__dict__
            # Two are this stage's. Others may compute with the weight.
            or len(module._forward_hooks) + len(module._forward_pre_hooks) > 2
        )

    def _gradient_hook(self) -> Callable[..., None]:
        if self.root is not None and self.root.unsharded:
            return self._refuse_backward
        if self.host is not None and self._gave_back:
            return self.host._gradient_hook()
        if not self._full_precision_in_eval:
            return partial(self.come_back, self._itinerary)
        return partial(self._come_back_as, self._ruled_by.training, self._itinerary)

    def _refuse_backward(self, *_: Any) -> NoReturn:
        raise StateError(
            f"A backward reached an output of '{self.name or '(root)'}' whose forward ran inside unsharded() on rank "
            f"{self._rank}: its gradients would be whole and this rank's alone. Run that forward outside of "
            "unsharded(), or inside torch.no_grad()."
        )

    def _come_back_as(self, training: bool, itinerary: Itinerary[Stage] | None, *_: Any) -> None:
        # Autograd saved views of the buffer that this forward computed with; the mode may have changed since.
        if self.in_backward and training is not self._backward_mode:
            raise StateError(
                f"One backward reached '{self.name or '(root)'}' through a forward in training mode and one in eval "
                f"mode, which compute in different dtypes (rank {self._rank}). Run a backward for each."
            )
        self._backward_mode = training
        for unit in self.units:
            unit.choose_buffer(training)
        self.come_back(itinerary)

    @property
    def _order(self) -> Schedule[Stage]:
        assert self.schedule is not None
        return self.schedule

    @property
    def _rank(self) -> int:
        assert self.root is not None
        return self.root.rank

    @property
    def _described(self) -> str:
        # Without a root only before the first use of a model that is composed.
        where = f", rank {self.root.rank}" if self.root is not None else ""
        return f"unit '{self.name or '(root)'}'{where}"

    def _give_up(self, recomputes: bool) -> None:
        if recomputes:
            # Usually no error: a checkpoint stops a recomputation as soon as it has what it needs.
            for unit in self.units:
                for observer in unit.observers:
                    observer.computed(unit.spec, True)
            return
        root = self.root
        assert root is not None
        # Nothing was entered where the error came from beginning the forward.
        self._entered = max(0, self._entered - 1)
        # Other ranks may have come through. A module around this one may go on without it.
        self._leave()
        if root.active is self and self._entered == 0:
            root.abandon()
        elif self._entered == 0:
            # Whoever catches this goes on with the other ranks, which keep what is kept for a backward.
            self.awaits_backward |= self._managed and torch.is_grad_enabled()
            turns = self._order.turns_at(self)
            for unit in self.units:
                unit.hide()
                if unit.releases(turns):
                    unit.reshard()

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._enters_first:
            # Further forwards have had their gradients when the first one's inputs get theirs.
            return args, kwargs
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
            return pass_through(self._boundary_hook(), list(args)), kwargs
        found = distinct_tensors((args, kwargs), attrgetter("requires_grad"))
        if not found:
            # The end of the backward takes over: an integer input, or the first unit of the model.
            return args, kwargs
        return pass_through_in(self._boundary_hook(), (args, kwargs), found)

    def _boundary_hook(self) -> Callable[[], None]:
        if self._itinerary is not None:
            return partial(self.post_backward, self._itinerary)
        call = _Recomputation()
        self._outstanding.add(call)
        return partial(self._post_recomputation, call)

    def _watch_output(self, output: Any) -> tuple[Any, bool]:
        hook = self._gradient_hook()
        output, watched = watch_output(output, hook)
        if self._side_outputs is None:
            self._side_outputs = SideOutputs(self._own_modules())
        return output, self._side_outputs.watch(hook) or watched

    def _refuse_escape(self, unit: Unit, output: Any, outermost: bool) -> None:
        try:
            refuse_escape((unit,), output, self.name, self._rank)
        except UnshardedUseError:
            if outermost:
                # No hook of an outer module will see this error and clean up.
                assert self.root is not None
                self.root.abandon()
            raise

    def _own_modules(self) -> list[nn.Module]:
        assert self.root is not None
        inner = {module for module in self.root.modules() if module is not self.module}
        found: list[nn.Module] = []
        waiting = [self.module]
        while waiting:
            module = waiting.pop()
            found.append(module)
            waiting += [child for child in module.children() if child not in inner]
        return found

    def _refuse_back_door(self) -> None:
        if all(unit.permanent or unit.state is UnitState.UNSHARDED for unit in self.units):
            return
        raise StateError(
            f"A backward went through '{self.name or '(root)'}' on rank {self._rank} without coming through a tensor "
            "that its forward returned, so its parameters were not gathered and its gradients are not right. Return "
            "every tensor that leaves the forward, in a tuple, list, dict, dataclass or plain object."
        )


# torch.compile does not look inside these. Eager steps go around them, and so never import the compiler.
@_torch_private.hidden_from_compile
def _hidden_pre_forward(
    stage: Stage, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return stage._pre_forward(module, args, kwargs)


@_torch_private.hidden_from_compile
def _hidden_post_forward(stage: Stage, module: nn.Module, output: Any) -> Any:
    return stage._post_forward(module, output)
