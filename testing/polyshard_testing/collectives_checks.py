"""The rules of ``CollectivesSuite``, each as the part of one rank.

Functions of a module, so that a suite which starts processes can send them by name. Each asks the backend what it can
do, and raises ``AssertionError`` where its answer differs from the contract's formula, computed here in fp64 from the
values that every rank is known to send.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from polyshard.errors import CollectiveError, CollectiveTimeoutError, RankMismatchError, WorldSizeError
from polyshard.interfaces import BufferRole, Collectives, CollectivesCapabilities, ReduceOp, Work

from .collectives_values import assert_near, assert_same, block, buffer, reduced, scattered, sender, sent, values

#: Dtypes that a gather must carry, whatever the transport supports.
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)

#: Elements a rank: none, one, an odd few, and more than one vector register or packet of any transport.
_SIZES = (0, 1, 7, 4099)
#: Integers that fp32 rounds: the sum of three fits into an int32.
_LARGE = 2**24 + 1
#: Elements beside a result that must stay as they are.
_MARGIN = 5
#: The bytes of memory before anything arrives in it.
_UNWRITTEN = 0x55
#: Seconds by which ranks come to a barrier one after the other.
_LATE_S = 0.01

#: Elements that the first rank sends to the second.
_Sizes = Callable[[int, int], int]
#: One size for all; several; and ranks that receive nothing, or send nothing, or neither.
_PATTERNS: dict[str, _Sizes] = {
    "alike": lambda source, target: 7,
    "uneven": lambda source, target: (3 * source + 5 * target + 1) % 8,
    "a triangle": lambda source, target: 3 * (target - source) if target > source else 0,
    "to the first": lambda source, target: 4 if target == 0 else 0,
    "to the next": lambda source, target: 6 if target == source + 1 else 0,
    "to itself": lambda source, target: 3 + source if source == target else 0,
    "nothing": lambda source, target: 0,
    "long": lambda source, target: 4099 + 513 * source + target,
}


@contextmanager
def _refused(error: type[Exception], what: str) -> Iterator[None]:
    """What is inside must raise ``error``."""
    try:
        yield
    except error:
        return
    raise AssertionError(f"{what} did not raise {error.__name__}")


def _floats(collectives: Collectives, *ops: ReduceOp) -> list[tuple[ReduceOp, torch.dtype]]:
    """Those of ``ops`` that the backend has, each with every floating-point dtype that it reduces."""
    capabilities = collectives.capabilities
    dtypes = sorted((dtype for dtype in capabilities.dtypes if dtype.is_floating_point), key=str)
    return [(op, dtype) for op in ops if op in capabilities.reduce_ops for dtype in dtypes]


def _scratch(collectives: Collectives, numel: int, travels: torch.dtype, wide: torch.dtype) -> torch.Tensor:
    nbytes = collectives.scratch_nbytes(BufferRole.REDUCE, numel, travels, wide)
    return torch.empty(nbytes, dtype=torch.uint8, device=collectives.device)


# --- the group ---


def check_identity(collectives: Collectives) -> tuple[int, int]:
    """Returns its rank and the number of ranks, both of which it says that it serves."""
    capabilities, size = collectives.capabilities, collectives.world_size
    served = sorted(capabilities.devices)
    assert collectives.device.type in served, f"it is on {collectives.device} and says that it serves {served}"
    least, most = capabilities.min_world_size, capabilities.max_world_size
    assert least <= size, f"it serves {size} ranks and says that {least} is the least"
    assert most is None or size <= most, f"it serves {size} ranks and says that {most} is the most"
    return collectives.rank, size


#: Types of the capabilities, by name; every other one is a bool.
_CAPABILITY_TYPES = {"min_world_size": int, "max_world_size": int | None}
_CAPABILITY_SETS = {"devices": str, "dtypes": torch.dtype, "reduce_ops": ReduceOp}


def check_capabilities(collectives: Collectives) -> None:
    """Capabilities have the types of the contract, and do not change."""
    capabilities = collectives.capabilities
    found = f"capabilities are {capabilities!r}, not CollectivesCapabilities"
    assert isinstance(capabilities, CollectivesCapabilities), found
    for field in dataclasses.fields(capabilities):
        value = getattr(capabilities, field.name)
        kind = _CAPABILITY_SETS.get(field.name)
        if kind is not None:
            right = isinstance(value, frozenset) and all(isinstance(each, kind) for each in value)
        else:
            wanted = _CAPABILITY_TYPES.get(field.name, bool)
            right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
        assert right, f"the capability {field.name} is {value!r}"
    assert {ReduceOp.SUM, ReduceOp.MEAN} <= capabilities.reduce_ops, "gradients need SUM and MEAN among reduce_ops"
    collectives.all_reduce(torch.ones(1, device=collectives.device), op=ReduceOp.SUM).wait()
    now = collectives.capabilities
    assert now == capabilities, f"capabilities were {capabilities} and are {now}"


def capabilities_of(collectives: Collectives) -> CollectivesCapabilities:
    return collectives.capabilities


def check_reason(collectives: Collectives) -> str:
    """The reason is text, on one line; returns it as it is once ranks have met."""
    collectives.all_reduce(torch.ones(1, device=collectives.device), op=ReduceOp.SUM).wait()
    reason = collectives.reason
    assert isinstance(reason, str), f"reason is {reason!r}"
    assert len(reason.splitlines()) < 2, f"reason is {reason!r}, not one line"
    return reason


def check_process_group(collectives: Collectives) -> None:
    """The process group is None, or a group of torch that knows this rank by the same number."""
    group = collectives.process_group
    if group is None:
        return
    found = f"process_group is {group!r}, neither a torch.distributed.ProcessGroup nor None"
    assert isinstance(group, torch.distributed.ProcessGroup), found
    theirs, ours = (group.rank(), group.size()), (collectives.rank, collectives.world_size)
    assert theirs == ours, f"rank and size are {theirs} in process_group, and {ours} here"


def check_objects(collectives: Collectives) -> None:
    """Objects of different sizes arrive in rank order."""

    def description(rank: int) -> dict[str, Any]:
        return {"rank": rank, "text": "x" * (rank * 1000), "nested": [(rank, None)]}

    received = collectives.all_gather_object(description(collectives.rank))
    expected = [description(sender(collectives, rank)) for rank in range(collectives.world_size)]
    assert received == expected, f"all_gather_object gave {received}, not {expected}"


def check_announcements(collectives: Collectives) -> None:
    """Ranks that announce the same go on; a different announcement is an error on every rank."""
    if not collectives.capabilities.can_communicate:
        return
    out = torch.empty(collectives.world_size, device=collectives.device)
    mine = torch.ones(1, device=collectives.device)
    collectives.announce("a gather")
    collectives.all_gather(out, mine).wait()
    assert_same(out, torch.ones_like(out), "a gather that was announced")
    if collectives.world_size > 1:
        with _refused(RankMismatchError, f"an announcement that others did not make, on rank {collectives.rank},"):
            collectives.announce(f"gather {min(collectives.rank, 1)}")
            collectives.all_gather(out, mine).wait()


def check_barrier(collectives: Collectives) -> None:
    """No rank leaves before every rank came, and the order of other operations stays."""
    for number in range(3):
        # A clock that all processes of a machine share.
        time.sleep(_LATE_S * collectives.rank)
        came = time.monotonic()
        collectives.barrier()
        left = time.monotonic()
        tensor = torch.full((4,), float(number), device=collectives.device)
        collectives.all_reduce(tensor, op=ReduceOp.MAX).wait()
        assert_same(tensor, torch.full_like(tensor, float(number)), f"maximum after barrier {number}")
        late = max(collectives.all_gather_object(came))
        early = f"rank {collectives.rank} left barrier {number} before the last rank came"
        assert left >= late or not collectives.capabilities.can_communicate, early


def check_in_time(collectives: Collectives) -> None:
    """A wait for a rank that never comes raises: all gather once, and then rank 0 alone."""
    capabilities = collectives.capabilities
    if capabilities.stream_ordered or not capabilities.can_communicate:
        # Its waits return at once.
        return
    out, mine = torch.zeros(collectives.world_size, device=collectives.device), torch.ones(1, device=collectives.device)
    # Communicators are made at first use, where all have to be there.
    collectives.all_gather(out, mine).wait()
    if collectives.rank == 0:
        with _refused(CollectiveTimeoutError, "a gather to which no other rank came"):
            collectives.all_gather(out, mine).wait()


def check_close(collectives: Collectives) -> None:
    """Closing twice is as good as once."""
    tensor = torch.ones(1, device=collectives.device)
    collectives.all_reduce(tensor, op=ReduceOp.MEAN).wait()
    assert_same(tensor, torch.ones_like(tensor), "mean of ones")
    collectives.close()
    collectives.close()


# --- gathers, reductions and broadcasts ---


def check_all_gather(collectives: Collectives) -> None:
    """Every rank's shard, of any dtype, arrives in rank order, and nothing else is written."""
    world_size, rank = collectives.world_size, collectives.rank
    for dtype, n, in_place in itertools.product(_DTYPES, _SIZES, (True, False)):
        around = buffer(collectives, world_size * n + _MARGIN, dtype, BufferRole.GATHER).zero_()
        out, behind = around[: world_size * n], around[world_size * n :]
        own = values(rank, n, dtype, collectives.device)
        shard = out[rank * n : (rank + 1) * n].copy_(own) if in_place else own.clone()
        collectives.all_gather(out, shard).wait()
        what = f"all_gather of {n} {dtype} a rank"
        assert_same(out, torch.cat(sent(collectives, n, dtype)), what)
        assert_same(shard, own, f"this rank's shard after {what}")
        assert_same(behind, torch.zeros_like(behind), f"memory behind out after {what}")


def check_all_gather_many(collectives: Collectives) -> None:
    """Several gathers at once, in place and apart, of several sizes, do what each of them would by itself."""
    world_size, rank = collectives.world_size, collectives.rank
    every, alike = (list(itertools.product(each, _SIZES, (True, False))) for each in (_DTYPES, (torch.bfloat16,)))
    for chosen in (every[:1], every, alike[:1], alike):
        pairs = []
        for number, (dtype, n, in_place) in enumerate(chosen):
            out = buffer(collectives, world_size * n, dtype, BufferRole.GATHER)
            own = values(rank + number, n, dtype, collectives.device)
            pairs.append((out, out[rank * n : (rank + 1) * n].copy_(own) if in_place else own))
        work = collectives.all_gather_many(pairs)
        for _ in range(2):
            work.wait()
            for number, ((out, shard), (dtype, n, _)) in enumerate(zip(pairs, chosen, strict=True)):
                what = f"gather {number} of {len(chosen)}: {n} {dtype} a rank"
                assert_same(out, torch.cat(sent(collectives, n, dtype, number)), what)
                own = values(rank + number, n, dtype, collectives.device)
                assert_same(shard, own, f"this rank's shard after {what}")


def check_reduce_scatter(collectives: Collectives) -> None:
    """``out = op_k(F_k[s])``, with and without the caller's scratch."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    for (op, dtype), (number, n) in itertools.product(_floats(collectives, *ReduceOp), enumerate(_SIZES)):
        scratch = _scratch(collectives, world_size * n, dtype, dtype)
        # Without scratch to use, both ways are the same.
        for given in (None, scratch) if scratch.numel() else (None, scratch)[number % 2 :][:1]:
            full = buffer(collectives, world_size * n, dtype, BufferRole.REDUCE)
            full.copy_(values(rank, world_size * n, dtype, device))
            out = torch.zeros(n, dtype=dtype, device=device)
            collectives.reduce_scatter(out, full, op=op, scratch=given).wait()
            assert_near(out, scattered(collectives, n, dtype, op), f"reduce_scatter {op.name} of {n} {dtype} a rank")


def check_reduce_scatter_many(collectives: Collectives) -> None:
    """Several reductions at once, of several sizes, do what each of them would by itself."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    wide = (torch.float32,) if collectives.capabilities.widening else ()
    cases = [
        (op, travels, into, chosen)
        for op, travels in _floats(collectives, ReduceOp.SUM, ReduceOp.MEAN)
        if travels in (torch.float32, torch.bfloat16)
        # In one order on all ranks, which that of a set is not.
        for into in dict.fromkeys((travels, *wide))
        for chosen in (_SIZES[:1], _SIZES)
    ]
    for op, travels, into, chosen in cases:
        triples = []
        for number, n in enumerate(chosen):
            full = buffer(collectives, world_size * n, travels, BufferRole.REDUCE)
            full.copy_(values(rank + number, world_size * n, travels, device))
            scratch = _scratch(collectives, world_size * n, travels, into) if number % 2 else None
            triples.append((torch.zeros(n, dtype=into, device=device), full, scratch))
        work = collectives.reduce_scatter_many(triples, op=op)
        work.wait()
        work.wait()
        for number, n in enumerate(chosen):
            what = f"reduction {number} of {len(chosen)}: {op.name} of {n} {travels} a rank into {into}"
            assert_near(triples[number][0], scattered(collectives, n, travels, op, number), what)


def check_widening(collectives: Collectives) -> None:
    """A sum that the dtype that travels would round away is exact in ``out``'s dtype, fp32."""
    world_size, rank, device, n = collectives.world_size, collectives.rank, collectives.device, 33
    floats = _floats(collectives, ReduceOp.SUM, ReduceOp.MEAN) if collectives.capabilities.widening else []
    for op, travels in [(op, travels) for op, travels in floats if travels.itemsize == 2]:
        # The first integer whose successor what travels cannot hold: added to it in that dtype, ones are lost.
        large = 2.0 / torch.finfo(travels).eps
        for scratch in (None, _scratch(collectives, world_size * n, travels, torch.float32)):
            full = buffer(collectives, world_size * n, travels, BufferRole.REDUCE)
            full.fill_(large if rank == 0 else 1.0)
            out = torch.zeros(n, device=device)
            collectives.reduce_scatter(out, full, op=op, scratch=scratch).wait()
            total = sum(large if sender(collectives, r) == 0 else 1.0 for r in range(world_size))
            expected = torch.full_like(out, total / world_size if op is ReduceOp.MEAN else total, dtype=torch.float64)
            assert_near(out, expected, f"{op.name} of {travels} into fp32")


def check_all_reduce(collectives: Collectives) -> None:
    """In place, any shape, the same on every rank."""
    for (op, dtype), shape in itertools.product(_floats(collectives, *ReduceOp), ((), (0,), (5,), (2, 3, 4))):
        numel = torch.Size(shape).numel()
        tensor = values(collectives.rank, numel, dtype, collectives.device).view(shape)
        collectives.all_reduce(tensor, op=op).wait()
        expected = reduced(sent(collectives, numel, dtype), op).view(shape)
        assert_near(tensor, expected, f"all_reduce {op.name} of {shape} {dtype}")


def check_integers(collectives: Collectives) -> None:
    """Sums that a float would round, in place and scattered."""
    world_size, rank, device, n = collectives.world_size, collectives.rank, collectives.device, 5
    for dtype in sorted(collectives.capabilities.dtypes & {torch.int64, torch.int32}, key=str):
        given = [torch.arange(world_size * n) + _LARGE + sender(collectives, r) for r in range(world_size)]
        expected = torch.stack(given).sum(0).to(device, dtype)
        full = given[rank if collectives.capabilities.can_communicate else 0].to(device, dtype, copy=True)
        tensor, out = full.clone(), torch.zeros(n, dtype=dtype, device=device)
        collectives.all_reduce(tensor, op=ReduceOp.SUM).wait()
        assert_same(tensor, expected, f"all_reduce SUM of {dtype}")
        collectives.reduce_scatter(out, full, op=ReduceOp.SUM).wait()
        assert_same(out, expected[rank * n : (rank + 1) * n], f"reduce_scatter SUM of {dtype}")


def check_broadcast(collectives: Collectives) -> None:
    """From every source in turn, any dtype."""
    for dtype, src, shape in itertools.product(_DTYPES, range(collectives.world_size), ((0,), (3, 2))):
        numel = torch.Size(shape).numel()
        tensor = values(collectives.rank, numel, dtype, collectives.device).view(shape)
        collectives.broadcast(tensor, src).wait()
        expected = values(sender(collectives, src), numel, dtype, collectives.device).view(shape)
        assert_same(tensor, expected, f"broadcast of {dtype} from {src}")


# --- exchanges of blocks ---


class _Exchange:
    """One call of ``all_to_all`` between ``members``, by whose numbers blocks are known, and its expected result."""

    def __init__(self, collectives: Collectives, pattern: str, dtype: torch.dtype, members: Sequence[int]) -> None:
        device, sizes = collectives.device, _PATTERNS[pattern]
        self._own = own = members[collectives.rank]
        self._what = f"all_to_all of {dtype}, {pattern}, between {list(members)}"
        self._in_splits = [sizes(own, target) for target in members]
        self._out_splits = [sizes(source, own) for source in members]
        blocks = [block(own, target, n, dtype) for target, n in zip(members, self._in_splits, strict=True)]
        self._input = torch.cat(blocks).to(device)
        self._before = self._input.clone()
        nbytes = (sum(self._out_splits) + 2 * _MARGIN) * dtype.itemsize
        self._around = torch.full((nbytes,), _UNWRITTEN, dtype=torch.uint8, device=device).view(dtype)
        self._out = self._around[_MARGIN:-_MARGIN]
        # A stand-in pretends that every rank sends what this one does, where its blocks are as large as this rank's.
        alike = all(n == self._in_splits[collectives.rank] for n in self._out_splits)
        self._expected: list[torch.Tensor | None] = []
        for number, n in enumerate(self._out_splits):
            source = members[sender(collectives, number)]
            known = collectives.capabilities.can_communicate or alike or number == collectives.rank
            self._expected.append(block(source, own, n, dtype).to(device) if known else None)

    def issue(self, collectives: Collectives) -> Work:
        return collectives.all_to_all(self._out, self._out_splits, self._input, self._in_splits)

    def check(self) -> None:
        """Every block of known content, the memory beside them, and the input."""
        received = self._out.split_with_sizes(self._out_splits)
        for source, (actual, expected) in enumerate(zip(received, self._expected, strict=True)):
            if expected is not None:
                assert_same(actual, expected, f"block {source} on rank {self._own} after {self._what}")
        outside = torch.cat((self._around[:_MARGIN], self._around[-_MARGIN:])).view(torch.uint8)
        assert_same(outside, torch.full_like(outside, _UNWRITTEN), f"memory beside out after {self._what}")
        assert_same(self._input, self._before, f"the input of rank {self._own} after {self._what}")


def check_all_to_all(collectives: Collectives, dtypes: Sequence[torch.dtype] = _DTYPES) -> None:
    """Every block arrives at its rank, in rank order, bit for bit, and nothing else is written."""
    for dtype, pattern in itertools.product(dtypes if collectives.capabilities.exchanges else (), _PATTERNS):
        exchange = _Exchange(collectives, pattern, dtype, range(collectives.world_size))
        work = exchange.issue(collectives)
        for _ in range(2):
            work.wait()
            exchange.check()


def check_bad_blocks(collectives: Collectives) -> None:
    """Splits and tensors that do not fit are refused on the rank that gives them, and the group works on."""
    if not collectives.capabilities.exchanges:
        return
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
        with _refused(CollectiveError, f"all_to_all with {what} on rank {rank}"):
            collectives.all_to_all(out, out_splits, source, in_splits)
    check_all_to_all(collectives, [torch.float32])


# --- parts of the group, and several operations at once ---


def _interleaved(world_size: int) -> list[list[int]]:
    """Every second rank in one part, where there are two."""
    return [list(range(start, world_size, 2)) for start in range(min(2, world_size))]


def check_interleaved(collectives: Collectives) -> None:
    _check_parts(collectives, _interleaved(collectives.world_size))


def check_reversed(collectives: Collectives) -> None:
    _check_parts(collectives, [list(reversed(range(collectives.world_size)))])


def _check_parts(collectives: Collectives, rank_lists: Sequence[Sequence[int]]) -> None:
    """Parts number ranks by their list, and communicate beside the whole group."""
    rank, device = collectives.rank, collectives.device
    members = next(members for members in rank_lists if rank in members)
    part = collectives.partition(rank_lists)
    found, expected = (part.rank, part.world_size), (members.index(rank), len(members))
    assert found == expected, f"rank {rank} is {found[0]} of {found[1]} in its part {members}"
    n = 5
    out = torch.empty(len(members) * n, device=device)
    whole = torch.tensor([float(rank)], device=device)
    in_part = part.all_gather(out, values(rank, n, out.dtype, device))
    in_whole = collectives.all_reduce(whole, op=ReduceOp.SUM)
    in_part.wait()
    in_whole.wait()
    assert_same(
        out,
        torch.cat([values(sender(collectives, each), n, out.dtype, device) for each in members]),
        f"all_gather in part {members}",
    )
    assert_same(
        whole, torch.full_like(whole, _sum_of(collectives, range(collectives.world_size))), "all_reduce beside a part"
    )
    exchanges = collectives.capabilities.exchanges
    assert part.capabilities.exchanges == exchanges, f"the group and its part {members} differ in exchanges"
    for pattern in ("alike", "uneven") if exchanges else ():
        within = _Exchange(part, pattern, torch.float32, members)
        across = _Exchange(collectives, pattern, torch.float32, range(collectives.world_size))
        in_part, in_whole = within.issue(part), across.issue(collectives)
        in_part.wait()
        in_whole.wait()
        within.check()
        across.check()
    part.close()


def _sum_of(collectives: Collectives, members: Sequence[int]) -> float:
    """Of the numbers of ``members``, where each rank sends its own."""
    return float(sum(sender(collectives, member) for member in members))


def check_bad_partition(collectives: Collectives) -> None:
    """Lists that miss a rank, or name one twice, are refused."""
    world_size = collectives.world_size
    for lists in ([list(range(world_size)), [0]], [list(range(world_size + 1))]):
        with _refused(WorldSizeError, f"partition({lists}) of {world_size} ranks"):
            collectives.partition(lists)


def check_close_of_parts(collectives: Collectives) -> None:
    """Two parts of equal ranks, which may share resources: closing one leaves the other and the group working."""
    lists = _interleaved(collectives.world_size)

    def check_sum(group: Collectives, members: Sequence[int], what: str) -> None:
        tensor = torch.tensor([float(collectives.rank)], device=collectives.device)
        group.all_reduce(tensor, op=ReduceOp.SUM).wait()
        assert_same(tensor, torch.full_like(tensor, _sum_of(collectives, members)), what)

    own = next(members for members in lists if collectives.rank in members)
    first, second = collectives.partition(lists), collectives.partition(lists)
    check_sum(first, own, "all_reduce in the first of two parts")
    check_sum(second, own, "all_reduce in the second of two parts")
    first.close()
    first.close()
    check_sum(second, own, "all_reduce in a part whose twin was closed")
    check_sum(collectives, range(collectives.world_size), "all_reduce in a group of which a part was closed")
    second.close()
    third = collectives.partition(lists)
    check_sum(third, own, "all_reduce in a part that was made again")
    third.close()


def check_overlap(
    collectives: Collectives, wait_orders: Sequence[Sequence[int]] = ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2))
) -> None:
    """Operations in flight together may be waited for in any order, and more than once.

    Two gathers and two reductions, in turns; then, where the backend exchanges blocks, two exchanges between a gather
    and a reduction.
    """
    exchanges = [partial(_exchange, pattern=pattern) for pattern in ("long", "uneven")]
    for wait_order in wait_orders:
        _check_waits([_gather, _reduction, _gather, _reduction], collectives, wait_order)
        if collectives.capabilities.exchanges:
            _check_waits([exchanges[0], _gather, exchanges[1], _reduction], collectives, wait_order)


#: Issues an operation, known by its number; returns it, and a check of its result.
_Issue = Callable[[Collectives, int], tuple[Work, Callable[[], None]]]


def _check_waits(operations: Sequence[_Issue], collectives: Collectives, wait_order: Sequence[int]) -> None:
    issued = [issue(collectives, number) for number, issue in enumerate(operations)]
    for number in (*wait_order, *wait_order):
        work, check = issued[number]
        work.wait()
        check()


def _gather(collectives: Collectives, number: int) -> tuple[Work, Callable[[], None]]:
    n, rank, dtype = 1000, collectives.rank, torch.float32
    out = buffer(collectives, collectives.world_size * n, dtype, BufferRole.GATHER)
    own = out[rank * n : (rank + 1) * n].copy_(values(rank + number, n, dtype, collectives.device))
    work = collectives.all_gather(out, own)
    return work, partial(assert_same, out, torch.cat(sent(collectives, n, dtype, number)), f"gather {number}")


def _reduction(collectives: Collectives, number: int) -> tuple[Work, Callable[[], None]]:
    n, numel, dtype = 1000, collectives.world_size * 1000, torch.float32
    full = buffer(collectives, numel, dtype, BufferRole.REDUCE)
    full.copy_(values(collectives.rank + number, numel, dtype, collectives.device))
    out = torch.empty(n, device=collectives.device)
    work = collectives.reduce_scatter(out, full, op=ReduceOp.SUM)
    expected = scattered(collectives, n, dtype, ReduceOp.SUM, number)
    return work, partial(assert_near, out, expected, f"reduction {number}")


def _exchange(collectives: Collectives, number: int, pattern: str) -> tuple[Work, Callable[[], None]]:
    dtype = torch.float32 if number else torch.bfloat16
    exchange = _Exchange(collectives, pattern, dtype, range(collectives.world_size))
    return exchange.issue(collectives), exchange.check


def check_streams(collectives: Collectives) -> None:
    """On a stream-ordered backend, waiting on one stream orders it after operations issued on others."""
    if not collectives.capabilities.stream_ordered:
        return
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    n = 1 << 20
    streams = [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    works = []
    with torch.cuda.stream(streams[0]):
        gathered = torch.zeros(world_size * n, device=device)
        own = gathered[rank * n : (rank + 1) * n].fill_(float(rank + 1))
        works.append(collectives.all_gather(gathered, own))
    with torch.cuda.stream(streams[1]):
        narrow = torch.bfloat16 if collectives.capabilities.widening else torch.float32
        full = torch.full((world_size * n,), float(rank + 1), dtype=narrow, device=device)
        result = torch.zeros(n, device=device)
        works.append(collectives.reduce_scatter(result, full, op=ReduceOp.SUM))
    with torch.cuda.stream(streams[2]):
        blocks, received = torch.zeros_like(gathered), torch.zeros_like(gathered)
        for target in range(world_size):
            blocks[target * n : (target + 1) * n].fill_(100.0 * rank + target)
        if collectives.capabilities.exchanges:
            works.append(collectives.all_to_all(received, [n] * world_size, blocks, [n] * world_size))
    for work in reversed(works):
        work.wait()
    senders = torch.tensor([sender(collectives, r) for r in range(world_size)], dtype=torch.float32, device=device)
    sums = (senders + 1).sum().item()
    assert_same(result, torch.full_like(result, sums), "reduction issued on another stream")
    assert_same(gathered, (senders + 1).repeat_interleave(n), "gather issued on another stream")
    if collectives.capabilities.exchanges:
        expected = (100.0 * senders + rank).repeat_interleave(n)
        assert_same(received, expected, "exchange issued on another stream")
