"""What is known of a module that was given to ``fully_shard``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import polyshard
import torch
from polyshard.config import ShardConfig
from polyshard.errors import StateError, UnshardedUseError, UnsupportedError
from polyshard.extension import MODULE_STATE_ATTRIBUTE, ModuleState, Reshard, Root, live_roots, root_of
from torch import nn
from torch.utils.hooks import RemovableHandle

from ._dtensor_names import answer_for_dtensors
from ._initialising import Initialising
from ._optimizer_states import answer_optimizers
from ._placed import Placed, remember
from ._state_dicts import answer_state_dicts

STATE_ATTRIBUTE = "_polyshard_fsdp2_state"


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a ``fully_shard`` call, checked."""

    config: ShardConfig
    ignored: Collection[nn.Parameter]
    placed: Placed


@dataclass(eq=False)
class State:
    """Of one module. What is set before it has parameters in memory is applied once it has."""

    module: nn.Module
    asked: Asked
    waits: bool
    """Whether it is to be sharded once its parameters have memory."""
    left: tuple[nn.Parameter, ...] = ()
    """Parameters that a list of modules shares, which the call around all of them shards."""
    reshard: bool | None = None
    factor: float | None = None
    methods: list[str] = field(default_factory=list)
    initialising: Initialising | None = None
    hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def module_state(self) -> ModuleState | None:
        """Its module state in the engine; None while it waits, and where it has no parameters."""
        module_state: ModuleState | None = self.module.__dict__.get(MODULE_STATE_ATTRIBUTE)
        return module_state

    def cut(self) -> None:
        """Shard what in the module is not sharded yet; what was on the meta device gets memory, and no values."""
        initializer = _leave_as_it_is if self.waits else None
        self.waits = False
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if has_something(self.module, self.asked.ignored):
            polyshard.fully_shard(
                self.module, self.asked.config, initializer=initializer, ignored_parameters=self.asked.ignored
            )
            module_state = self.module_state
            assert module_state is not None
            root = root_of(module_state)
            root.answers_state_dicts = True
            for unit in module_state.units:
                remember(unit, self.asked.placed)
            answer_state_dicts(module_state.units)
            answer_optimizers()
            answer_for_dtensors()
        self.apply()
        if self.left:
            self.hooks.append(self.module.register_forward_pre_hook(self._refuse_left, prepend=True))

    def wait(self) -> None:
        """Refuse forwards until the parameters have memory."""
        self.hooks.append(self.module.register_forward_pre_hook(self._refuse_meta, prepend=True))

    def apply(self) -> None:
        """Let the units do what was set."""
        module_state = self.module_state
        if module_state is None:
            return
        for unit in module_state.units:
            if self.reshard is not None and unit.ranks.owner is not None:
                unit.reshard_policy = Reshard.ALWAYS if self.reshard else Reshard.NEVER
            if self.factor is not None:
                ranks = unit.ranks.world.world_size
                if unit.resident and self.factor != ranks:
                    raise UnsupportedError(
                        f"set_gradient_divide_factor({self.factor}) on one rank: nothing reduces the gradients of "
                        f"'{unit.name}', which autograd leaves as they are. Divide the loss instead."
                    )
                unit.gradients.scale = None if self.factor == ranks else ranks / self.factor
        for name in self.methods:
            polyshard.register_forward_method(self.module, name)
        self.methods.clear()

    def end_initialising(self) -> None:
        """Nothing initialises the parameters any more."""
        if self.initialising is not None:
            self.initialising.end()
            self.initialising = None

    def _refuse_meta(self, module: nn.Module, args: object) -> None:
        names = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        raise StateError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on "
            f"meta device: {names}\nCall to_empty(device=...) on the model, and then what initialises it."
        )

    def _refuse_left(self, module: nn.Module, args: object) -> None:
        for parameter, found in zip(self.left, live_roots.find(self.left), strict=True):
            if found is None:
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


def has_something(module: nn.Module, ignored: Collection[nn.Parameter]) -> bool:
    """Whether anything in ``module`` is, or is to be, sharded."""
    skipped = set(ignored)
    return any(MODULE_STATE_ATTRIBUTE in inner.__dict__ for inner in module.modules()) or any(
        parameter not in skipped for parameter in module.parameters()
    )


def outermost(state: State, call: str) -> Root:
    """What drives the model that the module is the outermost sharded one of.

    Raises:
        StateError: it is not, or has no memory yet.
    """
    module_state = state.module_state
    if module_state is None or root_of(module_state).module_states[0] is not module_state:
        why = "has nothing sharded yet" if module_state is None else f"is the inner one '{module_state.name}'"
        raise StateError(
            f"{call} must be called on the root FSDP module, but this {type(state.module).__name__} {why}. Call it on "
            "the module that was given to fully_shard last, around all others."
        )
    return root_of(module_state)


def _leave_as_it_is(module: nn.Module) -> None:
    """Whoever called ``to_empty`` initialises."""


def target_device(fn: object) -> torch.device:
    """Where ``fn``, which ``nn.Module._apply`` is given, puts a tensor from the meta device."""
    assert callable(fn)
    moved = fn(torch.empty(0, device="meta"))
    assert isinstance(moved, torch.Tensor)
    return moved.device
