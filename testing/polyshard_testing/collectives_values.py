"""Values that ranks send in the tests of ``CollectivesSuite``, known to all, and the comparison of what arrives."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from polyshard.interfaces import BufferRole, Collectives, ReduceOp


def sender(collectives: Collectives, rank: int) -> int:
    """The rank whose data arrives from ``rank``: on a stand-in every rank is pretended to send what this one does."""
    return rank if collectives.capabilities.can_communicate else collectives.rank


def values(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values that ``rank`` sends: small integers, exact in every dtype, which differ between ranks."""
    return _values(rank, numel, dtype).to(device, copy=True)


@functools.lru_cache(maxsize=1024)
def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = (torch.arange(numel) * 3 + rank * 5 + 1) % 8
    if dtype.is_complex:
        return torch.complex(numbers.float(), numbers.flip(0).float()).to(dtype)
    return numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)


def block(source: int, target: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The block from ``source`` to ``target`` in an exchange, on the CPU: ``numel`` elements of random bits.

    Another dtype would round them, and no two blocks of an exchange are equal.
    """
    generator = torch.Generator().manual_seed(10**6 * numel + 1000 * source + target)
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits % 2 == 0 if dtype is torch.bool else bits.view(dtype)


def sent(collectives: Collectives, numel: int, dtype: torch.dtype, number: int = 0) -> list[torch.Tensor]:
    """The values of every rank in the operation ``number``, as they arrive here, in rank order."""
    ranks = range(collectives.world_size)
    return [values(sender(collectives, rank) + number, numel, dtype, collectives.device) for rank in ranks]


def reduced(pieces: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reference: ``op`` over ranks in fp64."""
    stacked = torch.stack([piece.to(torch.float64) for piece in pieces])
    if op is ReduceOp.SUM:
        return stacked.sum(0)
    if op is ReduceOp.MEAN:
        return stacked.sum(0) / len(pieces)
    return stacked.amax(0) if op is ReduceOp.MAX else stacked.amin(0)


def scattered(collectives: Collectives, n: int, dtype: torch.dtype, op: ReduceOp, number: int = 0) -> torch.Tensor:
    """This rank's slice of ``n`` elements of the reference."""
    rank = collectives.rank
    wholes = sent(collectives, collectives.world_size * n, dtype, number)
    return reduced([whole[rank * n : (rank + 1) * n] for whole in wholes], op)


def buffer(collectives: Collectives, numel: int, dtype: torch.dtype, role: BufferRole) -> torch.Tensor:
    """Memory for ``role``, from where the engine would take it."""
    if collectives.capabilities.fixed_addresses:
        return collectives.lease(numel, dtype, role)
    with collectives.allocation(role, numel * dtype.itemsize):
        return torch.empty(numel, dtype=dtype, device=collectives.device)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit equality, in any dtype."""
    if actual.dtype is not expected.dtype or actual.shape != expected.shape:
        raise AssertionError(f"{what}: {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {expected.shape}")
    if not torch.equal(
        actual.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
    ):
        raise AssertionError(f"{what}: got {actual}, not {expected}")


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equality up to four roundings in ``actual``'s dtype; ``expected`` is fp64."""
    tolerance = 4 * torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0.0
    torch.testing.assert_close(
        actual.to(torch.float64), expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )
