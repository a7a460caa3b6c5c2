"""Plugins, and what they answer, in messages of errors."""

from __future__ import annotations

import torch

#: The attribute of a plugin that was constructed by name: that name and the distribution, for messages.
ORIGIN = "_polyshard_origin"


def plugin_name(plugin: object) -> str:
    """The class of ``plugin`` with its module, its name and its distribution, for messages."""
    origin = getattr(plugin, ORIGIN, "")
    return f"{type(plugin).__module__}:{type(plugin).__qualname__}" + (f" ({origin})" if origin else "")


def told(value: object) -> str:
    """``value`` for messages: a single one as it is, anything else by its class, since a model's text fills pages."""
    plain = isinstance(value, bool | int | float | str | torch.dtype | None)
    return repr(value) if plain else f"an instance of {type(value).__qualname__}"
