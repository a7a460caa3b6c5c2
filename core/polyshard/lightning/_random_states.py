"""Random states of all ranks, which a run that resumes goes on with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..preemption import own_state, restore_own_state


def random_states(device: torch.device) -> list[dict[str, Any]]:
    """Each rank's, in rank order, of tensors and numbers alone. Every rank calls it."""
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own_state(device))
    return everyone


def restore_random_state(states: list[dict[str, Any]], device: torch.device) -> None:
    """Go on with this rank's; with what there is where the number of ranks is another."""
    if len(states) == dist.get_world_size():
        restore_own_state(states[dist.get_rank()], device)
