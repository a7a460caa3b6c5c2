"""Ranks compare what they are about to do before the first collective, and fail together."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from .differences import told
from .engine import _torch_private
from .errors import RankMismatchError
from .interfaces import Collectives

#: How each rank's report starts in the store: everything went well, or it raised.
_READY, _FAILED = "ready", "failed"
#: How a failure's message begins.
_FAILURE = json.dumps([_FAILED])[:-1]
#: The report of a rank that had not come when another one failed.
_NOT_YET = json.dumps(["not yet"])
#: Seconds after which a rank that waits looks whether another one has failed.
_LOOK_EVERY_S = 1.0
#: How many ranks it looks for then.
_LOOK_AT = 32
#: Seconds that a failed rank gives the others to read why, where the store ends with its process.
_FAREWELL_S = 10.0


def agree(
    report: Sequence[Any],
    error: Exception | None,
    collectives: Collectives | None,
    process_group: Any | None,
    timeout: timedelta,
) -> None:
    """Return only if every rank is ready and reports the same; raise on every rank otherwise.

    Args:
        report: What this rank resolved and planned: JSON values.
        error: What went wrong on this rank; raised again once the others can know.
        collectives: The resolved backend, or None where resolving failed.
        process_group: The ranks that shard together; None for all.
        timeout: How long to wait for the other ranks.

    The launcher's store serves where there is one, so that a rank whose backend could not be loaded reports too, or one
    whose backend only pretends to communicate; otherwise the backend itself does. A rank that pretends without a
    launcher, or in a pretended process group, stands alone.

    Raises:
        RankMismatchError: another rank failed, or reports something else.
    """
    if stands_alone(collectives, process_group):
        if error is not None:
            raise error
        return
    message = json.dumps([_READY, report] if error is None else [_FAILED, f"{type(error).__name__}: {error}"])
    everyone: list[str] | None = None
    store = _store_of(collectives, process_group)
    if store is not None:
        group = process_group if isinstance(process_group, torch.distributed.ProcessGroup) else None
        ranks = torch.distributed.get_process_group_ranks(group)
        everyone = _through_store(store, ranks, message, error is not None, timeout)
    elif collectives is not None:
        everyone = list(collectives.all_gather_object(message))
    if error is not None:
        raise error
    if everyone is not None:
        # Without collectives there is an error.
        assert collectives is not None
        _compare([json.loads(text) for text in everyone], json.loads(message), collectives.rank)


def stands_alone(collectives: Collectives | None, process_group: Any | None) -> bool:
    """Whether there is nobody that ``agree`` would compare with."""
    communicates = collectives is not None and collectives.capabilities.can_communicate
    return not communicates and _store_of(collectives, process_group) is None


def _store_of(collectives: Collectives | None, process_group: Any | None) -> Any | None:
    """The launcher's store, where the ranks that share the model are those of ``torch.distributed``."""
    if collectives is not None and collectives.process_group is None:
        if collectives.capabilities.can_communicate:
            # Ranks of the backend's own.
            return None
        if process_group is not None and not isinstance(process_group, torch.distributed.ProcessGroup):
            # An object that stands for a group of ranks that are not there.
            return None
    store = _torch_private.default_store()
    # Torch's pretended process groups come with a store that holds nothing.
    return None if store is None or torch.distributed.get_backend() == "fake" else store


def _through_store(
    store: Any, ranks: Sequence[int], message: str, failed: bool, timeout: timedelta
) -> list[str] | None:
    exchange = _Exchange(store, ranks, timeout)
    try:
        exchange.report(message)
        if not failed:
            return exchange.reports()
        # The others read this and raise; there is nothing to wait for, unless the store ends with this process.
        exchange.announce_failure()
        if _torch_private.may_host(store):
            exchange.await_readers()
    except torch.distributed.DistNetworkError as error:
        if not failed:
            raise exchange.without_store() from error
    return None


class _Exchange:
    """One agreement of this rank with others, through the launcher's store."""

    def __init__(self, store: Any, ranks: Sequence[int], timeout: timedelta) -> None:
        self._store = store
        self._ranks = ranks
        self._me = torch.distributed.get_rank()
        self._timeout = timeout
        self._scope = "polyshard/" + ",".join(map(str, ranks))
        self._turn = 0
        self._reports: dict[int, str] = {}

    def report(self, message: str) -> None:
        """Let the other ranks read ``message``."""
        # Each rank counts its own wraps in the store: the n-th of one rank is compared with the n-th of the others.
        self._turn = self._store.add(f"{self._scope}/wraps/{self._me}", 1)
        self._reports[self._me] = message
        self._store.set(self._key(self._me), message)

    def reports(self) -> list[str]:
        """Every rank's report, in their order; without those that are still to come where a rank has failed.

        Raises:
            RankMismatchError: a rank did not come in time.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        while missing := self._missing():
            left = deadline - time.monotonic()
            try:
                pause = max(0.01, min(_LOOK_EVERY_S, left))
                self._store.wait([self._key(rank) for rank in missing], timedelta(seconds=pause))
            except torch.distributed.DistNetworkError:
                raise
            except Exception as error:
                if self._store.check([self._failure]):
                    self._read(missing)
                    break
                # Who is there, in case that the store ends. Of some: a thousand ranks that all ask about each other
                # would keep one store busy.
                self._read(missing[:_LOOK_AT])
                if left <= _LOOK_EVERY_S:
                    self._read(missing)
                    if not self._missing():
                        break
                    waited = f"within {self._timeout.total_seconds():g} s, rank {self._me} waited"
                    # One that comes later would take this rank for ready, go on alone to the next exchange, and count
                    # one more than the others from then on.
                    gone = f"Ranks {self._missing()} did not come {waited}, and gave up."
                    self._store.set(self._key(self._me), json.dumps([_FAILED, gone]))
                    raise RankMismatchError(
                        f"Ranks {self._missing()} did not come to shard their model {waited}. "
                        "Let every rank shard the same model; see the other ranks' logs. One that shards by itself, "
                        "with collectives that only pretend, needs check_ranks=False."
                    ) from error
            else:
                for rank in missing:
                    self._reports[rank] = self._store.get(self._key(rank)).decode()
        if any(report.startswith(_FAILURE) for report in self._reports.values()):
            self._store.set(self._key(self._me, "read"), "")
        elif self._turn > 1:
            # All ranks have come here, and so are done with the exchange before.
            self._store.delete_key(self._key(self._me, turn=self._turn - 1))
        return [self._reports.get(rank, _NOT_YET) for rank in self._ranks]

    def announce_failure(self) -> None:
        """Let ranks that wait look for who failed, before the last one has come: the store may end by then."""
        self._store.set(self._key(self._me, "read"), "")
        self._store.set(self._failure, "")

    def await_readers(self) -> None:
        """Return once every other rank has read that this one failed, or after a while."""
        with suppress(Exception):
            self._store.wait([self._key(rank, "read") for rank in self._ranks], timedelta(seconds=_FAREWELL_S))

    def without_store(self) -> RankMismatchError:
        """What to raise where the store is gone."""
        return RankMismatchError(
            f"The store of the ranks ended while rank {self._me} waited for ranks {self._missing()} to shard their "
            "model: the process that hosts it is gone, rank 0's unless the launcher has it. Look for the first error "
            "in its log."
        )

    def _key(self, rank: int, kind: str = "report", turn: int | None = None) -> str:
        return f"{self._scope}/{self._turn if turn is None else turn}/{kind}/{rank}"

    @property
    def _failure(self) -> str:
        return f"{self._scope}/{self._turn}/failure"

    def _missing(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self._reports]

    def _read(self, ranks: Sequence[int]) -> None:
        """Take the reports of those of ``ranks`` that have come."""
        for rank in ranks:
            if self._store.check([self._key(rank)]):
                self._reports[rank] = self._store.get(self._key(rank)).decode()


def _compare(everyone: list[list[Any]], mine: list[Any], rank: int) -> None:
    failures = [f"  rank {rank}: {what[1]}" for rank, what in enumerate(everyone) if what[0] == _FAILED]
    if failures:
        raise RankMismatchError("Sharding failed on other ranks, so it was given up here too:\n" + "\n".join(failures))
    difference = told([what[1] for what in everyone], mine[1], rank)
    if difference is not None:
        raise RankMismatchError(difference)
