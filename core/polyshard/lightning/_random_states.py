"""Random states of all ranks, which a run that resumes goes on with."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def random_states(device: torch.device) -> list[dict[str, Any]]:
    """Each rank's, in rank order, of tensors and numbers alone. Every rank calls it."""
    name, words, *rest = np.random.get_state()
    own: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
    }
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    return everyone


def restore_random_state(states: list[dict[str, Any]], device: torch.device) -> None:
    """Go on with this rank's; with what there is where the number of ranks is another."""
    if len(states) != dist.get_world_size():
        return
    own = states[dist.get_rank()]
    torch.set_rng_state(own["torch"])
    random.setstate(own["python"])
    name, words, *rest = own["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], device)
