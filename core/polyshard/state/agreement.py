"""Parts of a save or load that every rank finishes, or every rank gives up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointDamagedError, CollectiveError, PolyshardError, RankMismatchError
from ..interfaces import Collectives
from .exchange import speaks

#: How many ranks a message lists.
_SHOWN = 4


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
    try:
        yield
    except CheckpointException as error:
        # No Exception to Python: it would pass by every handler of the caller's.
        failure = PolyshardError(f"{what} failed (rank {collectives.rank}): {error}")
        failure.__cause__ = error
    except CollectiveError:
        raise
    except Exception as error:
        failure = error
    mine: tuple[str, bool] | None = None
    if failure is not None:
        mine = (f"{type(failure).__name__}: {failure}", isinstance(failure, CheckpointDamagedError))
    arguments = {name: repr(value) for name, value in (called or {}).items()}
    # Settings of many parameter groups are long, and nearly always alike.
    digest = hashlib.sha256(repr(sorted(arguments.items())).encode(errors="replace")).hexdigest()
    everyone = list(collectives.all_gather_object((mine, digest))) if speaks(collectives) else []
    if failure is not None:
        raise failure
    failures = [f"  rank {rank}: {each[0]}" for rank, (each, _) in enumerate(everyone) if each is not None]
    if failures:
        is_damage = all(each is None or each[1] for each, _ in everyone)
        raise (CheckpointDamagedError if is_damage else RankMismatchError)(
            f"{what} failed on other ranks, so it was given up on rank {collectives.rank} too:\n" + "\n".join(failures)
        )
    if any(each != digest for _, each in everyone):
        _refuse_other_arguments(collectives, what, arguments)


def _refuse_other_arguments(collectives: Collectives, what: str, arguments: dict[str, str]) -> None:
    """Raise on all ranks, naming the first argument that differs: they have all seen that one does."""
    everyone = collectives.all_gather_object(arguments)
    names = dict.fromkeys(name for each in everyone for name in each)
    name = next(name for name in names if len({each.get(name) for each in everyone}) > 1)
    own = arguments.get(name, "left out")
    others = [
        f"{each.get(name, 'left out')} on rank {rank}"
        for rank, each in enumerate(everyone)
        if each.get(name, "left out") != own
    ]
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    raise RankMismatchError(
        f"{what} was given up: '{name}' is {own} on rank {collectives.rank}, and {', '.join(others[:_SHOWN])}{more}. "
        "Call it with the same on every rank."
    )
