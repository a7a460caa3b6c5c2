"""Which job this process belongs to, and how often torchrun has restarted it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One start of a job's processes by torchrun."""

    job: str
    """The same for all restarts of a job, and for no other job."""
    restarts: int
    """0 at the first start."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """What torchrun says; without it, a job that was never restarted."""
        job = environ.get("TORCHELASTIC_RUN_ID", "none")
        if job == "none":
            # torchrun's answer without a rendezvous; the process that restarts the ranks is the same for all of them.
            job = f"{socket.gethostname()}-{os.getppid()}"
        return cls(job, int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
