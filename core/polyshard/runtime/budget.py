"""Which units stay unsharded between forward and backward, so that measured memory stays within a budget.

[Note: when it is decided, and from what]
At first every unit is released after forward, as ``full_shard`` does. The decision falls once, at the end of the first
backward that follows an optimizer step. By then the allocator's peak holds all that comes back in later steps:
activations, gradients, reductions, the optimizer's state and its temporaries. A unit that is kept adds its gather
buffer and nothing else, so the new peak is at most the measured one plus the buffers of the units that are kept.

- The end of a backward, not the start of a forward: it has reduced over all ranks, so that every rank is there. Groups
  of a hybrid strategy may run forwards of their own in between.
- An optimizer step shows in the masters' sums. Version counters do not move with fused optimizers, and gradients are
  dropped after skipped steps too.
- Units are kept from the end of the forward: their backward comes first, so their memory is held for the shortest time.
- Ranks exchange their free memory and take the smallest, and all take the order of rank 0.

The allocator's peak is since the start of the process, or since the user reset it; the engine resets nothing that users
read. Memory that only wrapping took makes the estimate too high, and fewer units are kept than could be. Batches that
grow later are not noticed: what an explicit budget says should leave room for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from ..interfaces import Collectives
from .unit import Reshard, Unit

#: Part of a device's memory that is left free where the user gives no budget: for activations of larger batches.
MARGIN = 0.1
#: Backwards without any change of a master after which the decision falls nevertheless.
PATIENCE = 64
_BLOCK = 512
_UNSPLIT = 1 << 20


class MemoryMeter(ABC):
    """What a device tells about its memory. Bytes everywhere."""

    @abstractmethod
    def peak_allocated(self) -> int:
        """The most that was allocated at once so far."""

    def default_budget(self) -> int:
        """What may be allocated at once where the user gave no budget: no more than that is known to be there."""
        return self.peak_allocated()

    def footprint(self, nbytes: int) -> int:
        """What allocating ``nbytes`` takes at most."""
        return nbytes


class CudaMemory(MemoryMeter):
    """As PyTorch's allocator counts it on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def default_budget(self) -> int:
        """The peak, and what nobody has of the device now, less ``MARGIN`` of the whole.

        What the allocator keeps cached counts as taken: gathers have a pool of their own and cannot use the rest.
        """
        free, total = torch.cuda.mem_get_info(self._device)
        return self.peak_allocated() + max(0, free - int(MARGIN * total))

    def footprint(self, nbytes: int) -> int:
        """Rounded up to blocks; large ones may carry a rest that the allocator does not split off."""
        return -(-nbytes // _BLOCK) * _BLOCK + (_UNSPLIT if nbytes >= _UNSPLIT else 0)


class PlannedMemory(MemoryMeter):
    """For devices without statistics: what the layout says, activations not counted. Needs an explicit budget."""

    def __init__(self, planned: Callable[[], int]) -> None:
        self._planned = planned

    def peak_allocated(self) -> int:
        return self._planned()


def fitting(footprints: Sequence[int], room: int) -> int:
    """How many from the end of ``footprints`` have a sum of at most ``room``."""
    for count, nbytes in enumerate(reversed(footprints)):
        room -= nbytes
        if room < 0:
            return count
    return len(footprints)


class Budget:
    """A decision still to come: which units are kept. One for each root, dropped once the decision has fallen.

    Args:
        nbytes: what tensors may take at once; None for the meter's default.
        meter: what this rank's device tells about its memory.
    """

    def __init__(self, nbytes: int | None, meter: MemoryMeter) -> None:
        self._nbytes = nbytes
        self._meter = meter
        self._backwards = 0
        self._sums: tuple[float, ...] = ()
        self._stepped = False

    def decide(self, units: Sequence[Unit], order: Sequence[Unit], collectives: Collectives) -> bool:
        """Decide, if it is time; returns whether the decision has fallen.

        To be called at the end of each backward that reduced, by every rank.

        Args:
            units: all of the root's, in module order.
            order: those that the last forward ran, in its order, less those that are kept in any case or that backward
                does not gather.
            collectives: all ranks that share the model.
        """
        if collectives.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        sums = _sums(units)
        self._backwards += 1
        self._stepped = self._backwards > 1 and (self._stepped or sums != self._sums)
        self._sums = sums
        if self._backwards == 1:
            return False
        index = {unit: position for position, unit in enumerate(units)}
        mine = (self._stepped, self._room(), [index[unit] for unit in dict.fromkeys(order)])
        everyone = collectives.all_gather_object(mine) if collectives.capabilities.can_communicate else [mine]
        # A rank that holds no element of any parameter sees no step.
        if self._backwards < PATIENCE and not any(stepped for stepped, _, _ in everyone):
            return False
        choice = [
            unit
            for unit in (units[position] for position in everyone[0][2])
            if unit.reshard_policy is Reshard.UNLESS_TURNING and not unit.permanent
        ]
        room = min(room for _, room, _ in everyone)
        count = fitting([self._meter.footprint(unit.gathered_nbytes) for unit in choice], room)
        for unit in choice[len(choice) - count :]:
            unit.reshard_policy = Reshard.NEVER
        return True

    def _room(self) -> int:
        budget = self._meter.default_budget() if self._nbytes is None else self._nbytes
        return budget - self._meter.peak_allocated()


def _sums(units: Sequence[Unit]) -> tuple[float, ...]:
    masters = [unit.master for unit in units if unit.trainable]
    with torch.no_grad():
        flat = [torch.view_as_real(master) if master.is_complex() else master for master in masters]
        return tuple(float(master.sum(dtype=torch.float64)) for master in flat)
