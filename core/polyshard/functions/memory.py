"""The memory that one rank needs, by the layouts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ..planning import thresholds
from ..planning.launches import ReduceMode, alike
from ..runtime.reduce import kind_of
from ..runtime.root import Root
from ..runtime.streams import REDUCTIONS_ALIVE


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes that one rank needs for parameters and what belongs to them. Activations are not counted."""

    world_size: int
    rank: int
    units: int
    parameters: int
    """Elements of the whole model."""
    padding: int
    """Elements of all flat buffers that belong to no parameter: gaps for alignment and for equal slices."""
    master_nbytes: int
    """Master shards."""
    trained_nbytes: int
    """The bytes of ``master_nbytes`` that are of units with trained parameters: an optimizer has states of these."""
    gradient_nbytes: int
    """Gradient shards, from a backward to the next ``zero_grad``."""
    gathered_nbytes: int
    """Gather buffers alive at once at most: units that are kept, the one that computes, and prefetched batches. Also
    secondary shards, under ``reshard_after_forward=n``, ``hpz`` and ``hfsdp``."""
    reduction_nbytes: int
    """Inputs of the reductions in flight. Of small units that travel together their gradients instead, which are held
    until then, and one bucket's inputs twice: as the units lay them out, and as they travel."""
    kept: tuple[str, ...]
    """Names of the units that stay gathered between forward and backward, ``(root)`` for the outermost. After the first
    forward the one that ran last may join them, and under ``reshard_after_forward="auto"`` more."""
    offloaded: tuple[str, ...] = ()
    """Names of the units whose masters and gradients an offload manager keeps; an optimizer's state is there, too."""
    offloaded_nbytes: int = 0
    """The bytes of ``master_nbytes`` that are offloaded."""
    packed_nbytes: int = 0
    """The bytes of ``master_nbytes`` that are of frozen parameters of packed classes."""
    beside_nbytes: int = 0
    """What these have beside their bytes, whole on every rank: scales and tables of codes."""
    over: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of units by the dimensions of the mesh that they are cut and replicated over, ``"edp and dp_replicate"``;
    empty where the configuration names none."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """What was chosen by what is there, in one line with the reason, by the setting that left it open: ``collectives``,
    ``reshard_after_forward``, ``batch_nbytes``. Lines change while the first steps decide."""

    def optimizer_nbytes(self, states: int) -> int:
        """Bytes of an optimizer with ``states`` tensors of a trained master's size (AdamW: 2)."""
        return states * self.trained_nbytes

    def total_nbytes(self, states: int = 2) -> int:
        """Everything together, for an optimizer with ``states`` tensors a parameter."""
        return (
            self.master_nbytes
            + self.gradient_nbytes
            + self.gathered_nbytes
            + self.reduction_nbytes
            + self.beside_nbytes
            + self.optimizer_nbytes(states)
        )


def memory_report(root: Root) -> MemoryReport:
    """The report of ``root``'s rank, read off the layouts."""
    units = list(root.units)
    module_states = (root.module_states[0], root.execution_order.turning)
    turning = {unit for module_state in module_states if module_state is not None for unit in module_state.units}
    kept = [u for u in units if not u.permanent and not u.retention.policy.releases[u in turning]]
    # A module state gathers its units together.
    waits = [
        sum(u.gathered.nbytes for u in module_state.units if not u.permanent and u not in kept)
        for module_state in root.module_states
    ]
    released = sorted(filter(None, waits), reverse=True)
    parameters = sum(slot.numel for u in units for slot in u.layout.slots)
    return MemoryReport(
        world_size=root.collectives.world_size,
        rank=root.rank,
        units=len(units),
        parameters=parameters,
        padding=sum(u.layout.padded_numel for u in units) - parameters,
        master_nbytes=sum(u.held.nbytes for u in units),
        trained_nbytes=sum(u.held.nbytes for u in units if u.trainable),
        gradient_nbytes=sum(u.layout.shard_numel * u.dtypes.grad.itemsize for u in units if u.trainable),
        gathered_nbytes=sum(u.gathered.nbytes for u in kept)
        + sum(u.gathered.secondary_nbytes for u in units)
        + _prefetched_nbytes(released, root),
        reduction_nbytes=_reduced_nbytes(root),
        kept=tuple(u.name for u in kept),
        offloaded=tuple(u.name for u in units if u.offloaded),
        offloaded_nbytes=sum(u.master.nbytes for u in units if u.offloaded),
        packed_nbytes=sum(u.held.nbytes for u in units if u.packed),
        beside_nbytes=sum(each.nbytes for u in units for packed in u.packed for each in packed.tensors),
        over={
            over: tuple(u.name for u in units if u.spec.ranks == over)
            for over in dict.fromkeys(u.spec.ranks for u in units)
            if over
        },
        reasons=_reasons(root),
    )


def _reasons(root: Root) -> dict[str, str]:
    groups = [unit.ranks.owner or root.collectives for unit in root.units] or [root.collectives]
    # A hybrid strategy has several groups, which may have found different things.
    found = {
        "collectives": "; ".join(filter(None, dict.fromkeys(each.reason for each in groups))),
        "reshard_after_forward": root.budget_reason,
        "batch_nbytes": root.execution_order.reason if root.collectives.world_size > 1 else "",
    }
    return {setting: reason for setting, reason in found.items() if reason}


def _prefetched_nbytes(released: Sequence[int], root: Root) -> int:
    """Bytes of ``released`` units, largest first, that are alive at once: one that computes, and those ahead of it."""
    ahead = root.execution_order.ahead
    single = sum(released[: 1 + ahead])
    if not ahead:
        return single
    # The last module state ahead may be the first of a batch, and the one that computes the first of the batch before.
    batch = root.execution_order.batch_nbytes
    return min(sum(released), max(single, sum(released[:ahead]) + batch, 2 * batch))


def _reduced_nbytes(root: Root) -> int:
    """Bytes of inputs of a unit, a module state or a bucket each: one that travels, and one of each kind that waits."""
    buckets = root.reducer.buckets
    # Of each kind: inputs that do not wait; and by mode, bytes of this rank and those by which launches are planned.
    single: dict[Hashable, list[int]] = {}
    totals: dict[Hashable, dict[ReduceMode, tuple[int, int]]] = {}
    for module_state in root.module_states:
        reduced = [unit.gradients for unit in module_state.units if unit.trainable]
        kinds = [kind_of(each.unit.ranks, each.input) for each in reduced]
        for kind, same in zip(dict.fromkeys(kinds), alike(reduced, kinds), strict=True):
            local = [each.input.nbytes for each in same]
            planned = [each.unit.launch_numel * each.input.dtype.itemsize for each in same]
            mode = buckets.mode_of_module(planned, same[0].unit.ranks.reduction is not None)
            if mode is ReduceMode.ALONE:
                single.setdefault(kind, []).extend(local)
            elif mode is ReduceMode.GROUPED and sum(planned) > buckets.limits[mode]:
                single.setdefault(kind, []).append(sum(local))
            else:
                of_kind = totals.setdefault(kind, {})
                before = of_kind.get(mode, (0, 0))
                of_kind[mode] = before[0] + sum(local), before[1] + sum(planned)
    copied, alive = 0, dict[Hashable, list[int]]()
    for kind, of_kind in totals.items():
        for mode, (total, whole) in of_kind.items():
            # A bucket is full by what is planned.
            room = buckets.limits[mode] * total // whole if whole else total
            alive.setdefault(kind, []).extend((min(total, room), min(max(0, total - room), room)))
            if mode is ReduceMode.MERGED:
                # Both return to the pool of the stream that reduces before the next bucket takes its memory there.
                copied = max(copied, 2 * min(total, room))
    for kind, sizes in single.items():
        # Kinds that never wait are reduced one after the other.
        alive.setdefault(kind if kind in totals else None, []).extend(sizes)
    largest = sorted((max(sizes) for kind, sizes in alive.items() if kind is not None), reverse=True)
    largest = largest[: thresholds.OPEN_BUCKETS] + [max(sizes) for kind, sizes in alive.items() if kind is None]
    left = sorted((size for sizes in alive.values() for size in sizes), reverse=True)
    for size in largest:
        left.remove(size)
    return sum(largest) + sum(left[: REDUCTIONS_ALIVE - 1]) + copied
