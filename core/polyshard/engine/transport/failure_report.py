"""The file in which a rank that waited in vain leaves what it knows."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def write_report(rank: int, error: BaseException, operations: Sequence[Mapping[str, Any]], others: Any) -> str | None:
    """Write JSON to a new file in the folder for temporary files; returns its path, None where that cannot be done.

    Args:
        rank: Of this process among those of the model.
        error: On its way to the program.
        operations: The last communications, the oldest first.
        others: What other ranks said of themselves.
    """
    try:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        told = {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "monotonic": time.monotonic(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "error": f"{type(error).__name__}: {error}",
            "others": others,
            "operations": operations,
            "stacks": {
                f"{names.get(ident, 'unknown')} ({ident})": traceback.format_stack(frame)
                for ident, frame in sys._current_frames().items()
            },
        }
        # A name that nobody can foresee: a link in its place would be followed.
        descriptor, path = tempfile.mkstemp(prefix=f"polyshard-rank-{rank}-", suffix=".json")
        try:
            with os.fdopen(descriptor, "w") as stream:
                json.dump(told, stream, indent=1)
        except BaseException:
            # Of a full disk, say: half a report misleads.
            os.unlink(path)
            raise
    except Exception:
        # The error that is reported must come through whatever happens here.
        return None
    return path
