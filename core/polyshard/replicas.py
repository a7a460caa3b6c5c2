"""Whether ranks that hold the same parameters still hold the same bits of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from .engine.step.root import Root
from .engine.step.unit import Unit
from .errors import ConfigError, RankMismatchError
from .interfaces import Collectives, ReduceOp
from .state.exchange import speaks
from .state.resting import resting_root

#: Elements that are summed at once: what bounds the memory that a checksum takes.
_AT_ONCE = 1 << 20
#: Odd, so that no power of two is lost by multiplying with them in 64 bits.
_SPREAD, _STEP = 0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1D
#: By the bytes of an element. None of 64 bits: two changes of the highest would cancel, whatever multiplies them.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def check_replicas(model: nn.Module) -> None:
    """Compare, bit by bit, parameters that several ranks hold: ``no_shard``, and the replicas of ``hybrid_shard``.

    Such parameters stay the same through training, unless something computes, transfers or keeps them wrongly, or a
    program changes them on some ranks alone. Every rank calls it, between steps, as often as a program likes. It reads
    this rank's parameters once, exchanges eight bytes for each among the ranks that hold the same, and waits for the
    device. A single bit is always found, and a difference of several but for a chance of less than one in 10^9. Buffers
    are not looked at, nor are parameters outside of units.

    A single rank has nothing to compare with, and nor has one whose backend only pretends to communicate.

    Raises:
        RankMismatchError: a parameter differs. Raised on all ranks, of every replica; names the first such parameter,
            in module order, and the ranks that differ from most.
        ConfigError: the strategy keeps each element on one rank alone.
        StateError: inside a step, or ``model`` is not the outermost sharded module.
    """
    root = resting_root(model, "check_replicas()")
    if speaks(root.collectives):
        with root.meeting("comparison of replicas", (root.collectives,)):
            _compare(model, root)


def _compare(model: nn.Module, root: Root) -> None:
    groups: dict[Collectives, list[Unit]] = {}
    for unit in root.units:
        if unit.grid.replicate is not None:
            groups.setdefault(unit.grid.replicate, []).append(unit)
    if not groups:
        raise ConfigError(
            f"check_replicas() found no parameter that a second rank holds (rank {root.rank}): the strategy keeps each "
            "element on one rank. Leave the call out, or shard with 'no_shard' or 'hybrid_shard'."
        )
    device = root.collectives.device
    sums = {group: _checksums(units, device) for group, units in groups.items()}
    differing = torch.zeros((), device=device)
    for group, mine in sums.items():
        everyone = mine.new_empty(group.world_size * mine.numel())
        group.all_gather(everyone, mine).wait()
        differing = torch.maximum(differing, (everyone.view(group.world_size, -1) != mine).any().to(differing.dtype))
    # Shards that are the same everywhere must hear of the one that is not.
    root.collectives.all_reduce(differing, op=ReduceOp.MAX).wait()
    if differing.item():
        _raise(model, root, groups, sums)


def _checksums(units: Sequence[Unit], device: torch.device) -> torch.Tensor:
    """One for each parameter of ``units``, int64: of this rank's piece."""
    with torch.no_grad():
        # As many on each rank, whether or not it holds a piece.
        found = [_checksum(each).to(device) for unit in units for each in unit.originals.tensors]
    return torch.stack(found)


def _checksum(values: torch.Tensor) -> torch.Tensor:
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    weights = torch.arange(min(bits.numel(), _AT_ONCE), dtype=torch.int64, device=bits.device)
    weights = weights.mul_(_SPREAD).bitwise_or_(1)
    for part in torch.split(bits, _AT_ONCE) if bits.numel() else ():
        total = total * _STEP + (weights[: part.numel()] * part).sum()
    return total


def _raise(
    model: nn.Module, root: Root, groups: dict[Collectives, list[Unit]], sums: dict[Collectives, torch.Tensor]
) -> None:
    # By the unit's and the parameter's place, and the first rank that holds the piece: for each, one value is right.
    mine: dict[tuple[int, int, int], int] = {}
    places = {id(unit): index for index, unit in enumerate(root.units)}
    for group, units in groups.items():
        values = iter(sums[group].tolist())
        holder = min(group.all_gather_object(root.collectives.rank))
        for unit in units:
            for slot in range(len(unit.originals.tensors)):
                mine[places[id(unit)], slot, holder] = next(values)
    held: dict[tuple[int, int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, theirs in enumerate(root.collectives.all_gather_object(mine)):
        for place, value in theirs.items():
            held[place][value].append(rank)
    wrong = sorted(place for place, by_value in held.items() if len(by_value) > 1)
    index, slot, _ = wrong[0]
    unit = root.units[index]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensor = unit.originals.tensors[slot]
    sides = sorted(held[wrong[0]].values(), key=lambda ranks: (-len(ranks), ranks))
    parameters = len({place[:2] for place in wrong})
    more = f" {parameters - 1} more differ." if parameters > 1 else ""
    if len(sides[0]) > len(sides[1]):
        others = sorted(rank for side in sides[1:] for rank in side)
        which = f"on ranks {others} it is not what it is on ranks {sides[0]}"
    else:
        which = "no value of it is on most: " + ", ".join(str(side) for side in sides) + " agree among themselves"
    raise RankMismatchError(
        f"Parameter '{names.get(id(tensor), unit.parameters[slot].names[0])}' of unit '{unit.name}' differs between "
        f"ranks that hold the same of it: {which} (rank {root.rank}).{more} Load the last checkpoint, and look at what "
        "changes parameters on some ranks alone, or at those ranks' devices."
    )
