"""What a function is called in fingerprints and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def described(function: Callable[..., Any]) -> str:
    """``"package.module:name"`` of a function, or of what a ``functools.partial`` calls; of an object, its class."""
    found: Any = getattr(function, "func", function)
    named = found if hasattr(found, "__qualname__") else type(found)
    return f"{named.__module__}:{named.__qualname__}"
