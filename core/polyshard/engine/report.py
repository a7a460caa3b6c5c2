"""What memory one rank needs."""

from __future__ import annotations

from dataclasses import dataclass

from .lanes import REDUCTIONS_IN_FLIGHT
from .root import Root
from .unit import Reshard


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes that one rank needs for parameters and what belongs to them. Activations are not counted."""

    world_size: int
    rank: int
    units: int
    parameters: int
    """Elements of the whole model."""
    master_nbytes: int
    """Master shards."""
    gradient_nbytes: int
    """Gradient shards, from a backward to the next ``zero_grad``."""
    gathered_nbytes: int
    """Gather buffers alive at once at most: what is kept, the computing unit, and those prefetched."""
    reduction_nbytes: int
    """Inputs of the reductions in flight."""

    def optimizer_nbytes(self, states: int) -> int:
        """Bytes of an optimizer with ``states`` tensors of a master's size (AdamW: 2)."""
        return states * self.master_nbytes

    def total_nbytes(self, states: int = 2) -> int:
        """Everything together, for an optimizer with ``states`` tensors a parameter."""
        return (
            self.master_nbytes
            + self.gradient_nbytes
            + self.gathered_nbytes
            + self.reduction_nbytes
            + self.optimizer_nbytes(states)
        )


def memory_report(root: Root) -> MemoryReport:
    """The report of ``root``'s rank.

    Read off the layouts: nothing is measured.
    """
    units = list(root.units)
    kept = [u for u in units if not u.permanent and (u.reshard_policy is Reshard.NEVER or u.spec.is_root)]
    released = sorted((u.gathered_nbytes for u in units if not u.permanent and u not in kept), reverse=True)
    wires = sorted((u.gradients.wire_nbytes for u in units if u.trainable and not u.resident), reverse=True)
    return MemoryReport(
        world_size=root.collectives.world_size,
        rank=root.rank,
        units=len(units),
        parameters=sum(slot.numel for u in units for slot in u.layout.slots),
        master_nbytes=sum(u.master.numel() * u.master.element_size() for u in units),
        gradient_nbytes=sum(u.layout.shard_numel * u.dtypes.grad.itemsize for u in units if u.trainable),
        gathered_nbytes=sum(u.gathered_nbytes for u in kept) + sum(released[: 1 + root.schedule.ahead]),
        reduction_nbytes=sum(wires[:REDUCTIONS_IN_FLIGHT]),
    )
