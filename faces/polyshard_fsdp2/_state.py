"""What is known of a module that was given to ``fully_shard``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from polyshard.config import ShardConfig
from polyshard.errors import StateError, UnshardedUseError, UnsupportedError
from polyshard.extension import (
    MODULE_STATE_ATTRIBUTE,
    ModuleState,
    Request,
    Reshard,
    Root,
    follow,
    root_of,
    shard_module,
)
from torch import nn
from torch.utils.hooks import RemovableHandle

from ._parameters import Placed, PlacedUnit
from ._torch_private import PipelinedState

STATE_ATTRIBUTE = "_polyshard_fsdp2_state"


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a ``fully_shard`` call, checked."""

    config: ShardConfig
    ignored: Collection[nn.Parameter]
    placed: Placed


@dataclass(eq=False)
class State(PipelinedState):
    """Of one module."""

    module: nn.Module
    asked: Asked
    left: tuple[nn.Parameter, ...] = ()
    """Parameters that a list of modules shares, which the call around all of them shards."""
    reshard: bool | None = None
    factor: float | None = None
    hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def module_state(self) -> ModuleState | None:
        """Its module state in the engine; None where it has no parameters."""
        module_state: ModuleState | None = self.module.__dict__.get(MODULE_STATE_ATTRIBUTE)
        return module_state

    @property
    def units(self) -> Sequence[PlacedUnit]:
        """Its units; none where it has no parameters."""
        module_state = self.module_state
        units = () if module_state is None else module_state.units
        return [unit for unit in units if isinstance(unit, PlacedUnit)]

    def cut(self) -> None:
        """Shard what in the module is not sharded yet."""
        if has_something(self.module, self.asked.ignored):
            root = shard_module(
                Request(
                    self.module,
                    self.asked.config,
                    None,
                    (),
                    self.asked.ignored,
                    composes=True,
                    make_unit=partial(PlacedUnit, placed=self.asked.placed),
                    stays_on_meta=True,
                )
            )
            root.answers_state_dicts = True
            if root.idle_guard is not None:
                # What computes with DTensors between steps is right, or torch refuses it.
                root.idle_guard.leave()
                root.idle_guard = None
            follow(root)
            self._answer_state_dicts()
        if self.left:
            self.hooks.append(self.module.register_forward_pre_hook(self._refuse_left, prepend=True))

    def apply(self) -> None:
        """Let the units do what was set."""
        for unit in self.units:
            if self.reshard is not None and unit.ranks.owner is not None:
                unit.reshard_policy = Reshard.ALWAYS if self.reshard else Reshard.NEVER
            if self.factor is not None:
                ranks = unit.ranks.number
                if unit.permanent and unit.ranks.alone and self.factor != ranks:
                    raise UnsupportedError(
                        f"set_gradient_divide_factor({self.factor}) on one rank: nothing reduces the gradients of "
                        f"'{unit.name}', which autograd leaves as they are. Divide the loss instead."
                    )
                unit.gradients.scale = None if self.factor == ranks else ranks / self.factor

    def take_over(self) -> None:
        """Let what was done to the parameters from outside be what the units have."""
        for unit in self.units:
            unit.take_over()

    def reduce_waiting(self) -> None:
        outermost(self, "A pipeline's reduction").reduce_waiting()

    def _answer_state_dicts(self) -> None:
        holders = dict.fromkeys(
            module for unit in self.units for parameter in unit.parameters for module, _ in parameter.sites
        )
        for module in holders:
            module.register_state_dict_pre_hook(self._before_save)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._before_load)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(self._after_load)  # type: ignore[no-untyped-call]

    def _before_save(self, *_: Any) -> None:
        for unit in self.units:
            unit.conceal()

    def _before_load(self, *_: Any) -> None:
        for unit in self.units:
            unit.reshard()

    def _after_load(self, *_: Any) -> None:
        self.take_over()

    def _refuse_left(self, module: nn.Module, args: object) -> None:
        left = set(self.left)
        for parameter in module.parameters():
            # The call around puts another object into its place.
            if parameter in left:
                raise UnshardedUseError(
                    f"A parameter of shape {tuple(parameter.shape)} that {type(module).__name__} shares with another "
                    "module of its fully_shard list is not sharded, so its gradient would be this rank's alone. Call "
                    "fully_shard on the module around both."
                )
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


def state_of(module: nn.Module) -> State | None:
    """What is known of ``module``; None where it was not given to ``fully_shard``."""
    state: State | None = module.__dict__.get(STATE_ATTRIBUTE)
    return state


def states_in(module: nn.Module) -> Iterator[State]:
    """What is known of ``module`` and of the modules inside it."""
    for inner in module.modules():
        state = state_of(inner)
        if state is not None:
            yield state


def has_something(module: nn.Module, ignored: Collection[nn.Parameter]) -> bool:
    """Whether anything in ``module`` is, or is to be, sharded."""
    skipped = set(ignored)
    return any(MODULE_STATE_ATTRIBUTE in inner.__dict__ for inner in module.modules()) or any(
        parameter not in skipped for parameter in module.parameters()
    )


def outermost(state: State, call: str) -> Root:
    """What drives the model that the module is the outermost sharded one of.

    Raises:
        StateError: it is not.
    """
    module_state = state.module_state
    if module_state is None or root_of(module_state).module_states[0] is not module_state:
        why = "has nothing sharded" if module_state is None else f"is the inner one '{module_state.name}'"
        raise StateError(
            f"{call} must be called on the root FSDP module, but this {type(state.module).__name__} {why}. Call it on "
            "the module that was given to fully_shard last, around all others."
        )
    return root_of(module_state)
