"""Objects between the first rank and the others, through the collectives that the model trains with.

``torch.distributed`` has functions for the same, but they wait as long as the process group says that the user made.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from ..interfaces import Collectives


def speaks(collectives: Collectives) -> bool:
    """Whether there are other ranks to exchange anything with."""
    return collectives.world_size > 1 and collectives.capabilities.can_communicate


def coordinates(collectives: Collectives) -> bool:
    """Whether this rank does what is done once: the first does, and one that stands alone."""
    return collectives.rank == 0 or not speaks(collectives)


def from_first(collectives: Collectives, value: Any) -> Any:
    """Rank 0's ``value``, on every rank."""
    return collectives.all_gather_object(value if collectives.rank == 0 else None)[0] if speaks(collectives) else value


def gather_to_first(collectives: Collectives, value: Any) -> list[Any] | None:
    """Every rank's ``value`` in rank order, on the rank that coordinates; None on the others.

    One rank after the other sends: plans grow with the model, and no rank but the first has room for all of them.
    """
    if not speaks(collectives):
        return [value]
    payload = pickle.dumps(value)
    sizes = collectives.all_gather_object(len(payload))
    found = [value]
    for source in range(1, collectives.world_size):
        sent = _broadcast(collectives, payload, sizes[source], source)
        if collectives.rank == 0:
            found.append(pickle.loads(sent))
    return found if collectives.rank == 0 else None


def scatter_from_first(collectives: Collectives, values: Sequence[Any] | None) -> Any:
    """This rank's entry of ``values``, which the rank that coordinates gives."""
    if not speaks(collectives):
        assert values is not None
        return values[0]
    payloads = [pickle.dumps(value) for value in values or ()]
    sizes = from_first(collectives, [len(payload) for payload in payloads])
    own = b""
    for target, size in enumerate(sizes):
        sent = _broadcast(collectives, payloads[target] if payloads else b"", size, 0)
        if target == collectives.rank:
            own = sent
    return pickle.loads(own)


def _broadcast(collectives: Collectives, payload: bytes, size: int, source: int) -> bytes:
    if collectives.rank == source:
        carried = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(collectives.device)
    else:
        carried = torch.empty(size, dtype=torch.uint8, device=collectives.device)
    collectives.broadcast(carried, source).wait()
    return carried.cpu().numpy().tobytes()
