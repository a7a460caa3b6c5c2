"""Parts of a save or load that every rank finishes, or every rank gives up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointDamagedError, CollectiveError, PolyshardError, RankMismatchError
from ..interfaces import Collectives
from .exchange import speaks


@contextmanager
def together(collectives: Collectives, what: str) -> Iterator[None]:
    """Return when every rank has left the body; raise on every rank if the body raised on any.

    Otherwise a rank whose disk is full would leave the others waiting for it. Where the ranks can no longer exchange
    anything, this one raises by itself: asking the others would wait for them a second time.

    Raises:
        CheckpointDamagedError: another rank found a damaged file, which this one need not read: programs that go back
            to an older checkpoint must do so alike.
        RankMismatchError: another rank failed otherwise while this one did not.
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
    everyone = [mine]
    if speaks(collectives):
        everyone = list(collectives.all_gather_object(mine))
    if failure is not None:
        raise failure
    failures = [f"  rank {rank}: {each[0]}" for rank, each in enumerate(everyone) if each is not None]
    if failures:
        is_damage = all(each is None or each[1] for each in everyone)
        raise (CheckpointDamagedError if is_damage else RankMismatchError)(
            f"{what} failed on other ranks, so it was given up on rank {collectives.rank} too:\n" + "\n".join(failures)
        )
