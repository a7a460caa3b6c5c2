"""The tensors of a sharded model under all of their names, with the elements of each that this rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from polyshard.errors import ConfigError
from polyshard.inspect import ShardedModel
from polyshard.state.contents import model_state, names_within
from polyshard.state.source import chunks_of

#: Parameters and persistent buffers by all of their names; ``chunks_of`` one are what this rank holds of it.
Held = Mapping[tuple[str, ...], torch.Tensor]


def tensors_of(sharded: ShardedModel) -> Held:
    """All of the model's, those of units first; last what packed ones have beside.

    Raises:
        ConfigError: something has no memory to be read into, or to be written from.
        ParameterChangedError: modules moved, so that a name is another parameter's now.
    """
    names = names_within(sharded, sharded.module)
    held = {names[first]: value for first, value in model_state(sharded.module).items()}
    hollow = [f"'{each[0]}'" for each, value in held.items() if any(chunk.view.is_meta for chunk in chunks_of(value))]
    if hollow:
        raise ConfigError(
            f"{', '.join(hollow)} are on the meta device (rank {sharded.rank}): shard() was told to leave them alone, "
            "so there is nothing to read into. Give each memory before shard(), by module.name = "
            "torch.nn.Parameter(torch.empty_like(module.name, device='cpu'))."
        )
    return held


def joined(path: str, name: str) -> str:
    """The name of what is ``name`` in the module ``path``."""
    return f"{path}.{name}" if path else name
