"""What ranks exchange beside tensors: objects, answers that are compared, and steps that all finish or all give up.

By the collectives that the model trains with: functions of ``torch.distributed`` for the same wait as long as the
process group says that the user made.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointDamagedError, CollectiveError, PolyshardError, RankMismatchError, words
from ..interfaces import Collectives, ReduceOp, Work

#: Bytes that a rank receives in one round.
_AT_ONCE = 64 << 20
#: How many ranks a message lists.
_SHOWN = 4
#: Where in a row of numbers the digest is.
_DIGEST = slice(2, None)
#: How a rank's part ended.
_DONE, _FAILED, _DAMAGED = 0, 1, 2


def speaks(collectives: Collectives) -> bool:
    """Whether there are other ranks to exchange anything with."""
    return collectives.world_size > 1 and collectives.capabilities.can_communicate


def coordinates(collectives: Collectives) -> bool:
    """Whether this rank does the work of one rank: the first does, and one that stands alone."""
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


class Answers:
    """What each rank answered to a question that all of them are asked: a number, and words.

    [Note: what travels]
    Every rank gets a few bytes of each: the number, and length and digest of the words. Words are fetched only where
    they matter, and from a few ranks: ranks that say the same are asked once. What a rank receives thus grows by 48
    bytes with each further rank, however long the words are.
    """

    def __init__(self, collectives: Collectives, number: int, text: str, key: str | None = None) -> None:
        """Every rank calls it, with its own answer. ``key``: compared in the place of ``text``, unless None."""
        self._collectives = collectives
        self._own = text.encode(errors="backslashreplace")
        compared = self._own if key is None else key.encode()
        digest = struct.unpack("<4q", hashlib.sha256(compared).digest())
        mine = [number, len(self._own), *digest]
        self._rows = numbers_of_all(collectives, mine) if speaks(collectives) else [mine]
        self.numbers = [row[0] for row in self._rows]
        """Of each rank."""

    @property
    def differ(self) -> bool:
        """Whether the words do, between any ranks."""
        return any(row[_DIGEST] != self._rows[0][_DIGEST] for row in self._rows)

    def alike(self, ranks: Collection[int]) -> list[list[int]]:
        """``ranks`` in lists of those whose words are the same."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            found.setdefault(tuple(self._rows[rank][_DIGEST]), []).append(rank)
        return list(found.values())

    def words_of(self, rank: int) -> str:
        """What ``rank`` said. Every rank calls it, for the same one."""
        if not speaks(self._collectives):
            return self._own.decode()
        return broadcast(self._collectives, self._own, self._rows[rank][1], rank).decode()

    def quoted(self, ranks: Collection[int]) -> str:
        """What ``ranks`` said, in lines. Every rank calls it, for the same ones."""
        groups = self.alike(ranks)
        lines = [f"  {named(group)}: {self.words_of(group[0])}" for group in groups[:_SHOWN]]
        more = sum(map(len, groups[_SHOWN:]))
        return "\n".join([*lines, *([f"  and {more} more"] if more else [])])


def named(ranks: Sequence[int]) -> str:
    """The numbers of a few ranks, for messages: ``ranks 1, 2 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *others, last = [str(rank) for rank in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        others, last = [*others, last], f"{len(ranks) - _SHOWN} more"
    return f"ranks {', '.join(others)} and {last}"


@contextmanager
def together(collectives: Collectives, what: str, called: Mapping[str, object] | None = None) -> Iterator[None]:
    """Return when every rank has left the body; raise on every rank if the body raised on any.

    Otherwise a rank whose disk is full would leave the others waiting for it. Where the ranks can no longer exchange
    anything, this one raises by itself: asking the others would wait for them a second time.

    ``called``: what the body leaves there, arguments of the call by name, must be equal on all ranks, too.

    Raises:
        CheckpointDamagedError: another rank found a damaged file, which this one need not read: programs that go back
            to an older checkpoint must do so alike.
        RankMismatchError: another rank failed otherwise while this one did not, or was called with something else.
    """
    failure: Exception | None = None
    arguments: dict[str, str] = {}
    try:
        yield
        arguments = {name: repr(value) for name, value in (called or {}).items()}
    except CheckpointException as error:
        # No Exception to Python: it would pass by every handler of the caller's.
        failure = PolyshardError(f"{what} failed (rank {collectives.rank}): {error}")
        failure.__cause__ = error
    except CollectiveError:
        raise
    except Exception as error:
        failure = error
    if failure is None:
        answers = Answers(collectives, _DONE, json.dumps(arguments) if arguments else "")
    else:
        kind = _DAMAGED if isinstance(failure, CheckpointDamagedError) else _FAILED
        answers = Answers(collectives, kind, words(failure))
    failed = [rank for rank, number in enumerate(answers.numbers) if number != _DONE]
    if failed:
        quoted = answers.quoted(failed)
        if failure is not None:
            raise failure
        is_damage = all(answers.numbers[rank] == _DAMAGED for rank in failed)
        raise (CheckpointDamagedError if is_damage else RankMismatchError)(
            f"{what} failed on other ranks, so it was given up on rank {collectives.rank} too:\n{quoted}"
        )
    if answers.differ:
        _refuse_other_arguments(answers, collectives, what, arguments)


def _refuse_other_arguments(
    answers: Answers, collectives: Collectives, what: str, arguments: Mapping[str, str]
) -> None:
    """Raise on all ranks, naming the first argument that differs: they have all seen that one does."""
    groups = answers.alike(range(collectives.world_size))
    known = [(ranks, json.loads(answers.words_of(ranks[0]) or "{}")) for ranks in groups[: _SHOWN + 1]]
    names = dict.fromkeys(name for _, each in known for name in each)
    name = next(name for name in names if len({each.get(name) for _, each in known}) > 1)
    own = arguments.get(name, "left out")
    others = sorted((rank, each.get(name, "left out")) for ranks, each in known for rank in ranks)
    others = [(rank, value) for rank, value in others if value != own]
    more = len(others) - _SHOWN + sum(len(ranks) for ranks in groups[_SHOWN + 1 :])
    raise RankMismatchError(
        f"{what} was given up: '{name}' is {own} on rank {collectives.rank}, and "
        f"{', '.join(f'{value} on rank {rank}' for rank, value in others[:_SHOWN])}"
        f"{f' and {more} more' if more > 0 else ''}. Call it with the same on every rank."
    )


def require_same(collectives: Collectives, path: object, identity: str, remedy: str) -> None:
    """Raise RankMismatchError where ranks see others, by ``identity``, under ``path``. Every rank calls it."""
    answers = Answers(collectives, 0, str(path), key=identity)
    if not answers.differ:
        return
    groups = answers.alike(range(collectives.world_size))
    one, other = [(ranks[0], answers.words_of(ranks[0])) for ranks in groups[:2]]
    rank, elsewhere = other if collectives.rank in groups[0] else one
    raise RankMismatchError(
        f"Ranks were given different checkpoints: {path} on rank {collectives.rank}, {elsewhere} on rank {rank}. "
        f"{remedy}"
    )


def notify_listeners(collectives: Collectives, done: str, notify: Callable[[], None]) -> None:
    """Call listeners on every rank by ``notify``; raise on every rank if one raised. ``done``: the event."""
    with together(collectives, f"What listeners do behind {done}"):
        try:
            notify()
        except Exception as error:
            error.add_note(f"By a listener, behind {done} (rank {collectives.rank}).")
            raise


def require_seen(collectives: Collectives, path: object, seen: bool, remedy: str = "") -> None:
    """Raise RankMismatchError on all ranks where some see ``path`` and some do not: they have not one file system.

    ``remedy``: a sentence that says what else can be done than to give all ranks one file system.
    """
    answers = Answers(collectives, int(seen), str(path))
    without = [rank for rank, number in enumerate(answers.numbers) if not number]
    if not without or len(without) == len(answers.numbers):
        return
    seeing = [rank for rank, number in enumerate(answers.numbers) if number]
    there = answers.words_of(seeing[0])
    see = "does not see" if len(without) == 1 else "do not see"
    which = named(without)
    raise RankMismatchError(
        f"{which[0].upper()}{which[1:]} {see} {there}, which {named(seeing)} {'sees' if len(seeing) == 1 else 'see'} "
        f"(rank {collectives.rank}): they have not one file system. Give a folder that all ranks see, on every machine "
        f"under the same name.{remedy}"
    )


class Round:
    """One exchange on its way. Every rank makes it, and reads it at the same later call, when it has long ended."""

    def __init__(self, values: torch.Tensor, work: Work, sources: tuple[torch.Tensor, ...] = ()) -> None:
        """``values``: what ``work`` makes usable; ``sources``: what is read until then. Kept until it is read."""
        self._values = values
        self._sources = sources
        self._work: Work | None = work
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            work.wait()
            self._work = None
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        if self._work is not None:
            self._work.wait()
        if self._event is not None:
            self._event.synchronize()
        return [float(value) for value in self._values.tolist()]


def summing(collectives: Collectives, value: float) -> Round:
    """Ranks add up ``value``: one number. fp32, which every backend adds."""
    total = torch.full((1,), value, device=collectives.device)
    return Round(total, collectives.all_reduce(total, op=ReduceOp.SUM))


def gathering(collectives: Collectives, values: Sequence[float]) -> Round:
    """Ranks send ``values``, as many on each: those of all, in the order of ranks. In fp64."""
    mine = torch.tensor(values, dtype=torch.float64, pin_memory=collectives.device.type == "cuda")
    mine = mine.to(collectives.device, non_blocking=True)
    everyone = mine.new_empty(collectives.world_size * mine.numel())
    return Round(everyone, collectives.all_gather(everyone, mine), (mine,))
