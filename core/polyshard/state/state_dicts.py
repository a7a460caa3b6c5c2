"""State dicts out of a sharded model and its optimizers, and into them; the settings of both."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import ConfigError, StateError
from ..inspect import ShardedModel, is_dtensor, savable_model, savable_part
from .contents import Joint, Optimizers, frozen_names, in_order, model_state, names_within, optimizer_state
from .exchange import together
from .full import full_model_state, full_optimizer_state, require_whole
from .restore import Restore, Unmatched
from .sharded import holdings, parameters_of
from .source import StateDictSource

E = TypeVar("E", bound=enum.Enum)


class StateForm(enum.Enum):
    """The form of a sharded model's tensors in a state dict."""

    SHARDED = "sharded"
    """A ``CheckpointTensor`` over this rank's memory, of the whole tensor's shape: nothing is copied or sent."""
    DTENSOR = "dtensor"
    """A ``DTensor`` over this rank's memory, as the parameters are."""
    FULL = "full"
    """A whole tensor in host memory, on every rank."""
    FULL_ON_RANK_0 = "full_on_rank_0"
    """A whole tensor in host memory on rank 0; other ranks get an empty state dict."""


class StateOrigin(enum.Enum):
    """Which ranks have the state dict that a model is given."""

    EVERY_RANK = "every_rank"
    """Each rank has one, with all of what it needs."""
    RANK_0 = "rank_0"
    """Rank 0 has whole tensors, and sends them one by one; what other ranks give is not looked at."""


@dataclass(frozen=True)
class StateOptions:
    """Settings of the functions of ``polyshard.state``; the same on every rank. Enums may be given as their text.

    Raises ConfigError: a text that stands for nothing.
    """

    form: StateForm | str = StateForm.SHARDED
    """What ``get_...`` returns."""
    origin: StateOrigin | str = StateOrigin.EVERY_RANK
    """Where ``set_...`` takes values from."""
    strict: bool = True
    """Whether ``set_...`` refuses names of a model that are missing or unexpected. Optimizers are always matched."""
    frozen: bool = True
    """Whether parameters that need no gradient are in the model's state dict. Without them, as adapters are saved,
    ``set_...`` takes a state dict with or without them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", _member(StateForm, "form", self.form))
        object.__setattr__(self, "origin", _member(StateOrigin, "origin", self.origin))


def _member(kind: type[E], setting: str, value: E | str) -> E:
    try:
        return kind(value)
    except ValueError as error:
        known = ", ".join(repr(each.value) for each in kind)
        raise ConfigError(f"StateOptions: {setting} is {value!r}; give one of {known}.") from error


_FULL = (StateForm.FULL, StateForm.FULL_ON_RANK_0)


def get_model_state_dict(model: nn.Module, options: StateOptions | None = None) -> dict[str, Any]:
    """Parameters and persistent buffers by fully-qualified name, of whole tensors' shapes, in the asked form.

    A tied parameter is there under each of its names, as in ``model.state_dict()`` of the unsharded model. Sharded and
    DTensor forms share the model's memory: ``torch.distributed.checkpoint.save`` writes them without a gather, and
    ``load`` reads into the model in place. Every rank calls it, between steps.

    Of a module inside a sharded model, names are relative to it, and only units with a parameter in it are gathered.

    Args:
        model: A sharded model, or any module inside one, the same on every rank.
        options: Of which ``form`` and ``frozen`` count.

    Raises:
        StateError: ``model`` is neither, or is inside a step or ``unsharded()``.
        UnsupportedError: whole tensors of a pretended world.
        CollectiveError: another rank did not arrive.
    """
    options = options or StateOptions()
    sharded, module = savable_part(model, "get_model_state_dict()")
    names = names_within(sharded, module)
    if options.form in _FULL:
        require_whole(sharded, "get_model_state_dict()")
        if module is not sharded.module:
            with together(sharded.collectives, "Preparing a state dict", {"model": sharded.name_of(module)}):
                pass
        state = full_model_state(sharded, names, everywhere=options.form is StateForm.FULL)
        names = names_within(sharded, module, inside=False)
    else:
        state = model_state(sharded.module)
        if options.form is StateForm.DTENSOR:
            state.update(_parameters_as_dtensors(sharded))
    frozen = set() if options.frozen else frozen_names(sharded.module)
    kept = {name: value for name, value in state.items() if name in names and name not in frozen}
    return in_order(module, names, kept)


def get_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizers, options: StateOptions | None = None
) -> dict[str, Any]:
    """The optimizer's state by parameter name, in the asked form: ``{"state": ..., "param_groups": [...]}``.

    The form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``; several optimizers appear as one.
    Tensors of a parameter's shape are in the form that its model's state dict has, others as they are. In the sharded
    form a rank without an element of a parameter has no state of it. State that an optimizer has not made yet is not
    there: see ``init_optimizer_state``.

    Raises:
        StateError, UnsupportedError, CollectiveError: as ``get_model_state_dict``.
        ConfigError: the optimizer holds a parameter that is not the model's, or state that no other number of ranks
            could take over.
    """
    options = options or StateOptions()
    sharded = savable_model(model, "get_optimizer_state_dict()")
    joint = Joint(optimizer)
    if options.form in _FULL:
        require_whole(sharded, "get_optimizer_state_dict()")
        with together(sharded.collectives, "Looking at the optimizer's state"):
            own = optimizer_state(model, optimizer)
        receives = options.form is StateForm.FULL or sharded.collectives.rank == 0
        return full_optimizer_state(sharded, joint, own, receives=receives)
    state = optimizer_state(model, optimizer)
    if options.form is StateForm.DTENSOR:
        for parameter, holding in holdings(sharded, joint.groups).items():
            given = joint.given_state_of(parameter) if holding.unit is None else {}
            if is_dtensor(parameter) and given:
                state["state"][holding.names[0]] = dict(given)
    return state


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, options: StateOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``get_model_state_dict`` and ``get_optimizer_state_dict``; arguments and errors are theirs."""
    # Before anything is gathered.
    savable_model(model, "get_state_dict()")
    return get_model_state_dict(model, options), get_optimizer_state_dict(model, optimizers, options)


def set_model_state_dict(model: nn.Module, state: Mapping[str, Any], options: StateOptions | None = None) -> Unmatched:
    """Let ``model`` have the values of ``state``, in place; returns the names that did not match, if not ``strict``.

    Tensors have the whole tensors' shapes. They may be plain, ``CheckpointTensor`` of the same sharding, or ``DTensor``
    of any, which are gathered one at a time where a rank needs other elements than it has. Values are converted to the
    model's dtypes, as ``load_state_dict`` does. A tied parameter is taken from any of its names. Every rank calls it,
    between steps.

    Raises:
        ConfigError: names are missing or unexpected, or tensors have other shapes: one error with all of it, and
            nothing was changed.
        StateError: ``model`` is not the outermost sharded module, or is inside a step or ``unsharded()``.
        RankMismatchError: another rank failed.
        CollectiveError: another rank did not arrive.
    """
    return _set(savable_model(model, "set_model_state_dict()"), model, None, state, None, options or StateOptions())


def set_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizers, state: Mapping[str, Any], options: StateOptions | None = None
) -> None:
    """Let ``optimizer`` have ``state``, of the form that ``get_optimizer_state_dict`` gives, here or of torch.

    An optimizer that never stepped is given its state. Numbers in the groups' settings are taken over; what is on or
    off must be as it was, and so must the dtypes of states. Tensors as in ``set_model_state_dict``.

    Raises:
        ConfigError: the state is of another optimizer or model; nothing was changed.
        StateError, RankMismatchError, CollectiveError: as ``set_model_state_dict``.
    """
    sharded = savable_model(model, "set_optimizer_state_dict()")
    _set(sharded, model, Joint(optimizer), None, state, options or StateOptions())


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateOptions | None = None,
) -> Unmatched:
    """``set_model_state_dict`` and ``set_optimizer_state_dict``, after both state dicts were found to fit."""
    sharded = savable_model(model, "set_state_dict()")
    return _set(sharded, model, Joint(optimizers), model_state_dict, optim_state_dict, options or StateOptions())


def init_optimizer_state(model: nn.Module, optimizer: Optimizers) -> None:
    """Let an optimizer that never stepped make its state, for ``torch.distributed.checkpoint.load`` to read into.

    By a step with gradients of zeros and a learning rate of zero, which leaves parameters as they are. The state counts
    that step: load another one over it before training. ``set_optimizer_state_dict`` and ``polyshard.checkpoint`` need
    no such call. Does nothing to an optimizer that has state. Every rank calls it, between steps.

    Raises:
        StateError: a parameter has a gradient, or as ``set_model_state_dict``.
    """
    sharded = savable_model(model, "init_optimizer_state()")
    for each in Joint(optimizer).members:
        if not each.state:
            _make_state(each, sharded.rank)


def _parameters_as_dtensors(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """By name, but for those of a class of their own, which are saved as the tensors inside of them."""
    return {
        each.name: each.shown.detach()
        for each in parameters_of(sharded)
        if type(each.tensor) is nn.Parameter and is_dtensor(each.shown)
    }


def _make_state(optimizer: torch.optim.Optimizer, rank: int) -> None:
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    if any(parameter.grad is not None for parameter in trained):
        raise StateError(
            f"init_optimizer_state() found gradients (rank {rank}), and would step with zeros in their place. Call "
            "optimizer.zero_grad() first."
        )
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter in trained:
            parameter.grad = None


def _set(
    sharded: ShardedModel,
    model: nn.Module,
    joint: Joint | None,
    model_values: Mapping[str, Any] | None,
    optimizer_values: Mapping[str, Any] | None,
    options: StateOptions,
) -> Unmatched:
    collectives = sharded.collectives
    make = partial(StateDictSource, model_values, optimizer_values, collectives)
    from_first = options.origin is StateOrigin.RANK_0
    # Every rank makes that of rank 0, and no rank raises alone.
    source = make(from_rank_0=True) if from_first else None
    with together(collectives, "Matching the state dict"):
        source = source or make(from_rank_0=False)
        matched = None if model_values is None else model
        restore = Restore(
            source, sharded, matched, joint, rank=sharded.rank, strict=options.strict, frozen=options.frozen
        )
    source.agree(restore.targets)
    source.read(restore.targets)
    source.read_from_others(restore.targets)
    restore.commit()
    return restore.unmatched
