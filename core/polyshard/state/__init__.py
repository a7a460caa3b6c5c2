"""Model and optimizer state of a sharded model, as objects that the rest of PyTorch reads.

State dicts have the names and whole shapes of the unsharded model. By default tensors are ``DTensor``s over this rank's
memory, and stock ``torch.distributed.checkpoint`` saves and loads them without a gather::

    model_state, optim_state = polyshard.state.get_state_dict(model, optimizer)
    torch.distributed.checkpoint.save({"model": model_state, "optimizer": optim_state}, checkpoint_id=directory)

``StateOptions`` asks for whole tensors, on every rank or on rank 0.
"""

from .restore import Unmatched
from .state_dicts import (
    StateForm,
    StateOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "StateForm",
    "StateOptions",
    "Unmatched",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
