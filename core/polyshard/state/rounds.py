"""A few numbers that ranks exchange without waiting: sent at one call, read at a later one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..interfaces import Collectives, ReduceOp, Work


class Round:
    """One exchange on its way. Every rank makes it, and reads it at the same later call, when it has long ended."""

    def __init__(self, values: torch.Tensor, work: Work, sources: tuple[torch.Tensor, ...] = ()) -> None:
        """``values``: what ``work`` makes usable; ``sources``: what is read until then. Kept until it is read."""
        self._values = values
        self._sources = sources
        self._work: Work | None = work
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            work.wait()
            self._work = None
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        """The numbers, on the host."""
        if self._work is not None:
            self._work.wait()
        if self._event is not None:
            self._event.synchronize()
        return [float(value) for value in self._values.tolist()]


def summing(collectives: Collectives, value: float) -> Round:
    """Ranks add up ``value``: one number. fp32, which every backend adds."""
    total = torch.full((1,), value, device=collectives.device)
    return Round(total, collectives.all_reduce(total, op=ReduceOp.SUM))


def gathering(collectives: Collectives, values: Sequence[float]) -> Round:
    """Ranks send ``values``, as many on each: those of all, in the order of ranks. In fp64."""
    mine = torch.tensor(values, dtype=torch.float64, pin_memory=collectives.device.type == "cuda")
    mine = mine.to(collectives.device, non_blocking=True)
    everyone = mine.new_empty(collectives.world_size * mine.numel())
    return Round(everyone, collectives.all_gather(everyone, mine), (mine,))
