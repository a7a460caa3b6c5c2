"""What a module becomes a subclass of by ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn, cast

import torch
from polyshard.errors import ConfigError, ConfigTypeError, StateError, StepAssertionError
from polyshard.extension import Fresh, ModuleState, Phase, Unit, UnitState, in_backward, root_of, unshard_due
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from typing_extensions import override

from . import _torch_private
from ._collectives import AllGather, ReduceScatter
from ._state import State, outermost, state_of, states_in


class UnshardHandle(TorchUnshardHandle):
    """What ``FSDPModule.unshard(async_op=True)`` returns."""

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self._units: Sequence[Unit] = units

    @override
    def wait(self) -> None:
        """Order compute after the gather, and let the module hold whole parameters."""
        units, self._units = self._units, ()
        for unit in units:
            if unit.gathered.fresh.due:
                # A forward used it and let go of it.
                continue
            unit.gathered.wait()
            unit.gathered.hold()


class GradientReductionHandle(_torch_private.GradientReductionHandle):  # type: ignore[misc]
    """What ``FSDPModule.finalize_backward(async_op=True)`` returns."""

    def __init__(self, state: State | None = None) -> None:
        self._state = state

    def wait(self) -> None:
        """Wait for the reductions, and let gradients appear. Every rank calls it, in the same order.

        Raises:
            StateError: ``reset_iter_state()`` gave the reductions up.
        """
        state, self._state = self._state, None
        if state is None:
            return
        root = outermost(state, "GradientReductionHandle.wait()")
        if state.finalizing is not self:
            raise StateError(
                f"This gradient reduction handle was invalidated by reset_iter_state() (rank {root.rank}): there are "
                "no gradients to wait for. Run the iteration again."
            )
        state.finalizing = None
        root.finish()


class FSDPModule(TorchFSDPModule):
    """The methods of a module that was given to ``fully_shard``. Of modules of one list, each acts on all of them.

    Those that say so do nothing, since the engine decides by itself what they are for. Programs recognise such modules
    by torch's class, which has no method here that this one lacks.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the class that the module had before: a slice of a ``Sequential`` is made by its class."""
        original: Any = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    @override
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module, not those of other sharded modules inside.

        Until ``reshard()`` or its next forward the module holds whole parameters in compute dtype. That forward makes
        no gather of its own: what an optimizer wrote in between is not in it. Nothing where they are whole already.
        What is written into whole parameters is lost with them.

        Args:
            async_op: Return at once, with a handle whose ``wait()`` shows the parameters. A forward waits by itself.

        Raises:
            StateError: the parameters have no memory yet, or inside of ``polyshard.unsharded``.
            DeviceError: they are elsewhere than they compute.
        """
        state = _state(self)
        module_state, units = state.module_state, state.units
        if module_state is not None:
            root = root_of(module_state)
            root.leave_failed_backward()
            root.refuse_ended("unshard()")
            if root.unsharded:
                raise StateError(
                    f"unshard() was called inside of polyshard.unsharded (rank {root.rank}), where parameters are "
                    "whole. Leave the context first."
                )
            rests = root.phase is Phase.IDLE
            if rests:
                root.begin_gathers()
            for unit in units:
                unit.held.take_over()
                unit.held.require_values("unshard()")
                if rests and unit.gathered.fresh is not Fresh.AHEAD:
                    unit.held.adopt_changes()
                    if unit.gathered.state is UnitState.SHARDED_POST_FORWARD:
                        # The next forward may use what is gathered now, behind an optimizer's step.
                        unit.gathered.reshard()
                if not unit.gathered.prepared:
                    unit.gathered.prepare()
                unit.gathered.choose_buffer(module_state.governing.training)
            unshard_due(units)
            for unit in units if rests else ():
                if unit.gathered.fresh is Fresh.NOW and not unit.permanent:
                    unit.gathered.fresh = Fresh.AHEAD
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    @override
    def reshard(self) -> None:
        """Release the whole parameters of this module, and hold sharded ones again.

        Raises:
            ParameterChangedError: whole ones were replaced or written to.
        """
        module_state = _state(self).module_state
        if module_state is not None:
            _state(self).take_over()
            for unit in module_state.units:
                unit.gathered.refuse_lost_writes()
                unit.gathered.reshard()

    @override
    def reset_iter_state(self) -> None:
        """Give up a forward or backward that raised, and drop gradients that wait to be reduced.

        The next forward gives it up by itself, and keeps what earlier backwards left to be reduced.

        Raises:
            StateError: this is not the root FSDP module.
        """
        state = _state(self)
        outermost(state, "reset_iter_state").start_over()
        state.finalizing = None

    @override
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients, from now on; where not, they wait whole on this rank, and add up.

        The first backward after that reduces the sum, whether or not it comes through the module. All ranks set the
        same.

        Args:
            requires_gradient_sync: Sets ``set_requires_all_reduce``, too.
            recurse: Whether to set it for sharded modules inside, too.
        """
        for module_state in _module_states(self, recurse):
            module_state.synchronises = module_state.all_reduces = bool(requires_gradient_sync)

    @override
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are released after forward, from now on.

        Raises:
            ConfigError: it is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}. Give True or False."
            )
        for state in _states(self, recurse):
            state.set_reshard(reshard_after_forward)

    @override
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's gradients over ranks by ``factor`` instead of the number of ranks.

        Not of other sharded modules inside.

        Raises:
            ConfigError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ConfigError(f"set_gradient_divide_factor got {factor!r}. Give a number above 0.")
        _communicate(self, factor=float(factor))

    @override
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    @override
    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the present stream wait for ``event``, behind which gathers of the next forward begin."""
        event.wait()

    @override
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether backwards of the whole model end by waiting for reductions, from now on.

        Where not, gradients appear, and hooks behind their accumulation run, at the end of the next backward that is
        the last, or when an optimizer of ``torch.optim`` is about to step. Nothing while
        ``set_manual_backward_finalization(True)`` holds.
        """
        for state in dict.fromkeys(each.of_model[0] for each in _states(self, True)):
            state.is_last_backward = bool(is_last_backward)
            state.choose_end()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether ``finalize_backward()`` ends backwards of the whole model, from now on. Of torch 2.15.

        Raises:
            StateError: this is not the root FSDP module.
        """
        state = _state(self)
        outermost(state, "set_manual_backward_finalization")
        state.ends_by_hand = bool(enabled)
        state.choose_end()

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what backwards left whole, and let gradients appear. Of torch 2.15. Every rank calls it.

        Args:
            async_op: Return while reductions go on, with a handle whose ``wait()`` lets gradients appear. What comes
                before that finds those of before.

        Raises:
            StateError: this is not the root FSDP module, it is inside of a forward or backward, or the last handle was
                not waited for.
        """
        state = _state(self)
        root = outermost(state, "finalize_backward")
        if in_backward() or root.phase is Phase.FORWARD:
            raise StateError(
                f"finalize_backward must be called after backward completes (rank {root.rank}), and not by a hook, nor "
                "inside of a forward."
            )
        if state.finalizing is not None:
            raise StateError(
                "The previous gradient reduction must be waited on before finalizing backward again (rank "
                f"{root.rank}). Call wait() of what finalize_backward(async_op=True) returned."
            )
        root.last_backward = False
        try:
            root.reduce_waiting()
        finally:
            state.choose_end()
        state.finalizing = handle = GradientReductionHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether whole parameters keep their memory, and so its address, where they are released. Of torch 2.15.

        Nothing is read there that is not gathered anew.

        Args:
            recurse: Whether to set it for sharded modules inside, too.
        """
        for state in _states(self, recurse):
            for unit in state.units:
                unit.gathered.keep_buffer(bool(keep))

    @override
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether reductions are over replicas, too, from now on; where not, this rank keeps its shard of the sum.

        The first backward after that adds it up over the replicas, whether or not it comes through the module. Nothing
        on a mesh without replicas. All ranks set the same.
        """
        for module_state in _module_states(self, recurse):
            module_state.all_reduces = bool(requires_all_reduce)

    @override
    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backwards release parameters, from now on; where not, later forwards use them without a gather.

        They are gathered again where an optimizer of ``torch.optim`` with parameters of the model stepped meanwhile, or
        a state was loaded. Values that were written otherwise are not seen, as in FSDP2: call ``reshard()``. All ranks
        set the same.
        """
        for module_state in _module_states(self, recurse):
            module_state.releases_after_backward = bool(reshard_after_backward)

    @override
    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """In forwards gather ``modules`` of this model right behind this one, in this order, each by its own launch.

        Nothing for an empty list: there and elsewhere the order that the engine recorded decides. All ranks set the
        same.

        Raises:
            ConfigError: some of ``modules`` are no ``FSDPModule``.
        """
        state = _state(self)
        state.forward_hints = _hinted(modules)
        state.hint()

    @override
    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """As ``set_modules_to_forward_prefetch``, in backwards, where embeddings are left out: they need no weight.

        Raises:
            ConfigError: some of ``modules`` are no ``FSDPModule``.
        """
        state = _state(self)
        state.backward_hints = _hinted(modules)
        state.hint()

    @override
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether what ``set_custom_reduce_scatter`` got is called for sums, which are divided by themselves.

        Else nothing: which operation makes a mean is the collectives'.
        """
        _communicate(self, sums=bool(enable))

    @override
    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters that no rank had a gradient of have zeros for one behind a backward that came through
        their module, and not None.

        Ranks may use different parameters in any case: all take part in reductions.
        """
        for state in _states(self, recurse):
            state.fills_unused = bool(reduce_scatter_unused_params)
            state.apply()

    @override
    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Nothing: two reductions are alive at most.

        Raises:
            ConfigTypeError: it is no int.
            ConfigError: it is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise ConfigTypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}. Give 1 or more."
            )
        if max_input_buffers < 1:
            raise ConfigError(f"max_input_buffers must be a positive int, got {max_input_buffers}.")

    @override
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Nothing: reductions have a communicator of their own."""
        _state(self)

    @override
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing: an embedding is not gathered for its backward, and everything else is."""
        _state(self)

    @override
    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Nothing: large gathers use memory that NCCL has registered."""
        _state(self)

    @override
    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Nothing, as ``set_allocate_memory_from_process_group_for_comm``."""
        _state(self)

    @override
    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing: gathers are asynchronous. Programs call torch's private method of this name."""
        _state(self)

    @override
    def _get_fsdp_state(self) -> Any:
        """For programs that call torch's private method of this name, as ``model._get_fsdp_state()._lazy_init()``."""
        return _state(self)

    @override
    def set_custom_all_gather(self, comm: AllGather | None) -> None:
        """Gather this module's parameters, not those of other sharded modules inside, by ``comm`` from now on.

        It allocates the memory of each gather, and is called for all parameters together, on the stream that gathers.
        Ranks that are one to a shard gather nothing. None: as the engine gathers. All ranks set the same.

        Raises:
            ConfigTypeError: ``comm`` cannot be called, or allocates nothing.
            ConfigError: the parameters lie on several meshes.
        """
        _communicate(self, all_gather=comm)

    @override
    def set_custom_reduce_scatter(self, comm: ReduceScatter | None) -> None:
        """Reduce this module's gradients by ``comm`` from now on; else as ``set_custom_all_gather``.

        Replicas are the engine's: their mean follows.
        """
        _communicate(self, reduce_scatter=comm)

    @override
    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], object] | None, *, stream: Any = None) -> None:
        """Call ``hook`` with this rank's part of this module's reduced gradients, in each backward that reduces them.

        Parameters lie in it one behind the other. What it writes there arrives in ``.grad``. It is called behind the
        reduction over replicas, where there are some, and on all ranks in the same order.

        Args:
            hook: None for none.
            stream: Call it there, and let reductions that follow wait for it. None: on the stream that reduces.

        Raises:
            ConfigTypeError: ``hook`` cannot be called.
            ConfigError: ``stream`` is given on a mesh with replicas, or the parameters lie on several meshes.
        """
        _communicate(self, hook=hook, stream=stream)

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        inside = set(cast("nn.Module", self).modules())
        states = list(states_in(cast("nn.Module", self)))
        for state in states:
            for unit in state.units:
                unit.gathered.reshard()
        applied = cast("Any", super(TorchFSDPModule, self))._apply(fn, recurse)
        for state in states:
            # Where others of its modules may follow, the next forward takes it over.
            if inside.issuperset(state.modules):
                state.take_over()
        return applied

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise StepAssertionError(
            f"FSDP does not support deepcopy. Please use state dict for serialization. Copy this {type(self).__name__} "
            "before fully_shard."
        )


@cache
def class_of(original: Any) -> Any:
    """The subclass of ``original`` that its modules get: the same for all of them."""
    return type(f"FSDP{original.__name__}", (FSDPModule, original), {"__module__": original.__module__})


def _state(module: FSDPModule) -> State:
    state = state_of(cast("nn.Module", module))
    if state is None:
        raise StateError(f"This {type(module).__name__} was not given to fully_shard. Call it on one that was.")
    return state


def _module_states(module: FSDPModule, recurse: bool) -> Iterator[ModuleState]:
    """The engine's, of ``module`` and with ``recurse`` of those inside it that are sharded."""
    _state(module)
    for state in _states(module, recurse):
        if state.module_state is not None:
            yield state.module_state


def _states(module: FSDPModule, recurse: bool) -> Iterator[State]:
    if recurse:
        yield from states_in(cast("nn.Module", module))
    else:
        yield _state(module)


def _hinted(modules: Iterable[object]) -> tuple[State, ...]:
    found: dict[State, None] = {}
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(f"Expects FSDPModule but got {type(module)}: {module}. Give modules that are sharded.")
        found[_state(module)] = None
    return tuple(found)


def _communicate(module: FSDPModule, **changes: Any) -> None:
    state = _state(module)
    state.communicate(replace(state.communication, **changes))
