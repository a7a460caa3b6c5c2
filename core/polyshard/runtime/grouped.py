"""Several modules whose parameters are gathered together: whole from the first that runs to the last.

[Note: rounds]
A group is gathered when one of its modules is entered. It is released when each of them has run once: that is a round.
Between two of its modules it stays whole, and modules hold whole parameters. What the program calls again in the same
round changes nothing; what it calls behind it begins the next. A round in which not every module ran ends with the
outermost forward, and so does one that is a forward of its own: which modules are still to come is nothing that ranks
know, and they must release at one point.

In the order of forwards a round counts once, where it begins: there the gather is waited for, and the next is issued.
In that of backwards it counts where it was left last. A backward follows the record as for a module that was called
several times: gathered at the last exit, reduced at the first entry, where all gradients are there.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ..errors import StateError
from .gathered import refuse_escape
from .hooks import ForwardHooks
from .module_state import ModuleState
from .root import Root
from .states import Phase


class GroupedState(ModuleState):
    """Several modules that one module state stands for, in a step."""

    #: Whether one that ran in this round may save parameters for backward where none is expected to.
    computes_otherwise = False

    @cached_property
    def to_run(self) -> set[nn.Module]:
        """The modules that have not run in this round; empty between rounds."""
        return set()

    def begin_round(self) -> bool:
        """A module is entered; returns whether a round begins."""
        if self.to_run:
            return False
        self.to_run.update(self.modules)
        self.computes_otherwise = False
        return True

    @override
    def end_forward(self) -> None:
        if self.to_run:
            self.to_run.clear()
            self.reshard(self.execution_order.turns_at(self))
        super().end_forward()

    @override
    def reset(self) -> None:
        self.to_run.clear()
        super().reset()


class GroupedHooks(ForwardHooks):
    """The hooks of one module of a group."""

    module_state: GroupedState

    @override
    def _begin(self, root: Root, records: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if root.phase is not Phase.FORWARD and root.module_states[0] is self.module_state:
            self._refuse_root()
        super()._begin(root, records, args, kwargs)
        return self.module_state.begin_round()

    def _refuse_root(self) -> None:
        kinds = ", ".join(type(each).__name__ for each in self.module_state.modules)
        raise StateError(
            f"A single root module is required, but ({kinds}) are a list that was sharded as one group: rank "
            f"{self.module_state.rank} called its {type(self.module).__name__}, and nothing around them is sharded. "
            "Call fully_shard on a module that contains all of them."
        )

    @override
    def _computes_otherwise(self) -> bool:
        self.module_state.computes_otherwise |= super()._computes_otherwise()
        return self.module_state.computes_otherwise

    def _continues(self, root: Root) -> bool:
        """Whether the round goes on behind this module, whose forward ends."""
        state = self.module_state
        state.to_run.discard(self.module)
        if root.active is state:
            # The outermost forward: what runs behind it is another one.
            state.to_run.clear()
        return bool(state.to_run)

    @override
    def _end(self, root: Root, output: Any) -> None:
        if not self._continues(root):
            super()._end(root, output)
            return
        state = self.module_state
        state.entered -= 1
        self._computed(False)
        released = [unit for unit in state.units if unit.retention.policy.releases[False]]
        refuse_escape(released, output, state.name)

    @override
    def _give_up(self, root: Root, recomputes: bool) -> None:
        if recomputes or not self._continues(root):
            super()._give_up(root, recomputes)
            return
        # Other ranks come through, and keep the group for what is still to run.
        state = self.module_state
        state.entered = max(0, state.entered - 1)
        self._end_record(root)
        state.awaits_backward |= bool(state.units) and torch.is_grad_enabled()


def hooks_of(module_state: ModuleState, module: nn.Module) -> ForwardHooks:
    """The hooks of ``module``, which is one of the module state's."""
    grouped = isinstance(module_state, GroupedState)
    return GroupedHooks(module_state, module) if grouped else ForwardHooks(module_state, module)
