"""Every call by which a save changes a disk fails once on each rank: all ranks raise, and nothing is committed."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import polyshard
import pytest
import torch
from failing import Failing
from fault_figures import record
from polyshard import checkpoint
from polyshard.errors import PolyshardError
from polyshard_testing import Rank, RankProcesses
from program import Block, build

RANKS = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(RANKS) as processes:
        yield processes


def attempt(
    joined: Rank, root: Path, victim: int, number: int | None, code: int, behind: bool, lasts: bool
) -> tuple[int, int, str, str, bool]:
    """Save step 1, then step 2 with a failing call on ``victim``, train on, and save step 3.

    Returns how many calls there were and failed, what was raised, the newest checkpoint then, and whether a later save
    worked.
    """
    model = polyshard.shard(
        build(), polyshard.ShardConfig(policy={"name": "module_class", "classes": [Block]}, timeout_s=8.0)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    checkpoint.save(root, 1, model, optimizer)
    failing = Failing(number if joined.rank == victim else None, code, lasts=lasts)
    raised = ""
    with failing.installed():
        try:
            if behind:
                checkpoint.async_save(root, 2, model, optimizer).result(timeout=3.0)
            else:
                checkpoint.save(root, 2, model, optimizer, keep=2)
        except (OSError, PolyshardError) as error:
            raised = f"{type(error).__name__}: {error}"
    torch.distributed.barrier()
    newest = checkpoint.latest(root, verify=True)
    optimizer.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    try:
        later = checkpoint.save(root, 3, model, optimizer)
    except (OSError, PolyshardError) as error:
        # What the background left to be told: on all ranks alike.
        if not behind:
            raise
        raised = raised if raised and "has not ended yet" not in raised else f"{type(error).__name__}: {error}"
        newest = checkpoint.latest(root, verify=True)
        later = checkpoint.save(root, 3, model, optimizer)
    checkpoint.verify(later)
    polyshard.close(model)
    return failing.calls, failing.failed, raised, "" if newest is None else newest.name, later.name == "step-00000003"


def fail_everywhere(ranks: RankProcesses, root: Path, codes: list[int], stride: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    turn = 0
    for behind in (False, True):
        plain = ranks.run(partial(attempt, root=root / f"plain-{behind}", victim=0, number=None, code=0, behind=behind,
                                  lasts=False))  # fmt: skip
        assert all(raised == "" and newest == "step-00000002" for _, _, raised, newest, _ in plain)
        for victim in range(RANKS):
            for number in range(0, plain[victim][0], stride):
                for code in codes:
                    turn += 1
                    call = partial(attempt, root=root / str(turn), victim=victim, number=number, code=code,
                                   behind=behind, lasts=code == errno.ENOSPC)  # fmt: skip
                    answers = ranks.run(call)
                    where = (behind, victim, number, os.strerror(code), answers)
                    assert answers[victim][1] >= 1, where
                    committed = {newest for _, _, _, newest, _ in answers}
                    assert len(committed) == 1, where
                    assert all(works for *_, works in answers), where
                    if committed == {"step-00000002"}:
                        # Behind the commit: what failed was cleaning up, or what nobody needs.
                        outcomes["committed all the same"] += 1
                        continue
                    assert committed == {"step-00000001"}, where
                    assert all(os.strerror(code) in raised for _, _, raised, _, _ in answers), where
                    outcomes["raised on all ranks"] += 1
    return outcomes


@pytest.mark.slow
def test_some_failing_calls(ranks: RankProcesses, tmp_path: Path) -> None:
    assert fail_everywhere(ranks, tmp_path, [errno.ENOSPC], stride=17)["raised on all ranks"] >= 3


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_every_failing_call(ranks: RankProcesses, tmp_path: Path) -> None:
    outcomes = fail_everywhere(ranks, tmp_path, [errno.ENOSPC, errno.EIO], stride=1)
    record("writes", calls=outcomes.total(), **{name.replace(" ", "_"): count for name, count in outcomes.items()})


def limited(joined: Rank, root: Path) -> tuple[str, str]:
    """A save where files may have 8 KiB at most, by the system's own limit."""
    model = polyshard.shard(build(), polyshard.ShardConfig(policy={"name": "module_class", "classes": [Block]}))
    wide = torch.nn.Linear(300, 300)
    checkpoint.save(root, 1, model)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    raised = ""
    try:
        checkpoint.save(root, 2, model, extra={"wide": wide.weight.detach()})
    except (OSError, PolyshardError) as error:
        raised = type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    newest = checkpoint.latest(root, verify=True)
    assert newest is not None
    polyshard.close(model)
    return raised, newest.name


@pytest.mark.slow
def test_a_real_limit_of_the_system(ranks: RankProcesses, tmp_path: Path) -> None:
    found = ranks.run(partial(limited, root=tmp_path))
    assert [newest for _, newest in found] == ["step-00000001"] * RANKS
    assert all(raised for raised, _ in found), found
