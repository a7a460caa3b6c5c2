"""Ranks compare what they are about to do before the first collective, and fail together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from .engine import _torch_private
from .errors import RankMismatchError
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

    The launcher's store serves where there is one, so that a rank whose backend could not be loaded reports too;
    otherwise the backend itself does. Backends that cannot communicate stand alone.

    Raises:
        RankMismatchError: another rank failed, or reports something else.
    """
    speaks = collectives is None or collectives.capabilities.can_communicate
    message = json.dumps([_READY, report] if error is None else [_FAILED, f"{type(error).__name__}: {error}"])
    everyone: list[str] | None = None
    store = _torch_private.default_store() if speaks else None
    if store is not None and (collectives is None or collectives.process_group is not None):
        group = process_group if isinstance(process_group, torch.distributed.ProcessGroup) else None
        ranks = torch.distributed.get_process_group_ranks(group)
        everyone = _through_store(store, ranks, message, error is not None, timeout)
    elif speaks and collectives is not None:
        everyone = list(collectives.all_gather_object(message))
    if error is not None:
        raise error
    if everyone is not None:
        _compare([json.loads(text) for text in everyone], json.loads(message))


def _through_store(
    store: Any, ranks: Sequence[int], message: str, failed: bool, timeout: timedelta
) -> list[str] | None:
    me = torch.distributed.get_rank()
    scope = "polyshard/" + ",".join(map(str, ranks))
    # Each rank counts its own wraps in the store: the n-th of one rank is compared with the n-th of the others.
    turn = store.add(f"{scope}/wraps/{me}", 1)
    store.set(f"{scope}/{turn}/{me}", message)
    if failed:
        # The others read this and raise; there is nothing to wait for.
        return None
    keys = [f"{scope}/{turn}/{rank}" for rank in ranks]
    try:
        store.wait(keys, timeout)
    except Exception as error:
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise RankMismatchError(
            f"Ranks {missing} did not come to shard their model within {timeout.total_seconds():.0f} s, rank {me} "
            "waited. "
            "Let every rank shard the same model; see the other ranks' logs."
        ) from error
    return [store.get(key).decode() for key in keys]


def _compare(everyone: list[list[Any]], mine: list[Any]) -> None:
    failures = [f"  rank {rank}: {what[1]}" for rank, what in enumerate(everyone) if what[0] == _FAILED]
    if failures:
        raise RankMismatchError("Sharding failed on other ranks, so it was given up here too:\n" + "\n".join(failures))
    different = [rank for rank, what in enumerate(everyone) if what != mine]
    if not different:
        return
    other = different[0]
    lines = [
        f"  here: {ours!r}\n  rank {other}: {theirs!r}"
        for ours, theirs in zip(mine[1], everyone[other][1], strict=False)
        if ours != theirs
    ] or [f"  here: {len(mine[1])} entries\n  rank {other}: {len(everyone[other][1])} entries"]
    raise RankMismatchError(
        f"Ranks {different} are about to shard differently:\n{lines[0]}\n"
        "Give every rank the same model, configuration and installed plugins."
    )
