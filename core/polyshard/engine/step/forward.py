"""What a module's forward calls: parameters become whole before it, and are let go of behind it.

[Note: one stage's forward]
Left to right; each arrow is one hook, those of the backward stand in ``backward.py``::

    enter ──► forward ──► leave ··· come_back ──► backward ──► inputs_done
    gather, show          hide, reshard     gather, show       reshard, reduce

Recomputation under activation checkpointing runs ``enter`` and ``leave`` inside a backward; they then show parameters
and leave everything else to ``come_back`` and what ends the recomputation. See [Note: recomputation].
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...errors import UnshardedUseError
from .. import _torch_private
from ..tensors import distinct_tensors
from .backward import input_hook, output_hook
from .boundary import SideOutputs, pass_through, pass_through_in, watch_output
from .checkpointed import Checkpointed, Region, running
from .itinerary import Act, Itinerary
from .root import root_of
from .stage import Holds, Stage, show_whole, unshard_ahead
from .step import Phase, Step
from .unit import refuse_escape


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
