"""What ranks ask of the launcher's store to shard: as much for thousands of them as for four, and told who differs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from polyshard import ShardConfig, assembly
from polyshard.agreement import Meeting
from polyshard.errors import RankMismatchError
from processes import forking_context
from store_fleet import Traffic, hold_meetings, on_fleet, tcp_store
from torch import nn

LAYERS = 200
#: At most, for a rank that shards so many layers; the first figure counts requests, the second bytes.
REQUESTS, NBYTES, KEY = 40, 4096, 200


def config(rank: int, world_size: int, **others: Any) -> ShardConfig:
    return ShardConfig(
        collectives={"name": "fake", "rank": rank, "world_size": world_size},
        policy={"name": "module_class", "classes": [nn.Linear]},
        **others,
    )


def tower() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4, device="meta") for _ in range(LAYERS)))


def shard_on_all(world_size: int, monkeypatch: pytest.MonkeyPatch) -> list[Traffic]:
    # Made before there are threads, which draw random numbers from one generator.
    models = [tower() for _ in range(world_size)]

    def body(rank: int) -> None:
        polyshard.shard(models[rank], config(rank, world_size))

    return [traffic for _, traffic in on_fleet(world_size, body, monkeypatch)]


def require_little(found: Sequence[Traffic]) -> None:
    assert max(each.requests for each in found) <= REQUESTS
    assert max(each.nbytes for each in found) <= NBYTES
    assert max(each.longest_key for each in found) <= KEY


def test_a_rank_asks_no_more_of_the_store_where_there_are_more_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {size: shard_on_all(size, monkeypatch) for size in (2, 4, 16)}
    for traffic in found.values():
        require_little(traffic)
    most = [max(each.requests for each in traffic) for traffic in found.values()]
    # Three agreements of five requests, and three more by the rank that comes last.
    assert max(most) <= 3 * 5 + 2 * 3


@pytest.mark.nightly
def test_a_rank_asks_no_more_of_the_store_among_hundreds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {size: shard_on_all(size, monkeypatch) for size in (16, 64, 256)}
    for size, traffic in found.items():
        require_little(traffic)
        most = max(traffic, key=lambda each: each.requests)
        print(f"{size} ranks: at most {most.requests} requests, {max(each.nbytes for each in traffic)} bytes")


def test_who_differs_is_told_to_all_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {3: {"batch_nbytes": 64}, 5: {"batch_nbytes": 64, "backward_prefetch": 3}, 6: {"batch_nbytes": 64}}

    def body(rank: int) -> str:
        with pytest.raises(RankMismatchError) as caught:
            polyshard.shard(nn.Linear(4, 4, device="meta"), config(rank, 8, **settings.get(rank, {})))
        return str(caught.value)

    texts = {text for text, _ in on_fleet(8, body, monkeypatch)}
    assert len(texts) == 1
    text = texts.pop()
    assert text.startswith(
        "Ranks [3, 6] are about to shard differently:\n"
        "  rank 0: ['batch_nbytes', 134217728]\n"
        "  rank 3: ['batch_nbytes', 64]\n"
        "Ranks [5] are about to shard differently:\n"
        "  rank 0: ['backward_prefetch', 1]\n"
        "  rank 5: ['backward_prefetch', 3]\n"
        "  rank 0: ['batch_nbytes', 134217728]\n"
        "  rank 5: ['batch_nbytes', 64]\n"
    )


def test_a_rank_that_comes_too_late_and_all_may_call_again(monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()

    def body(rank: int) -> str:
        if rank == 2:
            late.wait(20)
        with pytest.raises(RankMismatchError) as caught:
            polyshard.shard(nn.Linear(4, 4, device="meta"), config(rank, 4, timeout_s=1.0))
        late.set()
        polyshard.shard(nn.Linear(4, 4, device="meta"), config(rank, 4, timeout_s=20))
        return str(caught.value)

    texts = {text for text, _ in on_fleet(4, body, monkeypatch)}
    assert len(texts) == 1
    assert texts.pop().startswith("Ranks [2] did not come to shard their model within 1 s, rank ")


class Block(nn.Module):
    """One of Llama 3 8B: the shapes are what is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4096, 4096, bias=False)
        self.k = nn.Linear(4096, 1024, bias=False)
        self.v = nn.Linear(4096, 1024, bias=False)
        self.o = nn.Linear(4096, 4096, bias=False)
        self.gate = nn.Linear(4096, 14336, bias=False)
        self.up = nn.Linear(4096, 14336, bias=False)
        self.down = nn.Linear(14336, 4096, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(4096) for _ in range(2))


def report_of_8b(world_size: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a rank of so many reports of a model as large."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(128256, 4096), *(Block() for _ in range(32)), nn.Linear(4096, 128256))
    reports: list[list[Any]] = []
    with monkeypatch.context() as patched:
        patched.setattr(assembly, "stands_alone", lambda *arguments: False)
        patched.setattr(assembly, "agree", lambda report, *others: reports.append(list(report)))
        policy = {"name": "module_class", "classes": [Block]}
        polyshard.shard(model, replace(config(0, world_size), policy=policy))
    return reports[0]


def meet(report: Sequence[Any], odd: int, absent: int, size: int, store: Any, rank: int) -> str:
    """One rank's agreements: all report the same, rank ``odd`` another thing, rank ``absent`` does not come."""
    Meeting(store, range(size), rank, timedelta(seconds=900)).hold(report, None)
    traffic = replace(store.traffic)
    mine = [*report, ["batch_nbytes", 1 if rank == odd else 2]]
    with pytest.raises(RankMismatchError) as differs:
        Meeting(store, range(size), rank, timedelta(seconds=900)).hold(mine, None)
    if rank == absent:
        return str(differs.value)
    with pytest.raises(RankMismatchError) as missing:
        Meeting(store, range(size), rank, timedelta(seconds=60)).hold(report, None)
    store.traffic = traffic
    return f"{differs.value}\n{missing.value}"


def hold(ranks: range, size: int, port: int, report: Sequence[Any]) -> list[tuple[str, Traffic]]:
    return hold_meetings(ranks, size, port, partial(meet, report, size // 3, size // 2, size))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sixteen_thousand_ranks_agree_and_are_told_who_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    size, parts = 16_384, 8
    report = report_of_8b(size, monkeypatch)
    with tcp_store() as port, forking_context().Pool(parts) as pool:
        share = size // parts
        calls = [(range(part * share, (part + 1) * share), size, port, report) for part in range(parts)]
        found = [each for part in pool.starmap(hold, calls) for each in part]
    assert len(found) == size
    require_little([traffic for _, traffic in found])
    assert all(f"Ranks [{size // 3}] are about to shard differently" in text for text, _ in found)
    assert all(f"rank {size // 3}: ['batch_nbytes', 1]" in text for text, _ in found)
    assert sum(f"Ranks [{size // 2}] did not come" in text for text, _ in found) == size - 1
