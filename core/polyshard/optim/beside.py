"""Exchanges that run beside what the optimizer computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ..interfaces import Work


class Beside(ABC):
    """Runs exchanges in the order in which they are issued, each behind what was computed until then."""

    @abstractmethod
    def issue(self, start: Callable[[], Work]) -> Callable[[], None]:
        """Start an exchange. What it returns orders what is computed afterwards behind the exchange."""


class OnHost(Beside):
    """For operations that run on a backend's own threads until ``Work.wait``."""

    def issue(self, start: Callable[[], Work]) -> Callable[[], None]:
        return start().wait


class OnStream(Beside):
    """For CUDA and stream-ordered collectives, on a stream of its own.

    Memory that is used there comes from the pool of the stream that computes. It may be let go of once that one has
    been ordered behind the exchange.
    """

    def __init__(self, device: torch.device) -> None:
        # High priority: what waits behind compute kernels delays the compute that waits for it.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def issue(self, start: Callable[[], Work]) -> Callable[[], None]:
        computing = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            start().wait()
            arrived = self._stream.record_event()
        return lambda: computing.wait_event(arrived)
