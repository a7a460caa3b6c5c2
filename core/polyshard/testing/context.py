"""The context with which a test constructs plugins."""

from __future__ import annotations

from typing import Any

import torch

from polyshard import registry
from polyshard.interfaces import Group, PluginContext


def plugin_context(
    name: str = "test",
    device: torch.device | str = "cpu",
    rank: int | None = None,
    world_size: int | None = None,
) -> PluginContext:
    """A context as polyshard gives one to factories: its ``construct`` makes any installed plugin.

    ``rank`` and ``world_size`` are for listeners; polyshard leaves them None for every other plugin. What ``construct``
    made counts for this test only: no ranks compare it, and it may be called after the factory has returned.
    """
    return PluginContext(
        name=name, device=torch.device(device), rank=rank, world_size=world_size, constructor=_construct
    )


def _construct(context: PluginContext, group: Group, choice: Any) -> Any:
    return registry.construct(registry.resolve(group, choice), context).instance
