"""Parts of a save or load that every rank finishes, or every rank gives up."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointDamagedError, CollectiveError, PolyshardError, RankMismatchError
from ..interfaces import Collectives
from ..runtime.peers import error_text
from .exchange import broadcast, numbers_of_all, speaks

#: How many ranks a message lists.
_SHOWN = 4
#: Where in a row of numbers the digest is.
_DIGEST = slice(2, None)
#: What became of a rank's part.
_DONE, _FAILED, _DAMAGED = 0, 1, 2


class Answers:
    """What each rank answered to a question that all of them are asked: a number, and words.

    [Note: what travels]
    Every rank gets a few bytes of each: the number, and length and digest of the words. Words are fetched only where
    they matter, and from a few ranks: ranks that say the same are asked once. What a rank receives thus grows by 48
    bytes with each further rank, however long the words are.
    """

    def __init__(self, collectives: Collectives, number: int, text: str, key: str | None = None) -> None:
        """Every rank calls it, with its own answer. A rank that stands alone asks nobody.

        ``key``: what is compared of it; None for ``text``.
        """
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

    def told(self, ranks: Collection[int]) -> str:
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
        answers = Answers(collectives, kind, error_text(failure))
    failed = [rank for rank, number in enumerate(answers.numbers) if number != _DONE]
    if failed:
        told = answers.told(failed)
        if failure is not None:
            raise failure
        is_damage = all(answers.numbers[rank] == _DAMAGED for rank in failed)
        raise (CheckpointDamagedError if is_damage else RankMismatchError)(
            f"{what} failed on other ranks, so it was given up on rank {collectives.rank} too:\n{told}"
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


def tell_listeners(collectives: Collectives, done: str, tell: Callable[[], None]) -> None:
    """Let ``tell`` call listeners on every rank; raise on every rank if one raised. ``done``: what they are told of."""
    with together(collectives, f"What listeners do behind {done}"):
        try:
            tell()
        except Exception as error:
            error.add_note(f"By a listener, behind {done} (rank {collectives.rank}).")
            raise


def require_seen(collectives: Collectives, path: object, seen: bool, remedy: str = "") -> None:
    """Raise on all ranks, naming them, where some see ``path`` and some do not. Every rank calls it.

    Args:
        collectives: Of the model.
        path: What they were given.
        seen: Whether this rank sees it.
        remedy: A sentence that says what else can be done than to give all ranks one file system.

    Raises:
        RankMismatchError: saying that it is not one file system.
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
