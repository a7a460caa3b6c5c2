"""Parts of a save or load that every rank finishes, or every rank gives up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointDamagedError, CollectiveError, PolyshardError, RankMismatchError
from ..interfaces import Collectives
from .exchange import speaks


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
    everyone = list(collectives.all_gather_object((mine, arguments))) if speaks(collectives) else []
    if failure is not None:
        raise failure
    failures = [f"  rank {rank}: {each[0]}" for rank, (each, _) in enumerate(everyone) if each is not None]
    if failures:
        is_damage = all(each is None or each[1] for each, _ in everyone)
        raise (CheckpointDamagedError if is_damage else RankMismatchError)(
            f"{what} failed on other ranks, so it was given up on rank {collectives.rank} too:\n" + "\n".join(failures)
        )
    for name, own in arguments.items():
        others = [f"{each[name]} on rank {rank}" for rank, (_, each) in enumerate(everyone) if each[name] != own]
        if others:
            raise RankMismatchError(
                f"{what} was given up: '{name}' is {own} on rank {collectives.rank}, and {', '.join(others)}. Call it "
                "with the same on every rank."
            )
