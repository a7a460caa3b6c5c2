"""What torch's own functions must know of sharded models: put in place when the first model is sharded."""

from __future__ import annotations

import threading

from .gradient_utilities import GradientUtilities
from .live_roots import live_roots
from .root import Root

_installing = threading.Lock()
_installed: list[GradientUtilities] = []


def follow(root: Root) -> None:
    """Let torch's functions for gradients find the parameters of ``root``.

    They are exchanged once in a process, and never by an import; see [Note: torch's functions].
    """
    with _installing:
        if not _installed:
            _installed.append(GradientUtilities(live_roots))
    live_roots.add(root)
