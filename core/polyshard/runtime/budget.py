"""``reshard_after_forward="auto"``: as many units stay unsharded between forward and backward as a memory budget
allows.

[Note: when it is decided, and from what]
At first every unit is released after forward, as ``full_shard`` does. The budget decides once, at the end of the first
backward that follows an optimizer step. By then the allocator's peak includes everything that later steps repeat:
activations, gradients, reductions, the optimizer's state and its temporaries. A unit that is kept adds its gather
buffer and nothing else, so the new peak is at most the measured one plus the buffers of the units that are kept.

- The end of a backward, not the start of a forward: every rank takes part in its reductions. Groups of a hybrid
  strategy may run forwards of their own in between.
- An optimizer step shows in the masters' sums. Version counters do not move with fused optimizers, and gradients are
  dropped after skipped steps too.
- Units are kept from the end of the forward: their backward runs first, so their memory is held for the shortest time.
- Ranks exchange their free memory and take the smallest, and all take the order of rank 0.

The allocator's peak is since the start of the process, or since the user reset it; the engine resets nothing that users
read. Memory that only sharding took makes the estimate too high, and fewer units are kept than could be. Batches that
grow later are not noticed: an explicit budget should leave room for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from ..interfaces import Collectives
from .module_state import ModuleState
from .order import ExecutionOrder
from .states import Reshard
from .unit import Unit

#: Fraction of a device's memory that is left free where the user gives no budget: for activations of larger batches.
MARGIN = 0.1
#: Backwards without any change of a master after which the budget decides nevertheless.
PATIENCE = 64
_BLOCK = 512
_UNSPLIT = 1 << 20


class MemoryMeter(ABC):
    """The memory of a device, in bytes."""

    @abstractmethod
    def peak_allocated(self) -> int:
        """The most that was allocated at once so far."""

    def default_budget(self) -> int:
        """The budget where the user gave none: no more than the peak is known to be there."""
        return self.peak_allocated()

    def footprint(self, nbytes: int) -> int:
        """The most that an allocation of ``nbytes`` takes."""
        return nbytes


class CudaMemory(MemoryMeter):
    """As PyTorch's allocator counts it on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    @override
    def default_budget(self) -> int:
        """The peak and the free memory of the device, less ``MARGIN`` of the whole.

        Memory that the allocator keeps cached counts as taken: gathers have a pool of their own and cannot use it.
        """
        free, total = torch.cuda.mem_get_info(self._device)
        return self.peak_allocated() + max(0, free - int(MARGIN * total))

    @override
    def footprint(self, nbytes: int) -> int:
        """``nbytes`` in whole blocks; large ones may carry a rest that the allocator does not split off."""
        return -(-nbytes // _BLOCK) * _BLOCK + (_UNSPLIT if nbytes >= _UNSPLIT else 0)


class PlannedMemory(MemoryMeter):
    """For devices without statistics: memory by the layout, activations not counted. Needs an explicit budget."""

    def __init__(self, planned: Callable[[], int]) -> None:
        self._planned = planned

    @override
    def peak_allocated(self) -> int:
        return self._planned()


def fitting(footprints: Sequence[int], room: int) -> int:
    """How many of the last ``footprints`` have a sum of at most ``room``."""
    for count, nbytes in enumerate(reversed(footprints)):
        room -= nbytes
        if room < 0:
            return count
    return len(footprints)


class Budget:
    """Decides once which units are kept. One for each root, dropped once it has decided.

    Args:
        nbytes: The most that tensors may take at once; None for the meter's default.
        meter: Of this rank's device.
    """

    def __init__(self, nbytes: int | None, meter: MemoryMeter) -> None:
        self._nbytes = nbytes
        self._meter = meter
        self._backwards = 0
        self._sums: tuple[float, ...] = ()
        self._stepped = False
        self.reason = "decided at the end of the first backward that follows an optimizer step; until then none is kept"
        """One line for people: what was decided, and why; equal on all ranks once it was."""

    def decide(
        self, units: Sequence[Unit], execution_order: ExecutionOrder[ModuleState], collectives: Collectives
    ) -> bool:
        """Decide, if it is time; returns whether it has decided.

        Every rank calls it at the end of each backward that reduced.

        Args:
            units: All of the root's, in module order.
            execution_order: Of the last forward.
            collectives: All ranks that share the model.
        """
        if collectives.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        sums = _sums(units)
        self._backwards += 1
        self._stepped = self._backwards > 1 and (self._stepped or sums != self._sums)
        self._sums = sums
        if self._backwards == 1:
            return False
        module_states = execution_order.order
        # The outermost module's units are kept whatever the budget, and so are those where forward turns. Keeping an
        # embedding would save no gather.
        kept = (module_states[0], execution_order.turning)
        order = [
            unit
            for module_state in module_states
            if module_state not in kept and module_state.reads_in_backward
            for unit in module_state.units
        ]
        index = {unit: position for position, unit in enumerate(units)}
        # Ranks may hold parts of different sizes, and have to keep the same units.
        footprints = [self._meter.footprint(unit.gathered.nbytes) for unit in units]
        mine = (self._stepped, self._room(), footprints, [index[unit] for unit in dict.fromkeys(order)])
        everyone = collectives.all_gather_object(mine) if collectives.capabilities.can_communicate else [mine]
        # A rank that holds no element of any parameter sees no step.
        if self._backwards < PATIENCE and not any(stepped for stepped, *_ in everyone):
            return False
        choice = {
            unit: max(each[position] for _, _, each, _ in everyone)
            for unit, position in ((units[position], position) for position in everyone[0][3])
            if unit.retention.policy is Reshard.UNLESS_TURNING and not unit.permanent
        }
        room = min(room for _, room, *_ in everyone)
        count = fitting(list(choice.values()), room)
        for unit in list(choice)[len(choice) - count :]:
            unit.retention.policy = Reshard.NEVER
        self.reason = (
            f"{count} of {len(choice)} units stay gathered behind forward: the rank with the least memory has "
            f"{_mib(max(0, room))} left, and all of them take {_mib(sum(choice.values()))}"
        )
        return True

    def _room(self) -> int:
        budget = self._meter.default_budget() if self._nbytes is None else self._nbytes
        return budget - self._meter.peak_allocated()


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _sums(units: Sequence[Unit]) -> tuple[float, ...]:
    masters = [unit.master for unit in units if unit.trainable]
    with torch.no_grad():
        flat = [torch.view_as_real(master) if master.is_complex() else master for master in masters]
        return tuple(float(master.sum(dtype=torch.float64)) for master in flat)
