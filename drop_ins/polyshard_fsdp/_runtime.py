"""One FSDP instance in a step: its module state and forward, the root of all, prefetching, the order of execution."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import StateError
from polyshard.extension import (
    Events,
    ExecutionOrder,
    ForwardHooks,
    ModuleState,
    Root,
    Unit,
    in_backward,
    map_tensors,
    output_hook,
    refuse_escape,
    root_of,
    streams_for,
    watch_output,
)
from polyshard.interfaces import Collectives
from polyshard_plugins.precision import make_input_cast
from torch import nn
from typing_extensions import override

from . import _runtime_utils, _torch_private
from ._common_utils import HandleTrainingState, _get_handle_fqns_from_root
from ._flat_param import FlatParamHandle
from ._unit import FlatUnit
from .api import BackwardPrefetch


class FSDPModuleState(ModuleState):
    """One FSDP instance's place in a step."""

    def __init__(
        self,
        instance: Any,
        inner: nn.Module,
        units: Sequence[FlatUnit],
        *,
        full_precision_in_eval: bool,
    ) -> None:
        # Gathered in every module's backward, as in FSDP, whose users see whole parameters there. A container without
        # any hides none of those behind it.
        super().__init__(
            "", instance, units, full_precision_in_eval=full_precision_in_eval, reads_in_backward=bool(units)
        )
        self.instance = instance
        #: The module that the user gave; ``module`` is the instance itself, the wrapper around it.
        self.inner = inner
        #: Whether its backward ends where its own gradients do, and not with the whole backward alone.
        self.ends_by_hook = True
        #: What follows in this backward, as recorded.
        self._ahead: Sequence[ModuleState] = ()

    @property
    def busy(self) -> bool:
        """Whether its forward or its backward runs."""
        return self.entered > 0 or self.in_backward

    def upcoming(self) -> FSDPModuleState | None:
        """The instance that comes next in this backward, where that is known."""
        state = next(iter(self._ahead), None)
        assert state is None or isinstance(state, FSDPModuleState)
        return state

    @override
    def pre_backward(self, batches: Sequence[Sequence[ModuleState]] | None) -> None:
        if not self.in_backward:
            self.point(HandleTrainingState.BACKWARD_PRE)
        super().pre_backward(batches)

    @override
    def prefetch(self, batches: Sequence[Sequence[ModuleState]]) -> None:
        self._ahead = [state for batch in batches for state in batch]
        if self.instance.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._unshard_next()

    @override
    def late_post_backward(self) -> None:
        # Nothing asks for a gradient at its end: it has no hook that ended its backward.
        self.ends_by_hook = any(unit.trainable for unit in self.units)
        try:
            super().late_post_backward()
        finally:
            self.ends_by_hook = True

    @override
    def post_backward(self) -> None:
        self.point(HandleTrainingState.BACKWARD_POST)
        self._reduce_zeros_if_unused()
        super().post_backward()
        if self.instance.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            # One that has gone through its backward since then needs nothing any more.
            self._ahead = [state for state in self._ahead if state.awaits_backward]
            self._unshard_next()
        self._ahead = ()
        self.point(HandleTrainingState.IDLE)

    @override
    def reset(self) -> None:
        super().reset()
        self._ahead = ()
        self.point(HandleTrainingState.IDLE)

    def _unshard_next(self) -> None:
        handle = self.instance._handle
        if handle is None:
            return
        following = _runtime_utils._get_handle_to_prefetch(self.instance, handle)
        if following is not None and following.unit is not None:
            following.unit.gathered.unshard()

    def _reduce_zeros_if_unused(self) -> None:
        root = self.root
        assert isinstance(root, FSDPRoot)
        if not (self.joins_reduction and root.backward.accumulates):
            return
        for unit in self.units:
            if not unit.trainable or unit.gathered.pending or unit.gradients.unreduced or unit.ranks.alone:
                continue
            if root.synchronises:
                root.unused.append(UnusedUnit(unit))
            else:
                # Nothing to keep, and nobody to agree with.
                self.joins_reduction = False

    def point(self, state: HandleTrainingState) -> None:
        """Let the handle say where it is in its step."""
        if self.instance._handle is not None:
            self.instance._handle._training_state = state


class FSDPForward(ForwardHooks):
    module_state: FSDPModuleState

    def __init__(self, module_state: FSDPModuleState, observed: Sequence[tuple[nn.Module, str]]) -> None:
        """``observed``: parameters whose modules have a ``__setattr__`` of their own, which sees the views."""
        super().__init__(module_state, module_state.module)
        self._observed = tuple(observed)
        dtype = module_state.instance.mixed_precision.param_dtype
        self._cast_inputs = None if dtype is None else make_input_cast(dtype)
        self._pending: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        # Whether the last output may bring a backward.
        self._is_watched = False

    def watch_pending_inputs(self) -> None:
        """Let backward end at the inputs of the forward that is being entered."""
        self._pending = super()._watch_inputs(*self._pending)

    @override
    def _pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module_state, instance = self.module_state, self.module_state.instance
        given = args, kwargs
        instance._enter_forward()
        recomputes = in_backward()
        policy = instance.mixed_precision
        if instance._is_root and not recomputes and root_of(module_state).active is None:
            device = instance.compute_device
            args, kwargs = map_tensors(lambda each: each if each.device == device else each.to(device), (args, kwargs))
            instance._place_buffers()
        casts = policy.cast_root_forward_inputs if instance._is_root else policy.cast_forward_inputs
        casts &= not module_state.in_full_precision and bool(instance._is_root or module_state.units)
        if self._cast_inputs is not None and casts:
            args, kwargs = self._cast_inputs(args, kwargs)
        if recomputes:
            return super()._pre_forward(args, kwargs)
        module_state.point(HandleTrainingState.FORWARD)
        args, kwargs = super()._pre_forward(args, kwargs)
        # The engine saw what was cast here.
        self._note_copies(given, args, kwargs)
        if self._observed:
            self._assign_anew()
        return args, kwargs

    @override
    def _post_forward(self, output: Any) -> Any:
        try:
            return super()._post_forward(output)
        finally:
            if not self.module_state.in_backward:
                self.module_state.point(HandleTrainingState.IDLE)
            if self._observed:
                self._assign_anew()

    @override
    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._pending = (args, kwargs)
        instance = self.module_state.instance
        _runtime_utils._register_post_backward_hook(instance, instance._handle)
        pending, self._pending = self._pending, ((), {})
        return pending

    @override
    def _watch_output(self, output: Any) -> tuple[Any, bool]:
        instance, self._is_watched = self.module_state.instance, False
        output = _runtime_utils._register_pre_backward_hooks(
            instance, self.module_state.module, output, instance._handle
        )
        return output, self._is_watched

    def watch_pending_output(self, output: Any) -> Any:
        """``output`` of the forward that is being left, with what starts the instance's backward."""
        # PyTorch's tests count the hooks of tensors.
        hook, hang = output_hook(self.module_state), torch.Tensor.register_hook
        output, self._is_watched = watch_output(output, hook, hang)
        return output

    def _assign_anew(self) -> None:
        for module, attribute in self._observed:
            parameters = dict(module._parameters)
            if attribute not in parameters:
                setattr(module, attribute, module.__dict__[attribute])
                continue
            # ``nn.Module`` refuses a plain tensor in a parameter's place.
            del module._parameters[attribute]
            setattr(module, attribute, parameters[attribute])
            module.__dict__.pop(attribute, None)
            module._parameters.clear()
            module._parameters.update(parameters)


#: Where `_apply_optimizer_in_backward` leaves a parameter's optimizers.
OPTIMIZERS = "_in_backward_optimizers"


class FSDPRoot(Root):
    def __init__(
        self, world: Collectives, states: Sequence[FSDPModuleState], ahead: int, order: ForwardOrder | None
    ) -> None:
        """``ahead``: how many gathers forwards issue before they are needed; ``order``: checked where it is given."""
        execution_order = UnitSchedule(ahead, 1, order)
        super().__init__(world, states, streams_for(world), execution_order, Events([]), check_ranks=False)
        self._order = order
        #: Parameters that step as soon as their gradients are reduced.
        self._stepping = [
            managed.original
            for state in states
            if state.units
            for managed in state.instance._handle.parameters
            if hasattr(managed.original, OPTIMIZERS)
        ]
        #: Units that take part in this backward's reductions although this rank has no gradient for them.
        self.unused: list[UnusedUnit] = []

    @override
    def refuse_escape(self, output: object) -> None:
        """As the engine's, but for what stays whole until backward ends, as FSDP's root does."""
        units = tuple(
            unit
            for module_state in self.module_states
            if not module_state.awaits_backward
            for unit in module_state.units
        )
        refuse_escape(units, output, "")

    @override
    def end_backward(self) -> None:
        super().end_backward()
        for unused in self.unused:
            unused.finish()
        self.unused.clear()
        if self.synchronises and self._stepping:
            _step_in_backward(self._stepping)
        if self._order is not None:
            self._order.end_iteration()
        if not self.synchronises:
            for unit in self.units:
                assert isinstance(unit, FlatUnit)
                unit.gradients.show_unreduced()

    @override
    def _turn(self) -> None:
        """Hand reduced gradients over while parameters are shards, which those of the other forward gather again."""
        self.reducer.flush()
        self.streams.drain()

    @override
    def _counted_parameters(self) -> None:
        """An unused parameter of a used unit has a gradient of zeros in FSDP; for units see ``UnusedUnit``."""

    @override
    def abandon(self) -> None:
        super().abandon()
        self.unused.clear()
        if self._order is not None:
            self._order.abandon()


def _step_in_backward(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        # Without a gradient there is nothing of it on this rank, or the backward did not reach it.
        if parameter.grad is None:
            continue
        for optimizer in getattr(parameter, OPTIMIZERS, ()):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


class UnusedUnit:
    """One rank's part in the reduction of a unit for which it has no gradient.

    Other ranks may have one, so this rank reduces with them, and its part is zero. Where no rank has one, ``.grad`` is
    to be None, as an optimizer does not leave zeros alone. A reduction that tells both apart needs no further message:
    the part is *negative* zero, which adds to nothing, and whose sums are negative zeros exactly where no other number
    was added.
    """

    def __init__(self, unit: Unit) -> None:
        for leaf in unit.gathered.leaves:
            if leaf.requires_grad:
                leaf.grad = torch.full_like(leaf, -0.0, requires_grad=False)
        self._fresh: Sequence[nn.Parameter] = [parameter for parameter in unit.held.tensors if parameter.grad is None]
        # A flat parameter ends in padding, into which no rank puts its gradients.
        self._used = max((piece.shard_offset + piece.numel for piece in unit.pieces), default=0)

    def finish(self) -> None:
        """The reduction is done: drop gradients to which no rank gave anything."""
        reduced = [(parameter, parameter.grad) for parameter in self._fresh if parameter.grad is not None]
        used = (gradient.reshape(-1)[: self._used] for _, gradient in reduced)
        if all(bool(((each == 0) & torch.signbit(each)).all()) for each in used):
            for parameter, _ in reduced:
                parameter.grad = None


class _OrderOfRanks(_torch_private.ExecutionOrder):  # type: ignore[misc]
    """Torch's, which in the first iteration gathers by the functions that programs replace and count."""

    ranks: Collectives

    def _check_order(self, handle: FlatParamHandle, is_training: bool) -> None:
        if not (self.is_first_iter and is_training):
            super()._check_order(handle, is_training)
            return
        # Two gathers, as FSDP sends: how many flat parameters, and which.
        self._gather(1)
        names = [self.param_to_fqn[self.all_handles[each].flat_param] for each in self._gather(handle._handle_index)]
        for (rank, each), (other, another) in itertools.combinations(enumerate(names), 2):
            if each != another:
                raise StateError(
                    f"Forward order differs across ranks: rank {rank} is all-gathering parameters for {each} while "
                    f"rank {other} is all-gathering parameters for {another}. Let all ranks run the same modules."
                )

    def _gather(self, value: int) -> list[int]:
        everyone = torch.zeros(self.ranks.world_size, dtype=torch.int32, device=self.ranks.device)
        self.ranks.all_gather(everyone, torch.tensor([value], dtype=torch.int32, device=self.ranks.device)).wait()
        return everyone.tolist()


class ForwardOrder:
    """The order in which training forwards gather flat parameters, compared between ranks and with the first iteration.

    Forwards in eval mode or without gradients are left out: no backward tells where their iteration ends.
    """

    def __init__(self, instance: Any, ranks: Collectives) -> None:
        self._data = _OrderOfRanks(dist.get_debug_level(), 1, 1)  # type: ignore[attr-defined]
        self._data.init(instance, instance, instance.process_group)
        self._data.ranks = ranks
        for handle in self._data.all_handles:
            handle._pre_forward_order_index = None
            self._data.param_to_fqn[handle.flat_param] = _get_handle_fqns_from_root(instance, handle)

    def enter(self, handle: FlatParamHandle, *, training: bool) -> None:
        """``handle`` is about to be gathered for a forward.

        Raises:
            StateError: (a ``RuntimeError``, on every rank) another rank is about to gather something else.
        """
        if training and torch.is_grad_enabled():
            self._data.record_pre_forward(handle, True)

    def end_iteration(self) -> None:
        self._data.next_iter()

    def abandon(self) -> None:
        """A forward or backward failed: what it recorded counts for nothing."""
        self._data.current_order_index = 0
        if self._data.is_first_iter:
            for handle in self._data.handles_pre_forward_order:
                handle._pre_forward_order_index = None
            self._data.handles_pre_forward_order.clear()


class UnitSchedule(ExecutionOrder[ModuleState]):
    """An order of the modules that have parameters, compared between ranks where that is asked for."""

    def __init__(self, forward_ahead: int, backward_ahead: int, order: ForwardOrder | None) -> None:
        super().__init__(forward_ahead, backward_ahead)
        self._order = order

    @override
    def enter(self, module_state: ModuleState) -> list[list[ModuleState]]:
        if not module_state.units:
            return []
        if self._order is not None:
            assert isinstance(module_state, FSDPModuleState)
            self._order.enter(module_state.instance._handle, training=module_state.module.training)
        return super().enter(module_state)


def checks_order() -> bool:
    """Whether the debug level asks for checks."""
    if not dist.is_initialized():
        return False
    # Public names that the stubs do not export.
    level: Any = getattr(dist, "get_debug_level")()  # noqa: B009
    return bool(level.name == "DETAIL")
