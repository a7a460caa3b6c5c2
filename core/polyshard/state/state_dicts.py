"""State dicts out of a sharded model and its optimizers, and into them; the settings of both."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..inspect import ShardedModel, savable_model, savable_part
from .contents import (
    Joint,
    Optimizers,
    as_dtensor,
    frozen_names,
    in_order,
    known_names,
    model_state,
    names_within,
    optimizer_state,
)
from .exchange import together
from .full import full_model_state, full_optimizer_state, require_whole
from .initial import make_state
from .restore import Restore, Unmatched
from .sharded import parameters_of
from .source import StateDictSource


class StateForm(enum.Enum):
    """The form of a sharded model's tensors in a state dict."""

    DTENSOR = "dtensor"
    """A ``DTensor`` over this rank's memory, as the parameters are: nothing is copied or sent."""
    FULL = "full"
    """A whole tensor in host memory, on every rank."""
    FULL_ON_RANK_0 = "full_on_rank_0"
    """A whole tensor in host memory on rank 0; other ranks get an empty state dict."""


@dataclass(frozen=True)
class StateOptions:
    """Settings of the functions of ``polyshard.state``; the same on every rank. Enums may be given as their text.

    Raises ConfigError: a text that stands for nothing.
    """

    form: StateForm | str = StateForm.DTENSOR
    """What ``get_...`` returns."""
    strict: bool = True
    """Whether ``set_...`` refuses names of a model that are missing or unexpected, and trained parameters without an
    optimizer's state where others have some. What else an optimizer has is always matched."""
    frozen: bool = True
    """Whether parameters that need no gradient are in the model's state dict. Without them, as adapters are saved,
    ``set_...`` takes a state dict with or without them."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "form", StateForm(self.form))
        except ValueError as error:
            known = ", ".join(repr(each.value) for each in StateForm)
            raise ConfigError(f"StateOptions: form is {self.form!r}; give one of {known}.") from error


_FULL = (StateForm.FULL, StateForm.FULL_ON_RANK_0)


def get_model_state_dict(model: nn.Module, options: StateOptions | None = None) -> dict[str, Any]:
    """Parameters and persistent buffers by fully-qualified name, of whole tensors' shapes, in the asked form.

    A tied parameter is there under each of its names, as in ``model.state_dict()`` of the unsharded model. DTensors
    share the model's memory: ``torch.distributed.checkpoint.save`` writes them without a gather, and ``load`` reads
    into the model in place. Every rank calls it, between steps.

    Of a module inside a sharded model, names are relative to it, and only units with a parameter in it are gathered.

    Args:
        model: A sharded model, or any module inside one, the same on every rank.
        options: Of which ``form`` and ``frozen`` count.

    Raises:
        StateError: ``model`` is neither, or is inside a step or ``unsharded()``.
        UnsupportedError: whole tensors of a pretended world; DTensors of what is cut as none is.
        CollectiveError: another rank did not arrive.
    """
    options = options or StateOptions()
    sharded, module = savable_part(model, "get_model_state_dict()")
    names = names_within(sharded, module)
    if options.form in _FULL:
        require_whole(sharded, "get_model_state_dict()")
        with sharded.meeting("a whole state dict of the model", (sharded.collectives,)):
            if module is not sharded.module:
                with together(sharded.collectives, "Preparing a state dict", {"model": sharded.name_of(module)}):
                    pass
            state = full_model_state(sharded, names, everywhere=options.form is StateForm.FULL)
        names = names_within(sharded, module, inside=False)
    else:
        state = model_state(sharded, as_dtensor)
    frozen = set() if options.frozen else frozen_names(sharded)
    kept = {name: value for name, value in state.items() if name in names and name not in frozen}
    return in_order(module, names, kept)


def get_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizers, options: StateOptions | None = None
) -> dict[str, Any]:
    """The optimizer's state by parameter name, in the asked form: ``{"state": ..., "param_groups": [...]}``.

    The form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``; several optimizers appear as one.
    Tensors of a parameter's shape are in the form that its model's state dict has, others as they are.

    An optimizer that never stepped is given its state first, as torch's function of this name does: that of one step
    with gradients of zeros and a learning rate of zero, which changes no parameter. So there is something for
    ``torch.distributed.checkpoint.load`` to read into. One whose gradients are there already stays as it is, without
    state. Every rank calls it, between steps.

    Raises:
        StateError, UnsupportedError, CollectiveError: as ``get_model_state_dict``.
        ConfigError: the optimizer holds a parameter that is not the model's, or state that no other number of ranks
            could take over; or it never stepped, and cannot so, as one that needs a closure.
    """
    sharded, joint = savable_model(model, "get_optimizer_state_dict()"), Joint(optimizer)
    make_state(sharded, joint.members)
    return present_optimizer_state_dict(model, optimizer, options)


def present_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizers, options: StateOptions | None = None
) -> dict[str, Any]:
    """As ``get_optimizer_state_dict``, of the state that there is: an optimizer that never stepped has none."""
    options = options or StateOptions()
    sharded = savable_model(model, "get_optimizer_state_dict()")
    joint = Joint(optimizer)
    if options.form not in _FULL:
        return optimizer_state(sharded, joint, dtensors=True)
    require_whole(sharded, "get_optimizer_state_dict()")
    receives = options.form is StateForm.FULL or sharded.collectives.rank == 0
    with sharded.meeting("a whole state dict of the optimizer", (sharded.collectives,)):
        with together(sharded.collectives, "Looking at the optimizer's state"):
            own = optimizer_state(sharded, joint)
        return full_optimizer_state(sharded, joint, own, receives=receives)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, options: StateOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``get_model_state_dict`` and ``get_optimizer_state_dict``; arguments and errors are theirs."""
    # Before anything is gathered.
    savable_model(model, "get_state_dict()")
    return get_model_state_dict(model, options), get_optimizer_state_dict(model, optimizers, options)


def set_model_state_dict(model: nn.Module, state: Mapping[str, Any], options: StateOptions | None = None) -> Unmatched:
    """Let ``model`` have the values of ``state``, in place; returns the names that did not match, if not ``strict``.

    Tensors have the whole tensors' shapes. They may be plain, whole on every rank, or ``DTensor``, which are gathered
    one at a time where they are placed otherwise than the parameter. Values are converted to the model's dtypes, as
    ``load_state_dict`` does. A tied parameter is taken from any of its names. Every rank calls it, between steps. Where
    rank 0 alone has values, torch's function of this name sends them, with ``broadcast_from_rank0``.

    Raises:
        ConfigError: names are missing or unexpected, or tensors have other shapes: one error with all of it, and
            nothing was changed.
        StateError: ``model`` is not the outermost sharded module, or is inside a step or ``unsharded()``.
        RankMismatchError: another rank failed, or has DTensors that are placed otherwise.
        CollectiveError: another rank did not arrive.
    """
    return _set(savable_model(model, "set_model_state_dict()"), None, state, None, options or StateOptions())


def set_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizers, state: Mapping[str, Any], options: StateOptions | None = None
) -> None:
    """Let ``optimizer`` have ``state``, of the form that ``get_optimizer_state_dict`` gives, here or of torch.

    An optimizer that never stepped is given its state. Numbers in the groups' settings are taken over; what is on or
    off must be as it was, and so must the dtypes of states. Tensors as in ``set_model_state_dict``.

    Raises:
        ConfigError: the state is of another optimizer or model, or lacks that of some trained parameters and has that
            of others, if ``strict``; nothing was changed.
        StateError, RankMismatchError, CollectiveError: as ``set_model_state_dict``.
    """
    sharded = savable_model(model, "set_optimizer_state_dict()")
    _set(sharded, Joint(optimizer), None, state, options or StateOptions())


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
    return _set(sharded, Joint(optimizers), model_state_dict, optim_state_dict, options or StateOptions())


def _set(
    sharded: ShardedModel,
    joint: Joint | None,
    model_values: Mapping[str, Any] | None,
    optimizer_values: Mapping[str, Any] | None,
    options: StateOptions,
) -> Unmatched:
    called: dict[str, object] = {}
    with together(sharded.collectives, "Matching the state dict", called):
        names = known_names(sharded)
        source = StateDictSource(model_values, optimizer_values, list(parameters_of(sharded)), names)
        called.update(source.gathered)
        given = model_values is not None
        strict, frozen = options.strict, options.frozen
        restore = Restore(source, sharded, joint, model=given, strict=strict, frozen=frozen, whole_state=strict)
    source.read(restore.targets)
    source.read_gathered(restore.targets)
    restore.commit()
    return restore.unmatched
