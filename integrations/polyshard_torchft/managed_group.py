"""The process group between the same ranks of several jobs, made anew by torchft where jobs come or go."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import ProcessGroupGloo, ProcessGroupNCCL

#: Attempts of gloo's to connect to a peer that does not come, each as long as the group's timeout (torch 2.13).
_CONNECTS = 5


class _Numbered:
    """Knows which set of jobs it connects."""

    #: A number that the lighthouse gives each set of jobs, the same for all of them.
    quorum = 0

    def configure(self, *args: Any, **options: Any) -> None:
        """Connect the jobs of another set; called by torchft's manager."""
        self.quorum = int(options["quorum_id"] if "quorum_id" in options else args[4])
        super().configure(*args, **options)  # type: ignore[misc]


class _Gloo(_Numbered, ProcessGroupGloo):  # type: ignore[misc]
    pass


class _Nccl(_Numbered, ProcessGroupNCCL):  # type: ignore[misc]
    pass


class ManagedGroup:
    """Sums and maxima over jobs, for tensors of one device."""

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self._timeout = timeout
        # A job that missed a change of jobs meets nobody.
        self.group = _Nccl(timeout) if device.type == "cuda" else _Gloo(timeout / _CONNECTS)
        """What torchft's manager configures."""

    @property
    def quorum(self) -> int:
        """The number of the set of jobs that is connected, or was tried to be."""
        return self.group.quorum

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Any:
        """Issue a reduction in place; returns torch's work. Raises ``RuntimeError``."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = op, self._timeout
        return self.group.allreduce([tensor], options)

    def hang_up(self) -> None:
        """End the connections: other jobs would wait for what this one does not send any more."""
        self.group.abort()

    def close(self) -> None:
        self.group.shutdown()
