"""In which order units run, and whether ranks agree on it: checked where ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` asks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import StateError
from polyshard.interfaces import Collectives
from polyshard.runtime.module_state import ModuleState
from polyshard.runtime.order import ExecutionOrder

from ._flat_param import FlatParamHandle

__all__ = ["CheckedSchedule", "ForwardOrder", "UnitSchedule", "checks_order"]

#: Frames between the warning and the user's call of the model.
_STACKLEVEL = 8


class ForwardOrder:
    """The order in which training forwards gather flat parameters.

    In the first iteration, which ends with the first backward, ranks compare it gather by gather, before each gather:
    two of equal size would otherwise be matched silently. From then on every rank compares itself with its own first
    iteration, without communication, and warns in the first iteration that departs from it. Forwards in eval mode or
    without gradients are left out: no backward tells where their iteration ends.
    """

    def __init__(self, names: Mapping[FlatParamHandle, Sequence[str]], collectives: Collectives) -> None:
        self._names = {handle: list(parameters) for handle, parameters in names.items()}
        self._indices = {handle: index for index, handle in enumerate(names)}
        self._collectives = collectives
        self._first: list[FlatParamHandle] = []
        self._is_first = True
        self._position = 0
        self._warned = False
        self._done = False

    def enter(self, handle: FlatParamHandle, *, training: bool) -> None:
        """``handle`` is about to be gathered for a forward.

        Raises:
            StateError: (a ``RuntimeError``, on every rank) another rank is about to gather something else.
        """
        if self._done or not training or not torch.is_grad_enabled():
            return
        if self._is_first:
            self._compare_ranks(handle)
            self._first.append(handle)
            return
        expected = self._first[self._position] if self._position < len(self._first) else None
        self._position += 1
        if expected is handle:
            return
        self._warned = True
        wanted = "not all-gather any more parameters in the forward"
        if expected is not None:
            wanted = f"all-gather for {self._names[expected]}"
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {self._collectives.rank}. Collectives "
            f"are unchecked and may give incorrect results or hang.\nExpected to {wanted} but trying to all-gather "
            f"parameters for {self._names[handle]}",
            stacklevel=_STACKLEVEL,
        )

    def end_iteration(self) -> None:
        """A backward ended."""
        self._is_first = False
        self._position = 0
        # One iteration's warnings say it all.
        self._done |= self._warned

    def abandon(self) -> None:
        """A forward or backward failed: what it recorded counts for nothing."""
        self._position = 0
        if self._is_first:
            self._first.clear()

    def _compare_ranks(self, handle: FlatParamHandle) -> None:
        counts = self._gather(len(self._names[handle]))
        indices = self._gather(self._indices[handle])
        everyone = list(zip(counts, indices, strict=True))
        for (rank, mine), (other, theirs) in itertools.combinations(enumerate(everyone), 2):
            if mine == theirs:
                continue
            each, another = self._called(mine[1]), self._called(theirs[1])
            if mine[0] != theirs[0]:
                what = (
                    f"rank {rank} is all-gathering {mine[0]} parameters while rank {other} is all-gathering "
                    f"{theirs[0]} parameters: {each} and {another}"
                )
            else:
                what = (
                    f"rank {rank} is all-gathering parameters for {each} while rank {other} is all-gathering "
                    f"parameters for {another}"
                )
            raise StateError(f"Forward order differs across ranks: {what}. Let all ranks run the same modules.")

    def _gather(self, value: int) -> list[int]:
        collectives = self._collectives
        out = torch.zeros(collectives.world_size, dtype=torch.int32, device=collectives.device)
        collectives.all_gather(out, torch.tensor([value], dtype=torch.int32, device=collectives.device)).wait()
        return out.tolist()

    def _called(self, index: int) -> list[str]:
        return next((self._names[handle] for handle, each in self._indices.items() if each == index), [])


class UnitSchedule(ExecutionOrder[ModuleState]):
    """A execution order of the module states that have parameters: a container without any hides none of those behind it."""

    def enter(self, module_state: ModuleState) -> list[list[ModuleState]]:
        return super().enter(module_state) if module_state.units else []

    def leave(self, module_state: ModuleState) -> None:
        if module_state.units:
            super().leave(module_state)

    def enter_backward(self, module_state: ModuleState) -> list[list[ModuleState]]:
        return super().enter_backward(module_state) if module_state.units else []


class CheckedSchedule(UnitSchedule):
    """A execution order in which no module state starts a forward that differs over ranks."""

    def __init__(
        self,
        forward_ahead: int,
        backward_ahead: int,
        order: ForwardOrder,
        handles: Mapping[ModuleState, FlatParamHandle],
    ) -> None:
        super().__init__(forward_ahead, backward_ahead)
        self._check = order
        self._handles = handles

    def enter(self, module_state: ModuleState) -> list[list[ModuleState]]:
        handle = self._handles.get(module_state)
        if handle is not None:
            self._check.enter(handle, training=module_state.module.training)
        return super().enter(module_state)


def checks_order() -> bool:
    """Whether the debug level asks for checks."""
    if not dist.is_initialized():
        return False
    # Public names that the stubs do not export.
    level: Any = getattr(dist, "get_debug_level")()  # noqa: B009
    return bool(level.name == "DETAIL")
