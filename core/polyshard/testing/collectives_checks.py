"""What one rank does in the tests of ``CollectivesSuite``.

Functions of a module, so that a suite which starts processes can send them by name. Each raises ``AssertionError``
where the backend's answer differs from the contract's formula, computed here in fp64 from what every rank is known to
send.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from polyshard.errors import CollectiveError, CollectiveTimeoutError, RankMismatchError, WorldSizeError
from polyshard.interfaces import BufferRole, Collectives, CollectivesCapabilities, ReduceOp, Work

#: Dtypes that a gather must carry, whatever the transport knows.
GATHER_DTYPES = (
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
SIZES = (0, 1, 7, 4099)


#: Integers that fp32 rounds: the sum of three fits into an int32.
_LARGE = 2**24 + 1
#: Elements behind a result that must stay as they are.
_MARGIN = 3
#: Seconds by which ranks come to a barrier one after the other.
_LATE_S = 0.01


def check_each(collectives: Collectives, checks: Sequence[Callable[[Collectives], None]]) -> None:
    """Several checks of one backend, in one run: starting ranks takes longer than most."""
    for check in checks:
        check(collectives)


def sender(collectives: Collectives, rank: int) -> int:
    """Whose data arrives from ``rank``: on a stand-in every rank is pretended to send what this one does."""
    return rank if collectives.capabilities.can_communicate else collectives.rank


def values(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What ``rank`` sends: small integers, which every dtype holds exactly and which differ between ranks."""
    return _values(rank, numel, dtype).to(device, copy=True)


@functools.lru_cache(maxsize=1024)
def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = (torch.arange(numel) * 3 + rank * 5 + 1) % 8
    if dtype.is_complex:
        return torch.complex(numbers.float(), numbers.flip(0).float()).to(dtype)
    return numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)


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


def check_identity(collectives: Collectives, world_size: int) -> int:
    """The backend knows where it is; returns its rank."""
    capabilities = collectives.capabilities
    if collectives.world_size != world_size:
        raise AssertionError(f"world_size is {collectives.world_size}, not {world_size}")
    if collectives.device.type not in capabilities.devices:
        raise AssertionError(f"it is on {collectives.device} and says that it serves {sorted(capabilities.devices)}")
    if world_size < capabilities.min_world_size:
        raise AssertionError(f"it serves {world_size} ranks and says that {capabilities.min_world_size} is the least")
    if capabilities.max_world_size is not None and world_size > capabilities.max_world_size:
        raise AssertionError(f"it serves {world_size} ranks and says that {capabilities.max_world_size} is the most")
    return collectives.rank


#: Types of the capabilities, by name; what is not here is a bool.
_CAPABILITY_TYPES = {"min_world_size": int, "max_world_size": int | None}
_CAPABILITY_SETS = {"devices": str, "dtypes": torch.dtype, "reduce_ops": ReduceOp}


def check_capabilities(collectives: Collectives) -> None:
    """They are of the types that the contract gives, and stay what they are."""
    capabilities = collectives.capabilities
    if not isinstance(capabilities, CollectivesCapabilities):
        raise AssertionError(f"capabilities are {capabilities!r}, not CollectivesCapabilities")
    for field in dataclasses.fields(capabilities):
        value = getattr(capabilities, field.name)
        kind = _CAPABILITY_SETS.get(field.name)
        if kind is not None:
            right = isinstance(value, frozenset) and all(isinstance(each, kind) for each in value)
        else:
            wanted = _CAPABILITY_TYPES.get(field.name, bool)
            right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
        if not right:
            raise AssertionError(f"the capability {field.name} is {value!r}")
    if not {ReduceOp.SUM, ReduceOp.MEAN} <= capabilities.reduce_ops:
        raise AssertionError("gradients need SUM and MEAN among reduce_ops")
    tensor = torch.ones(1, device=collectives.device)
    collectives.all_reduce(tensor, op=ReduceOp.SUM).wait()
    if collectives.capabilities != capabilities:
        raise AssertionError(f"capabilities were {capabilities} and are {collectives.capabilities}")


def check_process_group(collectives: Collectives) -> None:
    """It is None, or a group of torch that knows this rank by the same number."""
    group = collectives.process_group
    if group is None:
        return
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise AssertionError(f"process_group is {group!r}, neither a torch.distributed.ProcessGroup nor None")
    if (group.rank(), group.size()) != (collectives.rank, collectives.world_size):
        raise AssertionError(
            f"process_group has this as rank {group.rank()} of {group.size()}, where the collectives have "
            f"{collectives.rank} of {collectives.world_size}"
        )


def check_all_gather(collectives: Collectives, dtype: torch.dtype, in_place: bool) -> None:
    """Every rank's shard arrives in rank order."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    for n in SIZES:
        around = buffer(collectives, world_size * n + _MARGIN, dtype, BufferRole.GATHER)
        around.zero_()
        out, behind = around[: world_size * n], around[world_size * n :]
        own = values(rank, n, dtype, device)
        shard = out[rank * n : (rank + 1) * n].copy_(own) if in_place else own.clone()
        collectives.all_gather(out, shard).wait()
        expected = torch.cat([values(sender(collectives, r), n, dtype, device) for r in range(world_size)])
        assert_same(out, expected, f"all_gather of {n} {dtype} a rank")
        assert_same(shard, own, f"this rank's shard after all_gather of {n} {dtype} a rank")
        assert_same(behind, torch.zeros_like(behind), f"memory behind out after all_gather of {n} {dtype} a rank")


def check_all_gather_many(collectives: Collectives, dtypes: Sequence[torch.dtype]) -> None:
    """Several gathers at once, in place and apart, of several sizes, do what each of them would by itself."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    cases = [(n, dtype, in_place) for dtype in dtypes for n in SIZES for in_place in (True, False)]
    for chosen in (cases[:1], cases):
        pairs = []
        for number, (n, dtype, in_place) in enumerate(chosen):
            out = buffer(collectives, world_size * n, dtype, BufferRole.GATHER)
            own = values(rank + number, n, dtype, device)
            pairs.append((out, out[rank * n : (rank + 1) * n].copy_(own) if in_place else own))
        work = collectives.all_gather_many(pairs)
        for _ in range(2):
            work.wait()
            for number, (n, dtype, _) in enumerate(chosen):
                sent = [values(sender(collectives, r) + number, n, dtype, device) for r in range(world_size)]
                assert_same(pairs[number][0], torch.cat(sent), f"gather {number} of {len(chosen)}: {n} {dtype} a rank")
                own = values(rank + number, n, dtype, device)
                assert_same(pairs[number][1], own, f"this rank's shard after gather {number} of {len(chosen)}")


def reduced(pieces: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reference: ``op`` over ranks in fp64."""
    stacked = torch.stack([piece.to(torch.float64) for piece in pieces])
    if op is ReduceOp.SUM:
        return stacked.sum(0)
    if op is ReduceOp.MEAN:
        return stacked.sum(0) / len(pieces)
    return stacked.amax(0) if op is ReduceOp.MAX else stacked.amin(0)


def check_reduce_scatter(collectives: Collectives, dtype: torch.dtype, op: ReduceOp) -> None:
    """``out = op_k(F_k[s])``, with and without the caller's scratch."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    for number, n in enumerate(SIZES):
        numel = world_size * n
        nbytes = collectives.scratch_nbytes(BufferRole.REDUCE, numel, dtype, dtype)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        sent = [values(sender(collectives, r), numel, dtype, device) for r in range(world_size)]
        expected = reduced([whole[rank * n : (rank + 1) * n].to(torch.float64) for whole in sent], op)
        # Both ways are another road only where there is scratch to use.
        for given in (None, scratch) if nbytes else (None, scratch)[number % 2 :][:1]:
            full = buffer(collectives, numel, dtype, BufferRole.REDUCE)
            full.copy_(values(rank, numel, dtype, device))
            out = torch.zeros(n, dtype=dtype, device=device)
            collectives.reduce_scatter(out, full, op=op, scratch=given).wait()
            assert_near(out, expected, f"reduce_scatter {op.name} of {n} {dtype} a rank")


def check_widening(collectives: Collectives, wire: torch.dtype, wide: torch.dtype, op: ReduceOp) -> None:
    """A sum that the wire dtype would round away is exact in ``out``'s dtype."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    # The first integer whose successor the wire dtype cannot hold: added to it in that dtype, ones are lost.
    large = 2.0 / torch.finfo(wire).eps
    n = 33
    nbytes = collectives.scratch_nbytes(BufferRole.REDUCE, world_size * n, wire, wide)
    for scratch in (None, torch.empty(nbytes, dtype=torch.uint8, device=device)):
        full = buffer(collectives, world_size * n, wire, BufferRole.REDUCE)
        full.fill_(large if rank == 0 else 1.0)
        out = torch.zeros(n, dtype=wide, device=device)
        collectives.reduce_scatter(out, full, op=op, scratch=scratch).wait()
        total = sum(large if sender(collectives, r) == 0 else 1.0 for r in range(world_size))
        expected = total / world_size if op is ReduceOp.MEAN else total
        assert_near(out, torch.full((n,), expected, dtype=torch.float64, device=device), f"{wire} into {wide}")


def check_reduce_scatter_many(collectives: Collectives, wire: torch.dtype, wide: torch.dtype, op: ReduceOp) -> None:
    """Several reductions at once, of several sizes, do what each of them would by itself."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    for chosen in (SIZES[:1], SIZES):
        triples = []
        for number, n in enumerate(chosen):
            full = buffer(collectives, world_size * n, wire, BufferRole.REDUCE)
            full.copy_(values(rank + number, world_size * n, wire, device))
            nbytes = collectives.scratch_nbytes(BufferRole.REDUCE, world_size * n, wire, wide)
            scratch = torch.empty(nbytes, dtype=torch.uint8, device=device) if number % 2 else None
            triples.append((torch.zeros(n, dtype=wide, device=device), full, scratch))
        work = collectives.reduce_scatter_many(triples, op=op)
        for _ in range(2):
            work.wait()
            for number, n in enumerate(chosen):
                sent = [
                    values(sender(collectives, r) + number, world_size * n, wire, device) for r in range(world_size)
                ]
                own = [whole[rank * n : (rank + 1) * n] for whole in sent]
                what = f"reduction {number} of {len(chosen)}: {op.name} of {n} {wire} a rank into {wide}"
                assert_near(triples[number][0], reduced(own, op), what)


def check_all_reduce(collectives: Collectives, dtype: torch.dtype, op: ReduceOp) -> None:
    """In place, any shape, the same on every rank."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    for shape in ((), (0,), (5,), (2, 3, 4)):
        numel = torch.Size(shape).numel()
        tensor = values(rank, numel, dtype, device).view(shape)
        collectives.all_reduce(tensor, op=op).wait()
        sent = [values(sender(collectives, r), numel, dtype, device).view(shape) for r in range(world_size)]
        assert_near(tensor, reduced(sent, op), f"all_reduce {op.name} of {shape} {dtype}")


def check_broadcast(collectives: Collectives, dtype: torch.dtype) -> None:
    """From every source in turn."""
    for src in range(collectives.world_size):
        for shape in ((0,), (3, 2)):
            numel = torch.Size(shape).numel()
            tensor = values(collectives.rank, numel, dtype, collectives.device).view(shape)
            collectives.broadcast(tensor, src).wait()
            expected = values(sender(collectives, src), numel, dtype, collectives.device).view(shape)
            assert_same(tensor, expected, f"broadcast of {dtype} from {src}")


def check_objects(collectives: Collectives) -> None:
    """Objects of different sizes arrive in rank order."""

    def description(rank: int) -> dict[str, Any]:
        return {"rank": rank, "text": "x" * (rank * 1000), "nested": [(rank, None)]}

    received = collectives.all_gather_object(description(collectives.rank))
    expected = [description(sender(collectives, rank)) for rank in range(collectives.world_size)]
    if received != expected:
        raise AssertionError(f"all_gather_object gave {received}, not {expected}")


def check_announcements(collectives: Collectives) -> None:
    """Ranks that announce the same go on; where one announces something else, every rank is told."""
    if not collectives.capabilities.announces:
        return
    out = torch.empty(collectives.world_size, device=collectives.device)
    mine = torch.ones(1, device=collectives.device)
    collectives.announce("a gather")
    collectives.all_gather(out, mine).wait()
    assert_same(out, torch.ones_like(out), "a gather that was announced")
    if collectives.world_size == 1:
        return
    try:
        collectives.announce(f"gather {min(collectives.rank, 1)}")
        collectives.all_gather(out, mine).wait()
    except RankMismatchError:
        return
    raise AssertionError(f"rank {collectives.rank} was not told that ranks announced different things")


def check_integers(collectives: Collectives, dtype: torch.dtype) -> None:
    """Sums that a float would round, in place and scattered."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    n = 5
    sent = [torch.arange(world_size * n) + _LARGE + sender(collectives, r) for r in range(world_size)]
    expected = torch.stack(sent).sum(0).to(device, dtype)
    full = sent[rank if collectives.capabilities.can_communicate else 0].to(device, dtype, copy=True)
    tensor, out = full.clone(), torch.zeros(n, dtype=dtype, device=device)
    collectives.all_reduce(tensor, op=ReduceOp.SUM).wait()
    assert_same(tensor, expected, f"all_reduce SUM of {dtype}")
    collectives.reduce_scatter(out, full, op=ReduceOp.SUM).wait()
    assert_same(out, expected[rank * n : (rank + 1) * n], f"reduce_scatter SUM of {dtype}")


def check_barrier(collectives: Collectives) -> None:
    """Nobody leaves before everybody came, and the order of other operations stays what it was."""
    for round_number in range(3):
        # A clock that all processes of a machine share.
        time.sleep(_LATE_S * collectives.rank)
        came = time.monotonic()
        collectives.barrier()
        left = time.monotonic()
        tensor = torch.full((4,), float(round_number), device=collectives.device)
        collectives.all_reduce(tensor, op=ReduceOp.MAX).wait()
        assert_same(tensor, torch.full_like(tensor, float(round_number)), f"maximum after barrier {round_number}")
        late = max(each for each in collectives.all_gather_object(came))
        if left < late and collectives.capabilities.can_communicate:
            raise AssertionError(f"rank {collectives.rank} left barrier {round_number} before the last rank came")


def check_in_time(collectives: Collectives) -> None:
    """A rank that nobody joins is told so: all gather once, and then rank 0 alone."""
    capabilities = collectives.capabilities
    if capabilities.stream_ordered or not capabilities.can_communicate:
        # Its waits return at once.
        return
    out, mine = torch.zeros(collectives.world_size, device=collectives.device), torch.ones(1, device=collectives.device)
    # Communicators are made at first use, where all have to be there.
    collectives.all_gather(out, mine).wait()
    if collectives.rank != 0:
        return
    try:
        collectives.all_gather(out, mine).wait()
    except CollectiveTimeoutError:
        return
    raise AssertionError("a gather to which no other rank came did not raise CollectiveTimeoutError")


def check_partition(collectives: Collectives, rank_lists: Sequence[Sequence[int]]) -> None:
    """Ranks are numbered by their list, and group and parts go on working side by side."""
    rank, device = collectives.rank, collectives.device
    members = next(members for members in rank_lists if rank in members)
    part = collectives.partition(rank_lists)
    if (part.rank, part.world_size) != (members.index(rank), len(members)):
        raise AssertionError(f"rank {rank} is {part.rank} of {part.world_size} in its part {members}")
    n = 5
    out = torch.empty(len(members) * n, device=device)
    whole = torch.tensor([float(rank)], device=device)
    in_part = part.all_gather(out, values(rank, n, out.dtype, device))
    in_whole = collectives.all_reduce(whole, op=ReduceOp.SUM)
    in_part.wait()
    in_whole.wait()
    sent = [values(sender(collectives, member), n, out.dtype, device) for member in members]
    assert_same(out, torch.cat(sent), f"all_gather in part {members}")
    total = float(sum(sender(collectives, r) for r in range(collectives.world_size)))
    assert_same(whole, torch.full_like(whole, total), "all_reduce beside a part")
    part.close()


def check_bad_partition(collectives: Collectives) -> None:
    """Lists that miss a rank, or name one twice, are refused."""
    world_size = collectives.world_size
    for lists in ([list(range(world_size)), [0]], [list(range(world_size + 1))]):
        try:
            collectives.partition(lists)
        except WorldSizeError:
            continue
        raise AssertionError(f"partition({lists}) of {world_size} ranks did not raise WorldSizeError")


def check_overlap(collectives: Collectives, wait_order: Sequence[int]) -> None:
    """Gathers and reductions in flight together may be waited for in any order, and more than once."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    n = 1000
    works: list[Work] = []
    checks: list[Callable[[], None]] = []
    for number in range(4):
        if number % 2 == 0:
            out = buffer(collectives, world_size * n, torch.float32, BufferRole.GATHER)
            own = out[rank * n : (rank + 1) * n].copy_(values(rank + number, n, torch.float32, device))
            works.append(collectives.all_gather(out, own))
            sent = [values(sender(collectives, r) + number, n, torch.float32, device) for r in range(world_size)]
            checks.append(partial(assert_same, out, torch.cat(sent), f"gather {number}"))
        else:
            full = buffer(collectives, world_size * n, torch.float32, BufferRole.REDUCE)
            full.copy_(values(rank + number, world_size * n, torch.float32, device))
            result = torch.empty(n, device=device)
            works.append(collectives.reduce_scatter(result, full, op=ReduceOp.SUM))
            wholes = [
                values(sender(collectives, r) + number, world_size * n, torch.float32, device)
                for r in range(world_size)
            ]
            own_pieces = [whole[rank * n : (rank + 1) * n] for whole in wholes]
            checks.append(partial(assert_near, result, reduced(own_pieces, ReduceOp.SUM), f"reduction {number}"))
    for number in (*wait_order, *wait_order):
        works[number].wait()
        checks[number]()


def check_streams(collectives: Collectives) -> None:
    """On a stream-ordered backend, waiting on one stream orders it after an operation issued on another."""
    if not collectives.capabilities.stream_ordered:
        return
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    n = 1 << 20
    gathers = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    reductions = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    gathers.wait_stream(torch.cuda.current_stream(device))
    reductions.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(gathers):
        out = torch.zeros(world_size * n, device=device)
        own = out[rank * n : (rank + 1) * n].fill_(float(rank + 1))
        gather = collectives.all_gather(out, own)
    with torch.cuda.stream(reductions):
        narrow = torch.bfloat16 if collectives.capabilities.widening else torch.float32
        full = torch.full((world_size * n,), float(rank + 1), dtype=narrow, device=device)
        result = torch.zeros(n, device=device)
        reduction = collectives.reduce_scatter(result, full, op=ReduceOp.SUM)
    reduction.wait()
    gather.wait()
    sums = float(sum(sender(collectives, r) + 1 for r in range(world_size)))
    assert_same(result, torch.full_like(result, sums), "reduction issued on another stream")
    expected = torch.cat([torch.full((n,), sender(collectives, r) + 1.0, device=device) for r in range(world_size)])
    assert_same(out, expected, "gather issued on another stream")


def check_close_of_parts(collectives: Collectives) -> None:
    """Two parts of equal ranks, which may share what they hold: closing one leaves the other and the group theirs."""
    world_size = collectives.world_size
    lists = [list(range(start, world_size, 2)) for start in range(min(2, world_size))]

    def check_sum(group: Collectives, members: Sequence[int], what: str) -> None:
        tensor = torch.tensor([float(collectives.rank)], device=collectives.device)
        group.all_reduce(tensor, op=ReduceOp.SUM).wait()
        total = float(sum(sender(collectives, member) for member in members))
        assert_same(tensor, torch.full_like(tensor, total), what)

    own = next(members for members in lists if collectives.rank in members)
    first, second = collectives.partition(lists), collectives.partition(lists)
    check_sum(first, own, "all_reduce in the first of two parts")
    check_sum(second, own, "all_reduce in the second of two parts")
    first.close()
    first.close()
    check_sum(second, own, "all_reduce in a part whose twin was closed")
    check_sum(collectives, range(world_size), "all_reduce in a group of which a part was closed")
    second.close()
    third = collectives.partition(lists)
    check_sum(third, own, "all_reduce in a part that was made again")
    third.close()


def check_close(collectives: Collectives) -> None:
    """Closing twice is as good as once."""
    tensor = torch.ones(1, device=collectives.device)
    collectives.all_reduce(tensor, op=ReduceOp.MEAN).wait()
    assert_same(tensor, torch.ones_like(tensor), "mean of ones")
    collectives.close()
    collectives.close()


#: What memory holds before anything arrives in it, byte by byte.
_UNWRITTEN = 0x55
#: Elements beside the buffer that must stay as they are.
_BESIDE = 5

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
        outside = torch.cat((self.around[:_BESIDE], self.around[-_BESIDE:])).view(torch.uint8)
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
    nbytes = (sum(out_splits) + 2 * _BESIDE) * dtype.itemsize
    around = torch.full((nbytes,), _UNWRITTEN, dtype=torch.uint8, device=device).view(dtype)
    out = around[_BESIDE : _BESIDE + sum(out_splits)]
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
