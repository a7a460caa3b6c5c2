"""Model and optimizer state of a sharded model as objects that ``torch.distributed.checkpoint`` saves and loads."""

from .contents import model_state, optimizer_state
from .sharded import CheckpointTensor

__all__ = ["CheckpointTensor", "model_state", "optimizer_state"]
