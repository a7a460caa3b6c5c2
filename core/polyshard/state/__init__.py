"""Model and optimizer state of a sharded model, as objects that the rest of PyTorch reads.

State dicts have the names and whole shapes of the unsharded model. By default a tensor stands for the part of it that
this rank holds, and stock ``torch.distributed.checkpoint`` saves and loads it without a gather::

    model_state, optim_state = polyshard.state.get_state_dict(model, optimizer)
    torch.distributed.checkpoint.save({"model": model_state, "optimizer": optim_state}, checkpoint_id=directory)

``StateOptions`` asks for DTensors, or for whole tensors on every rank or on rank 0.
"""

from ..io.boxes import Box, Chunk
from .restore import Unmatched
from .sharded import CheckpointTensor
from .state_dicts import (
    StateForm,
    StateOptions,
    StateOrigin,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    init_optimizer_state,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "Box",
    "CheckpointTensor",
    "Chunk",
    "StateForm",
    "StateOptions",
    "StateOrigin",
    "Unmatched",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "init_optimizer_state",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
