"""Random states of all ranks, for a checkpoint: a run that is taken up draws what the run that never stopped draws."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import ConfigError
from .state.exchange import speaks
from .state.resting import resting_root


def random_states(model: nn.Module) -> list[dict[str, Any]]:
    """The state of every rank's generators, in rank order: for ``extra`` of ``polyshard.checkpoint.save``.

    Python's, numpy's where a program has imported it, torch's for the CPU, and that of the device of a model on CUDA.
    Tensors and numbers alone. Every rank calls it, between steps; each gets all of them.

    Raises:
        StateError: inside a step, or ``model`` is not the outermost sharded module.
    """
    root = resting_root(model, "random_states()")
    own = own_state(root.collectives.device)
    if not speaks(root.collectives):
        return [own]
    with root.meeting("exchange of random states", (root.collectives,)):
        return list(root.collectives.all_gather_object(own))


def restore_random_states(model: nn.Module, states: Sequence[Mapping[str, Any]]) -> None:
    """Go on with this rank's of ``states``, which ``random_states`` gave at the save. Every rank calls it.

    Raises:
        ConfigError: as many ranks saved them as there are not now: they cannot be shared out. Nothing was changed. Draw
            from new seeds then, on every rank, and other numbers follow.
        StateError: inside a step, or ``model`` is not the outermost sharded module.
    """
    collectives = resting_root(model, "restore_random_states()").collectives
    ranks = collectives.world_size if speaks(collectives) else 1
    if len(states) != ranks:
        raise ConfigError(
            f"There are random states of {len(states)} ranks, and rank {collectives.rank} is one of {ranks}: they "
            "cannot be shared out. Go on with as many ranks as before, or leave them out and seed every rank anew."
        )
    restore_own_state(states[collectives.rank if ranks > 1 else 0], collectives.device)


def own_state(device: torch.device) -> dict[str, Any]:
    """Of this process, of tensors and numbers alone."""
    own: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, *rest = numpy.random.get_state()
        own["numpy"] = (name, torch.from_numpy(numpy.asarray(words).astype(numpy.int64)), *rest)
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    return own


def restore_own_state(own: Mapping[str, Any], device: torch.device) -> None:
    """Go on with ``own``, which ``own_state`` gave."""
    torch.set_rng_state(own["torch"])
    random.setstate(own["python"])
    if "numpy" in own:
        import numpy as np

        name, words, *rest = own["numpy"]
        np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], device)
