"""Objects between the first rank and the others, through the collectives that the model trains with.

``torch.distributed`` has functions for the same, but they wait as long as the process group says that the user made.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from ..interfaces import Collectives

#: Bytes that a rank receives in one round.
_AT_ONCE = 64 << 20


def speaks(collectives: Collectives) -> bool:
    """Whether there are other ranks to exchange anything with."""
    return collectives.world_size > 1 and collectives.capabilities.can_communicate


def coordinates(collectives: Collectives) -> bool:
    """Whether this rank does what is done once: the first does, and one that stands alone."""
    return collectives.rank == 0 or not speaks(collectives)


def from_first(collectives: Collectives, value: Any) -> Any:
    """Rank 0's ``value``, on every rank."""
    if not speaks(collectives):
        return value
    payload = pickle.dumps(value) if collectives.rank == 0 else b""
    size = torch.tensor([len(payload)], device=collectives.device)
    collectives.broadcast(size, 0).wait()
    return pickle.loads(broadcast(collectives, payload, int(size), 0))


def numbers_of_all(collectives: Collectives, mine: Sequence[int]) -> list[list[int]]:
    """Every rank's ``mine``, as many numbers on each, in rank order."""
    own = torch.tensor(mine, device=collectives.device)
    everyone = own.new_empty(collectives.world_size * own.numel())
    collectives.all_gather(everyone, own).wait()
    found: list[list[int]] = everyone.view(collectives.world_size, own.numel()).tolist()
    return found


def gather_to_first(collectives: Collectives, value: Any) -> list[Any] | None:
    """Every rank's ``value`` in rank order, on the rank that coordinates; None on the others.

    In rounds, in which each rank sends as much: plans grow with the model and the number of ranks, and no rank but the
    first has room for all of them; and to let one rank after the other send takes as many waits as there are ranks.
    """
    if not speaks(collectives):
        return [value]
    payload = pickle.dumps(value)
    sizes = [size for (size,) in numbers_of_all(collectives, [len(payload)])]
    found = [bytearray() for _ in sizes] if collectives.rank == 0 else []
    most = max(1, _AT_ONCE // len(sizes))
    for start in range(0, max(sizes), most):
        width = min(most, max(sizes) - start)
        mine = torch.zeros(width, dtype=torch.uint8)
        part = bytearray(payload[start : start + width])
        if part:
            mine[: len(part)] = torch.frombuffer(part, dtype=torch.uint8)
        everyone = torch.empty(len(sizes) * width, dtype=torch.uint8, device=collectives.device)
        collectives.all_gather(everyone, mine.to(collectives.device)).wait()
        if found:
            rows = everyone.cpu().view(len(sizes), width)
            for each, size, row in zip(found, sizes, rows, strict=True):
                each += row[: max(0, size - start)].numpy().tobytes()
    return [value, *(pickle.loads(each) for each in found[1:])] if found else None


def scatter_from_first(collectives: Collectives, values: Sequence[Any] | None) -> Any:
    """This rank's entry of ``values``, which the rank that coordinates gives. One behind the other, in rounds."""
    if not speaks(collectives):
        assert values is not None
        return values[0]
    payloads = [pickle.dumps(value) for value in values or ()]
    sizes = from_first(collectives, [len(payload) for payload in payloads])
    first = sum(sizes[: collectives.rank])
    last = first + sizes[collectives.rank]
    joined = b"".join(payloads)
    own = bytearray()
    for start in range(0, sum(sizes), _AT_ONCE):
        size = min(_AT_ONCE, sum(sizes) - start)
        sent = broadcast(collectives, joined[start : start + size], size, 0)
        own += sent[max(0, first - start) : max(0, last - start)]
    return pickle.loads(own)


def broadcast(collectives: Collectives, payload: bytes, size: int, source: int) -> bytes:
    """The ``payload`` of rank ``source``, of ``size`` bytes, on every rank."""
    if not size:
        return b""
    if collectives.rank == source:
        carried = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(collectives.device)
    else:
        carried = torch.empty(size, dtype=torch.uint8, device=collectives.device)
    collectives.broadcast(carried, source).wait()
    return carried.cpu().numpy().tobytes()
