"""Functions that activation checkpointing calls, and calls again inside of a backward.

What stands behind ``torch.utils.checkpoint.checkpoint`` is exchanged as in [Note: torch's functions]: torch tells no
module that its forward runs under a checkpoint, and ranks have to know ([Note: recomputation]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from .. import _torch_private
from ..step.checkpointed import Checkpointed


def follow_checkpoints() -> None:
    """Let models know what checkpoints call, for good. To be called once in a process."""

    def called(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
        # None means True to torch.
        known = Checkpointed(function, use_reentrant is None or bool(use_reentrant))
        return before(known, *args, use_reentrant=use_reentrant, **kwargs)

    before = _torch_private.exchange_behind(torch.utils.checkpoint.checkpoint, called)
