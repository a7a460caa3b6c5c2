"""What one rank does in the tests of ``CollectivesSuite`` for ``all_to_all``.

Functions of a module, as in ``collectives_checks``. Blocks are random bits that sender, receiver and size give: values
that another dtype would round, and that no two blocks of an exchange share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from polyshard.errors import CollectiveError
from polyshard.interfaces import Collectives, ReduceOp, Work

from .collectives_checks import assert_near, assert_same, reduced, sender, values

#: What memory holds before anything arrives in it, byte by byte.
_UNWRITTEN = 0x55
#: Elements beside the buffer that must stay as they are.
_MARGIN = 5

#: How many elements the first rank sends to the second.
Sizes = Callable[[int, int], int]


def _alike(source: int, target: int) -> int:
    return 7


def _uneven(source: int, target: int) -> int:
    return (3 * source + 5 * target + 1) % 8


def _triangle(source: int, target: int) -> int:
    return 3 * (target - source) if target > source else 0


def _to_first(source: int, target: int) -> int:
    return 4 if target == 0 else 0


def _to_next(source: int, target: int) -> int:
    return 6 if target == source + 1 else 0


def _to_self(source: int, target: int) -> int:
    return 3 + source if source == target else 0


def _nothing(source: int, target: int) -> int:
    return 0


def _long(source: int, target: int) -> int:
    return 4099 + 513 * source + target


#: One size for all; several; and ranks that receive nothing, or send nothing, or neither.
PATTERNS: tuple[Sizes, ...] = (_alike, _uneven, _triangle, _to_first, _to_next, _to_self, _nothing, _long)


def block(source: int, target: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What rank ``source`` sends to rank ``target``, on the CPU: ``numel`` elements of any bits."""
    generator = torch.Generator().manual_seed(10**6 * numel + 1000 * source + target)
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits % 2 == 0 if dtype is torch.bool else bits.view(dtype)


class _Exchange(NamedTuple):
    """One call, and what it must leave in ``around``, of which ``out`` is the middle."""

    around: torch.Tensor
    out: torch.Tensor
    out_splits: list[int]
    source: torch.Tensor
    in_splits: list[int]
    expected: list[torch.Tensor | None]

    def issue(self, collectives: Collectives) -> Work:
        return collectives.all_to_all(self.out, self.out_splits, self.source, self.in_splits)

    def check(self, rank: int, sent: torch.Tensor, what: str) -> None:
        """Every block of which it is known what it must be, the memory beside them, and the input."""
        received = self.out.split_with_sizes(self.out_splits)
        for source, (actual, expected) in enumerate(zip(received, self.expected, strict=True)):
            if expected is not None:
                assert_same(actual, expected, f"block {source} on rank {rank} after {what}")
        outside = torch.cat((self.around[:_MARGIN], self.around[-_MARGIN:])).view(torch.uint8)
        assert_same(outside, torch.full_like(outside, _UNWRITTEN), f"memory beside out on rank {rank} after {what}")
        assert_same(self.source, sent, f"the input of rank {rank} after {what}")


def _prepared(
    collectives: Collectives, sizes: Sizes, dtype: torch.dtype, members: Sequence[int]
) -> tuple[_Exchange, torch.Tensor]:
    """An exchange between ``members``, in the numbers by which blocks are known, and a copy of what is sent."""
    device, world_size = collectives.device, len(members)
    own = members[collectives.rank]
    in_splits = [sizes(own, target) for target in members]
    out_splits = [sizes(source, own) for source in members]
    sent = torch.cat([block(own, target, n, dtype) for target, n in zip(members, in_splits, strict=True)]).to(device)
    nbytes = (sum(out_splits) + 2 * _MARGIN) * dtype.itemsize
    around = torch.full((nbytes,), _UNWRITTEN, dtype=torch.uint8, device=device).view(dtype)
    out = around[_MARGIN : _MARGIN + sum(out_splits)]
    # Ranks that all send what this one does can be told of only where their blocks for it are as large as its own.
    alike = all(n == in_splits[collectives.rank] for n in out_splits)
    expected: list[torch.Tensor | None] = []
    for number in range(world_size):
        source = members[sender(collectives, number)]
        known = collectives.capabilities.can_communicate or alike or number == collectives.rank
        expected.append(block(source, own, out_splits[number], dtype).to(device) if known else None)
    return _Exchange(around, out, out_splits, sent.clone(), in_splits, expected), sent


def check_all_to_all(collectives: Collectives, dtype: torch.dtype) -> None:
    """Every block arrives at its rank, in rank order, bit for bit, and nothing else is written."""
    members = range(collectives.world_size)
    for sizes in PATTERNS:
        exchange, sent = _prepared(collectives, sizes, dtype, members)
        work = exchange.issue(collectives)
        for _ in range(2):
            work.wait()
            exchange.check(collectives.rank, sent, f"all_to_all{sizes.__name__} of {dtype}")


def check_exchanges_overlap(collectives: Collectives, wait_order: Sequence[int]) -> None:
    """Exchanges, gathers and reductions in flight together may be waited for in any order, and more than once."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    n, dtype = 1000, torch.float32
    gathered = torch.zeros(world_size * n, device=device)
    own = gathered[rank * n : (rank + 1) * n].copy_(values(rank, n, dtype, device))
    full = values(rank, world_size * n, dtype, device)
    result = torch.zeros(n, device=device)
    first, first_sent = _prepared(collectives, _long, torch.bfloat16, range(world_size))
    second, second_sent = _prepared(collectives, _uneven, torch.float32, range(world_size))
    works = [
        first.issue(collectives),
        collectives.all_gather(gathered, own),
        second.issue(collectives),
        collectives.reduce_scatter(result, full, op=ReduceOp.SUM),
    ]
    whole = torch.cat([values(sender(collectives, r), n, dtype, device) for r in range(world_size)])
    fulls = [values(sender(collectives, r), world_size * n, dtype, device) for r in range(world_size)]
    sums = reduced([each[rank * n : (rank + 1) * n] for each in fulls], ReduceOp.SUM)
    checks: list[Callable[[], None]] = [
        partial(first.check, rank, first_sent, "the first of two exchanges in flight"),
        partial(assert_same, gathered, whole, "all_gather beside exchanges"),
        partial(second.check, rank, second_sent, "the second of two exchanges in flight"),
        partial(assert_near, result, sums, "reduce_scatter beside exchanges"),
    ]
    for number in (*wait_order, *wait_order):
        works[number].wait()
        checks[number]()


def check_exchange_in_part(collectives: Collectives, rank_lists: Sequence[Sequence[int]]) -> None:
    """Parts exchange by their own numbering, beside an exchange of the whole group."""
    members = next(members for members in rank_lists if collectives.rank in members)
    part = collectives.partition(rank_lists)
    if not part.capabilities.exchanges:
        raise AssertionError(f"the group exchanges blocks, and its part {list(members)} says that it does not")
    for sizes in (_alike, _uneven):
        within, within_sent = _prepared(part, sizes, torch.float32, members)
        across, across_sent = _prepared(collectives, sizes, torch.float32, range(collectives.world_size))
        in_part, in_whole = within.issue(part), across.issue(collectives)
        in_part.wait()
        in_whole.wait()
        within.check(collectives.rank, within_sent, f"all_to_all{sizes.__name__} in part {list(members)}")
        across.check(collectives.rank, across_sent, f"all_to_all{sizes.__name__} beside a part")
    part.close()


def check_exchange_streams(collectives: Collectives) -> None:
    """On a stream-ordered backend, an exchange follows its stream, and who waits for it follows the exchange."""
    if not collectives.capabilities.stream_ordered:
        return
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    n = 1 << 20
    exchanges = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    exchanges.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(exchanges):
        source = torch.zeros(world_size * n, device=device)
        out = torch.zeros(world_size * n, device=device)
        for target in range(world_size):
            source[target * n : (target + 1) * n].fill_(100.0 * rank + target)
        work = collectives.all_to_all(out, [n] * world_size, source, [n] * world_size)
    work.wait()
    expected = torch.cat(
        [torch.full((n,), 100.0 * sender(collectives, r) + rank, device=device) for r in range(world_size)]
    )
    assert_same(out, expected, "exchange issued on another stream")


def check_bad_blocks(collectives: Collectives) -> None:
    """What does not fit is refused on the rank that asks for it, and the group works on."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    even = [2] * world_size
    other = [2 + (number == rank) for number in range(world_size)]
    negative = [-2, *even[1:]] if world_size == 1 else [-2, 6, *even[2:]]
    whole = torch.zeros(2 * world_size, device=device)
    spread = torch.zeros(4 * world_size, device=device)[::2]
    cases = {
        "splits that add up to less": (whole, [1] * world_size, whole.clone(), even),
        "splits that add up to more": (whole, even, whole.clone(), [3] * world_size),
        "more splits than ranks": (whole, [*even, 0], whole.clone(), [*even, 0]),
        "fewer splits than ranks": (whole, [], whole.clone(), []),
        "a negative split": (whole, negative, whole.clone(), negative),
        "two sizes of its own block": (whole, even, torch.zeros(2 * world_size + 1, device=device), other),
        "two dtypes": (whole, even, whole.to(torch.float64), even),
        "an output with gaps": (spread, even, whole, even),
        "an input with gaps": (whole, even, spread, even),
    }
    for what, (out, out_splits, source, in_splits) in cases.items():
        try:
            collectives.all_to_all(out, out_splits, source, in_splits)
        except CollectiveError:
            continue
        raise AssertionError(f"all_to_all with {what} did not raise CollectiveError on rank {rank}")
    check_all_to_all(collectives, torch.float32)
