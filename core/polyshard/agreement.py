"""Ranks compare what they are about to do before the first collective, and fail together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from .engine import _torch_private
from .engine.values import VALUES, refusal
from .errors import RankMismatchError
from .fingerprint import first_difference
from .interfaces import Collectives

#: How each rank's report starts in the store: everything went well, or it raised.
_READY, _FAILED = "ready", "failed"


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
    message = json.dumps([_READY, report] if error is None else [_FAILED, f"{type(error).__name__}: {error}"])
    everyone: list[str] | None = None
    store = _store_of(collectives, process_group)
    if store is not None:
        group = process_group if isinstance(process_group, torch.distributed.ProcessGroup) else None
        ranks = torch.distributed.get_process_group_ranks(group)
        everyone = _through_store(store, ranks, message, error, timeout)
    elif collectives is not None and collectives.capabilities.can_communicate:
        everyone = list(collectives.all_gather_object(message))
    if error is not None:
        raise error
    if everyone is not None:
        # Without collectives there is an error.
        assert collectives is not None
        _compare([json.loads(text) for text in everyone], json.loads(message), collectives.rank)


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
    store: Any, ranks: Sequence[int], message: str, failure: Exception | None, timeout: timedelta
) -> list[str] | None:
    me = torch.distributed.get_rank()
    scope = "polyshard/" + ",".join(map(str, ranks))
    try:
        # Each rank counts its own reports in the store: the n-th of one rank is compared with the n-th of the others.
        turn = store.add(f"{scope}/wraps/{me}", 1)
        store.set(f"{scope}/{turn}/{me}", message)
        if failure is not None:
            # The others read this and raise; there is nothing to wait for.
            return None
        keys = [f"{scope}/{turn}/{rank}" for rank in ranks]
        missing = _wait_for(store, keys, timeout)
        if missing:
            raise RankMismatchError(
                f"Ranks {[ranks[index] for index in missing]} did not come to shard their model within "
                f"{timeout.total_seconds():.0f} s, rank {me} waited. "
                "Let every rank shard the same model; see the other ranks' logs. One that shards by itself, with "
                "collectives that only pretend, needs check_ranks=False."
            )
        return [store.get(key).decode() for key in keys]
    except RankMismatchError:
        raise
    except Exception as error:
        if failure is not None:
            return None
        raise RankMismatchError(
            f"The launcher's store, through which ranks compare what they shard, could not be reached from rank {me}: "
            f"{error}. The rank that holds it, usually rank 0, has probably failed: see its log."
        ) from error


def _wait_for(store: Any, keys: Sequence[str], timeout: timedelta) -> list[int]:
    """Wait until all ``keys`` are set; returns the indices of those that are not after ``timeout``."""
    try:
        store.wait(list(keys), timeout)
    except Exception:
        missing = [index for index, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        return missing
    return []


def _compare(everyone: list[list[Any]], mine: list[Any], rank: int) -> None:
    failures = [f"  rank {rank}: {what[1]}" for rank, what in enumerate(everyone) if what[0] == _FAILED]
    if failures:
        raise RankMismatchError("Sharding failed on other ranks, so it was given up here too:\n" + "\n".join(failures))
    different = [rank for rank, what in enumerate(everyone) if what != mine]
    if not different:
        return
    other = different[0]
    first = next(((a, b) for a, b in zip(mine[1], everyone[other][1], strict=False) if a != b), None)
    if first is not None and first[0][0] == first[1][0] == VALUES and first[0][1] == first[1][1]:
        raise RankMismatchError(refusal(rank, different, *first))
    here, there = first_difference(mine[1], everyone[other][1]) or (
        f"{len(mine[1])} entries",
        f"{len(everyone[other][1])} entries",
    )
    raise RankMismatchError(
        f"Ranks {different} are about to shard differently:\n  here: {here}\n  rank {other}: {there}\n"
        "Give every rank the same model, configuration and installed plugins. Options that must differ between ranks "
        "are named in local_options of the plugin."
    )
