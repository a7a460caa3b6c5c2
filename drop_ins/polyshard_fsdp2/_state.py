"""What is known of the modules that one call of ``fully_shard`` was given.

It is also what programs read and call of the state that FSDP2 keeps of a module, by torch's private names, and no more.
``s`` is ``module._get_fsdp_state()`` or ``fully_shard.state(module)``. Looked up in the programs' sources:

- torch 2.11 to 2.14, ``torch.distributed.pipelining``: ``post_backward()`` of the groups of all of
  ``s._state_ctx.all_states``, then ``s._root_post_backward_final_callback()``.
- torch 2.15, there: whether ``s._comm_ctx`` of two stages is one.
- OLMo-core 3.0, stages of a pipeline: as torch 2.11, without the last call.
- NeMo Automodel 0.7, ``MoEFSDPSyncMixin``: as torch 2.11, for single modules of a model too. Heads of chunked losses:
  ``s._mp_policy.param_dtype``. DeepSeek-V4: whether torch's ``_get_module_fsdp_state(module)`` is None.
- verl 0.9, ``set_reshard_after_forward``: sets ``s._auto_reshard_after_forward``, and its group's
  ``post_forward_mesh_info`` to what torch's ``_get_post_forward_mesh_info`` makes of its ``mesh_info``. Engines over
  Automodel and VeOmni: set its group's ``_training_state``.
- VeOmni, ``DistSignSGD``: ``sharded_param`` of its group's ``fsdp_params``.
- Programs that call a part of a model first: ``s._lazy_init()`` of the whole.

Torch 2.11 has one group (``s._fsdp_param_group``), and later versions a list of them (``s._fsdp_param_groups``), too.
PyTorch's own tests ask for ``s._is_root``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakMethod

import torch
from polyshard.config import ShardConfig
from polyshard.errors import DeviceError, StateError
from polyshard.extension import (
    MODULE_STATE_ATTRIBUTE,
    GroupedModules,
    ModuleState,
    ParameterPlace,
    PlacedUnit,
    Request,
    Reshard,
    Root,
    map_tensors,
    root_of,
    shard_module,
)
from polyshard.interfaces import InputCast
from torch import nn
from torch.utils.hooks import RemovableHandle

from ._collectives import Communication
from ._meshes import Placed
from ._torch_private import FSDPState, mesh_info_of

STATE_ATTRIBUTE = "_polyshard_fsdp2_state"


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """The cast of a module's inputs, which come to the device first: FSDP2 moves those of the outermost module."""

    device: torch.device
    cast: InputCast | None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = map_tensors(self._moved, (args, kwargs))
        return (args, kwargs) if self.cast is None else self.cast(args, kwargs)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == self.device else tensor.to(self.device)


@dataclass(eq=False)
class State(FSDPState):  # type: ignore[misc]
    """Torch's functions know it by its class."""

    modules: tuple[nn.Module, ...]
    config: ShardConfig
    ignored: Collection[nn.Parameter]
    placed: Placed
    places: Mapping[nn.Parameter, ParameterPlace]
    reshard: bool | None = None
    communication: Communication = field(default_factory=Communication)
    forward_hints: tuple[State, ...] = ()
    """Whose gathers follow this one's in forward; the recorded order decides where there are none."""
    backward_hints: tuple[State, ...] = ()
    """The same in backward."""
    fills_unused: bool = False
    """Whether parameters that no rank had a gradient of get zeros."""
    is_last_backward: bool = True
    """Of the outermost one: whether backwards of the model end, where ``ends_by_hand`` is False."""
    ends_by_hand: bool = False
    """Of the outermost one: whether the program ends backwards of the model."""
    finalizing: object = None
    """Of the outermost one: the handle of a reduction that the program has not waited for."""
    moving: list[RemovableHandle] = field(default_factory=list)
    """Hooks that move the inputs of modules without parameters, until a module around them is sharded."""
    _auto_reshard_after_forward: bool = True

    @property
    def module_state(self) -> ModuleState | None:
        """Its module state in the engine; None where it has no parameters."""
        module_state: ModuleState | None = self.modules[0].__dict__.get(MODULE_STATE_ATTRIBUTE)
        return module_state

    @property
    def units(self) -> Sequence[PlacedUnit]:
        module_state = self.module_state
        units = () if module_state is None else module_state.units
        return [unit for unit in units if isinstance(unit, PlacedUnit)]

    def cut(self) -> None:
        """Shard what in the modules is not sharded yet."""
        module = together(self.modules)
        if has_something(module, self.ignored):
            request = Request(
                module,
                self.config,
                ignored_parameters=self.ignored,
                composes=True,
                placed=self.places,
                placements=self.placed,
                stays_on_meta=True,
            )
            root = shard_module(request)
            use_hints(root)
            for state in states_in(module):
                if state.communication.custom:
                    # The model around a module has groups of its own.
                    state.communicate(state.communication)
            self._move_inputs(root)
            self._answer_state_dicts()
        elif (device := self._device()) is not None:
            move = _OnDevice(device, None)
            for each in self.modules:
                hook = each.register_forward_pre_hook(lambda _, args, kwargs: move(args, kwargs), with_kwargs=True)
                self.moving.append(hook)

    def apply(self) -> None:
        """Let the units do what was set."""
        for unit in self.units:
            if self.reshard is not None and unit.ranks.owner is not None:
                unit.retention.policy = Reshard.ALWAYS if self.reshard else Reshard.NEVER
            unit.gradients.fills_unused = self.fills_unused
            ranks, factor = unit.ranks.number, self.communication.factor
            if self.communication.reduces or factor == ranks:
                unit.gradients.scale = None
            elif factor is not None:
                unit.gradients.scale = ranks / factor

    def communicate(self, communication: Communication) -> None:
        """Let the units communicate by ``communication``. Raises ConfigError: they cannot."""
        if self.units and (communication.custom or self.communication.custom):
            communication.around(self.units)
        self.communication = communication
        self.apply()

    def choose_end(self) -> None:
        """Let backwards of the model, of which it is the outermost one, end where that was set."""
        if self.module_state is not None:
            root_of(self.module_state).last_backward = self.is_last_backward and not self.ends_by_hand

    def hint(self) -> None:
        """Let the model prefetch as was set."""
        if self.module_state is not None:
            use_hints(root_of(self.module_state))

    def take_over(self) -> None:
        """Let what was done to the parameters from outside be what the units have."""
        for unit in self.units:
            # What is on another device may be moved yet; the next forward refuses it.
            with suppress(DeviceError):
                unit.held.take_over()

    @property
    def _state_ctx(self) -> SimpleNamespace:
        return SimpleNamespace(all_states=list(self.of_model))

    @property
    def _comm_ctx(self) -> object:
        return self.of_model[0]

    @property
    def _is_root(self) -> bool:
        return self.of_model[0] is self

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return ParamGroup(self) if self.sharded else None

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return [ParamGroup(self)] if self.sharded else []

    @property
    def _mp_policy(self) -> object:
        return self.placed.policy

    def _root_post_backward_final_callback(self) -> None:
        # ``post_backward`` has waited.
        return None

    def _lazy_init(self) -> None:
        """Raise what the first forward of the root would raise before it computes."""
        if len(self.modules) > 1 and (state := self.module_state) and root_of(state).module_states[0] is state:
            kinds = [type(module).__name__ for module in self.modules]
            raise StateError(
                f"FSDP requires a single root module but got {kinds} (rank {state.rank}). Call fully_shard on a module "
                "that contains all of them."
            )
        for unit in self.units:
            unit.held.take_over()
            unit.held.require_values("The first forward")

    @property
    def of_model(self) -> Sequence[State]:
        """Those of all modules of the model, the outermost one's first."""
        module_states = () if self.module_state is None else root_of(self.module_state).module_states
        found = [state_of(each.modules[0]) for each in module_states]
        return [each for each in found if each is not None] or [self]

    @property
    def sharded(self) -> Sequence[nn.Parameter]:
        """The parameters of the modules; empty where they have none."""
        return [parameter.original for unit in self.units for parameter in unit.parameters]

    def set_reshard(self, reshard: bool) -> None:
        """Whether parameters are released after forward."""
        self.reshard = reshard
        self.apply()

    def _move_inputs(self, root: Root) -> None:
        outermost, *inner = root.module_states
        for each in inner:
            if isinstance(each.input_cast, _OnDevice):
                each.input_cast = each.input_cast.cast
        for module in self.modules:
            for state in states_in(module):
                while state.moving:
                    state.moving.pop().remove()
        if (device := self._device()) is not None:
            outermost.input_cast = _OnDevice(device, outermost.input_cast)

    def _device(self) -> torch.device | None:
        """Where inputs belong; None where that is the host."""
        device = self.config.device
        return device if isinstance(device, torch.device) and device.type != "cpu" else None

    def _answer_state_dicts(self) -> None:
        holders = dict.fromkeys(
            module for unit in self.units for parameter in unit.parameters for module, _ in parameter.sites
        )
        for module in holders:
            module.register_state_dict_pre_hook(_weak(self._before_save))  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_weak(self._before_load))  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(_weak(self._after_load))  # type: ignore[no-untyped-call]

    def _before_save(self, *_: Any) -> None:
        for unit in self.units:
            unit.gathered.refuse_lost_writes()
            unit.gathered.conceal()

    def _before_load(self, *_: Any) -> None:
        for unit in self.units:
            unit.gathered.reshard()

    def _after_load(self, *_: Any) -> None:
        self.take_over()


class ParamGroup:
    """The parameters of the modules that one call was given."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._training_state: object = None

    @property
    def fsdp_params(self) -> Sequence[Any]:
        return [SimpleNamespace(sharded_param=parameter) for parameter in self._state.sharded]

    @property
    def mesh_info(self) -> object:
        """The mesh of the call, as torch's functions know it."""
        return mesh_info_of(self._state.config.mesh)

    def post_backward(self) -> None:
        """Reduce what backwards left whole, where this is the first group of the model: that of all of them."""
        first = next(each for each in self._state.of_model if each.sharded)
        if first is self._state and first.module_state is not None:
            root_of(first.module_state).reduce_waiting()

    def _release(self, mesh_info: object) -> None:
        self._state.set_reshard(mesh_info is not None)

    post_forward_mesh_info = property(fset=_release)


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """``method`` as a hook: a part of a model that someone keeps does not keep the memory of the whole."""
    of = WeakMethod(method)

    def hook(*args: Any) -> None:
        if (bound := of()) is not None:
            bound(*args)

    return hook


def state_of(module: nn.Module) -> State | None:
    """What is known of ``module``; None where it was not given to ``fully_shard``."""
    state: State | None = module.__dict__.get(STATE_ATTRIBUTE)
    return state


def states_in(module: nn.Module) -> Iterator[State]:
    """What is known of ``module`` and of the modules inside it."""
    for state in dict.fromkeys(map(state_of, module.modules())):
        if state is not None:
            yield state


def together(modules: Sequence[nn.Module]) -> nn.Module:
    """What the engine shards so that ``modules`` are one group."""
    return modules[0] if len(modules) == 1 else GroupedModules(modules)


def has_something(module: nn.Module, ignored: Collection[nn.Parameter]) -> bool:
    skipped = set(ignored)
    return any(MODULE_STATE_ATTRIBUTE in inner.__dict__ for inner in module.modules()) or any(
        parameter not in skipped for parameter in module.parameters()
    )


def use_hints(root: Root) -> None:
    """Let the modules of ``root`` prefetch what they were told to. Hints of other models' modules are left out."""

    def of_root(hints: Sequence[State]) -> list[ModuleState]:
        found = [hinted.module_state for hinted in hints]
        return [each for each in found if each is not None and root_of(each) is root]

    states = {each: state for each in root.module_states if (state := state_of(each.modules[0])) is not None}
    forward = {each: of_root(state.forward_hints) for each, state in states.items()}
    # An embedding's backward needs no parameters.
    backward = {
        each: [hinted for hinted in of_root(state.backward_hints) if hinted.reads_in_backward]
        for each, state in states.items()
    }
    order = root.execution_order
    # Each by a launch of its own.
    order.forward_hints = {each: [[hinted] for hinted in hints] for each, hints in forward.items() if hints}
    order.backward_hints = {each: [[hinted] for hinted in hints] for each, hints in backward.items() if hints}


def outermost(state: State, call: str) -> Root:
    """What drives the model that the module is the outermost sharded one of.

    Raises:
        StateError: it is not.
    """
    module_state = state.module_state
    if module_state is None or root_of(module_state).module_states[0] is not module_state:
        why = "has nothing sharded" if module_state is None else f"is the inner one '{module_state.name}'"
        raise StateError(
            f"{call} must be called on the root FSDP module, but this {type(state.modules[0]).__name__} {why}. Call it "
            "on the module that was given to fully_shard last, around all others."
        )
    return root_of(module_state)
