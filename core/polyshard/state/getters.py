"""State dicts out of a sharded model and its optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..runtime.root import Root
from .agreement import together
from .contents import frozen_names, in_order, model_state, optimizer_state
from .dtensors import parameters_as_dtensors, state_like
from .full import full_model_state, full_optimizer_state, require_whole
from .optimizers import Joint, Optimizers
from .options import StateForm, StateOptions
from .places import holdings, places
from .resting import resting_root

_FULL = (StateForm.FULL, StateForm.FULL_ON_RANK_0)


def get_model_state_dict(model: nn.Module, options: StateOptions | None = None) -> dict[str, Any]:
    """Parameters and persistent buffers by fully-qualified name, of whole tensors' shapes, in the asked form.

    A tied parameter is there under each of its names, as in ``model.state_dict()`` of the unsharded model. Sharded and
    DTensor forms share the model's memory: ``torch.distributed.checkpoint.save`` writes them without a gather, and
    ``load`` reads into the model in place. Every rank calls it, between steps.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or is inside a step or ``unsharded()``.
        UnsupportedError: whole tensors of a pretended world.
        CollectiveError: another rank did not come.
    """
    options = options or StateOptions()
    root = resting_root(model, "get_model_state_dict()")
    if options.form in _FULL:
        require_whole(root, "get_model_state_dict()")
        state = full_model_state(model, root, receives=_receives(root, options))
    else:
        state = model_state(model)
        if options.form is StateForm.DTENSOR:
            state.update(parameters_as_dtensors(places(root)))
    if not options.frozen:
        for name in frozen_names(model):
            state.pop(name, None)
    return in_order(model, state)


def get_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizers, options: StateOptions | None = None
) -> dict[str, Any]:
    """The optimizer's state by parameter name, in the asked form: ``{"state": ..., "param_groups": [...]}``.

    The form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``; several optimizers appear as one.
    Tensors of a parameter's shape are in the form that its model's state dict has, others as they are. A rank without
    an element of a parameter has no state of it. State that an optimizer has not made yet is not there: see
    ``init_optimizer_state``.

    Raises:
        StateError, UnsupportedError, CollectiveError: as ``get_model_state_dict``.
        ConfigError: the optimizer holds a parameter that is not the model's, or state that no other number of ranks
            could take over.
    """
    options = options or StateOptions()
    root = resting_root(model, "get_optimizer_state_dict()")
    joint = Joint(optimizer)
    if options.form in _FULL:
        require_whole(root, "get_optimizer_state_dict()")
        with together(root.collectives, "Looking at the optimizer's state"):
            own = optimizer_state(model, optimizer)
        return full_optimizer_state(root, joint, own, receives=_receives(root, options))
    state = optimizer_state(model, optimizer)
    if options.form is StateForm.DTENSOR:
        parameters = parameters_as_dtensors(places(root))
        for parameter, holding in holdings(root, joint.groups).items():
            like = parameters.get(holding.names[0])
            if like is None or holding.unit is not None:
                continue
            for key, value in joint.state_of(parameter).items():
                shown = state_like(like, holding, value)
                if shown is not None:
                    state["state"][holding.names[0]][key] = shown
    return state


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, options: StateOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``get_model_state_dict`` and ``get_optimizer_state_dict``; arguments and errors are theirs."""
    return get_model_state_dict(model, options), get_optimizer_state_dict(model, optimizers, options)


def _receives(root: Root, options: StateOptions) -> bool:
    return options.form is StateForm.FULL or root.collectives.rank == 0
