"""What ranks ask of the launcher's store, to shard and when one fails: as much for thousands of them as for four."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import polyshard
import pytest
import torch.distributed as dist
from polyshard import ShardConfig, _torch_private
from polyshard.errors import PluginContractError, RankMismatchError
from polyshard.interfaces import PolicyContext, UnitPlan, WrapPolicy
from polyshard.runtime.peers import Peers
from polyshard.setup.agree import EVERYONE, Report, StoreAgreement
from processes import start_script
from torch import nn

T = TypeVar("T")


@dataclass
class Traffic:
    """What one rank asked of the store."""

    requests: int = 0
    nbytes: int = 0
    """Of keys and values, both ways."""
    longest_key: int = 0


class CountingStore:
    """A client of a TCP store, and what went through it."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=60), wait_for_workers=False)
        self.traffic = Traffic()

    def _count(self, keys: Sequence[str], *values: str | bytes) -> None:
        self.traffic.requests += 1
        self.traffic.nbytes += sum(map(len, (*keys, *values)))
        self.traffic.longest_key = max(self.traffic.longest_key, *map(len, keys))

    def add(self, key: str, amount: int) -> int:
        self._count([key], bytes(8), bytes(8))
        return self._store.add(key, amount)

    def set(self, key: str, value: str | bytes) -> None:
        self._count([key], value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._count([key], value)
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value: bytes = self._store.compare_set(key, expected, desired)
        self._count([key], expected, desired, value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self._count(keys, *values)
        return values

    def delete_key(self, key: str) -> bool:
        self._count([key], bytes(1))
        return self._store.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        self._count(keys, bytes(1))
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count(keys, bytes(1))
        self._store.wait(keys, timeout)


@contextmanager
def tcp_store() -> Iterator[int]:
    """A store in this process; its port."""
    server = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)
    yield server.port
    del server


def on_fleet(world_size: int, body: Callable[[int], T], monkeypatch: pytest.MonkeyPatch) -> list[tuple[T, Traffic]]:
    """Call ``body(rank)`` on as many threads, each of which torch takes for a rank of a launched job."""
    own = threading.local()
    found: list[tuple[T, Traffic] | None] = [None] * world_size
    raised: list[BaseException] = []
    monkeypatch.setattr(_torch_private, "default_store", lambda: own.store)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: own.rank)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(world_size)))
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")

    with tcp_store() as port:

        def run(rank: int) -> None:
            own.rank, own.store = rank, CountingStore(port)
            try:
                found[rank] = (body(rank), own.store.traffic)
            except BaseException as error:
                raised.append(error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if raised:
        raise raised[0]
    return [each for each in found if each is not None]


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


@pytest.mark.slow
def test_a_rank_asks_no_more_of_the_store_where_there_are_more_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {size: shard_on_all(size, monkeypatch) for size in (2, 8)}
    for traffic in found.values():
        require_little(traffic)
    most = [max(each.requests for each in traffic) for traffic in found.values()]
    # Three agreements of five requests, one more at the beginning, and seven more by the rank that comes last to all.
    assert max(most) <= 1 + 3 * (5 + 7)


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


class WordlessError(Exception):
    """Its words cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def raising(module: nn.Module) -> None:
    raise WordlessError


def test_an_error_whose_words_cannot_be_had_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> str:
        initializer = raising if rank == 1 else lambda module: None
        with pytest.raises(WordlessError if rank == 1 else RankMismatchError) as caught:
            polyshard.shard(nn.Linear(4, 4, device="meta"), config(rank, 3, timeout_s=20), initializer=initializer)
        return "" if rank == 1 else str(caught.value)

    first, _, last = [text for text, _ in on_fleet(3, body, monkeypatch)]
    assert "rank 1: WordlessError, whose words cannot be told" in first
    assert last == first


def layer() -> nn.Module:
    return nn.Linear(4, 4, device="meta")


@pytest.mark.slow
def test_a_rank_that_comes_late_meets_the_others_where_they_call_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Barrier(4)

    def body(rank: int) -> list[str]:
        texts = []
        for _ in range(0 if rank == 2 else 2):
            with pytest.raises(RankMismatchError) as caught:
                polyshard.shard(layer(), config(rank, 4, timeout_s=0.3))
            texts.append(str(caught.value))
        given_up.wait(20)
        # The first call of one rank, the third of the others; and then all are even.
        for _ in range(2):
            polyshard.shard(layer(), config(rank, 4, timeout_s=20))
        return texts

    with pytest.warns(UserWarning, match=r"^Rank 2 comes to shard its model after others gave up .* up to 20 s for"):
        found = [texts for texts, _ in on_fleet(4, body, monkeypatch)]
    assert found[0] == found[1] == found[3]
    for text in found[0]:
        assert text.startswith("Ranks [2] did not come to shard their model within 0.3 s, rank ")


class Slow(WrapPolicy):
    """Answers when the others have given up."""

    def __init__(self, given_up: threading.Event, error: Exception | None = None) -> None:
        self._given_up, self._error = given_up, error

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        self._given_up.wait(20)
        if self._error is not None:
            raise self._error
        return {}


@pytest.mark.slow
# On a busy machine a rank may come when another one has given up already.
@pytest.mark.filterwarnings("ignore:Rank . comes to shard its model after others gave up")
def test_a_rank_that_comes_late_with_an_error_leaves_none_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()

    def body(rank: int) -> None:
        policy = Slow(given_up, ValueError("no file")) if rank == 2 else "never"
        words = "no file" if rank == 2 else "did not come"
        with pytest.raises(PluginContractError if rank == 2 else RankMismatchError, match=words):
            polyshard.shard(layer(), replace(config(rank, 3, timeout_s=0.3), policy=policy))
        given_up.set()
        polyshard.shard(layer(), config(rank, 3, timeout_s=20))

    on_fleet(3, body, monkeypatch)


@pytest.mark.slow
def test_a_rank_that_is_late_behind_its_plan_raises_as_the_others_and_all_may_call_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up = threading.Event()

    def body(rank: int) -> str:
        def initializer(module: nn.Module) -> None:
            if rank == 2:
                given_up.wait(20)

        with pytest.raises(RankMismatchError) as caught:
            polyshard.shard(layer(), config(rank, 3, timeout_s=1), initializer=initializer)
        given_up.set()
        polyshard.shard(layer(), config(rank, 3, timeout_s=20))
        return str(caught.value)

    texts = {text for text, _ in on_fleet(3, body, monkeypatch)}
    assert len(texts) == 1
    assert texts.pop().startswith("Ranks [2] did not come to shard their model within 1 s, rank ")


@pytest.mark.slow
def test_a_rank_that_raised_is_heard_among_thousands_at_little_cost() -> None:
    world_size = 4096
    with tcp_store() as port:
        store = CountingStore(port)
        peers = [Peers(store, "failed", rank, world_size) for rank in range(400)]
        peers[7].post_error(ValueError("no batch"), "3")
        for each in peers[8:]:
            # What `post_wait` writes, without reading.
            each.post_silence("4", 2.0, "a stack")
        store.traffic = Traffic()
        heard = peers[0].post_wait("4")
        assert store.traffic.requests <= 100
        assert store.traffic.longest_key <= KEY
    assert "Rank 7 raised ValueError: no batch" in (peers[0].raised_text(heard) or "")
    assert len(heard) <= 32


@pytest.mark.slow
def test_what_some_ranks_share_costs_each_of_them_as_little_and_leaves_nothing() -> None:
    def reported(rank: int, odd: int | None) -> Report:
        value = rank % 4 + 10 * (rank == odd)
        scoped = {f"tp {rank % 4} of 4": [["values", "up", [1], value]], f"ep {rank // 8} of 2": [["a"]]}
        return {EVERYONE: [["strategy", "full_shard"]], **scoped}

    def hold(size: int, odd: int | None = None) -> list[tuple[str, Traffic]]:
        found: dict[int, tuple[str, Traffic]] = {}

        def run(rank: int) -> None:
            stores[rank].traffic, text = Traffic(), ""
            meeting = StoreAgreement(stores[rank], range(size), rank, timedelta(seconds=20))
            try:
                meeting.meet(reported(rank, odd))
            except RankMismatchError as error:
                text = str(error)
            found[rank] = text, stores[rank].traffic

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(size)]

    with tcp_store() as port:
        stores = [CountingStore(port) for _ in range(16)]
        for size in (8, 16):
            kept = []
            for _ in range(3):
                found = hold(size)
                assert {text for text, _ in found} == {""}
                assert max(traffic.requests for _, traffic in found) <= 6 + 7
                kept.append(stores[0]._store.num_keys())
            assert kept[0] == kept[2]
        texts = {text for text, _ in hold(16, odd=6)}
    assert len(texts) == 1
    assert "'up' is the first parameter that differs, of those that are the same on tp 2 of 4." in texts.pop()


# The rank that hosts the store fails, or ends, while the others come to shard: they say so by name.

SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import polyshard

rank, world_size, port, case = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
precision = "none"
if rank == 0:
    # The others wait in the exchange by then, or come later.
    time.sleep(0 if case == "late" else 1)
    if case == "killed":
        os._exit(9)
    precision = "bf61"
elif case == "late":
    time.sleep(2)
elif case == "absent" and rank == 2:
    time.sleep(25)
    os._exit(0)
try:
    polyshard.shard(model, polyshard.ShardConfig(precision=precision, timeout_s=50))
except BaseException as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    # As a script that fails: what it hosts ends with it.
    os._exit(1)
"""


def outputs(tmp_path: Path, world_size: int, case: str, of: int) -> list[str]:
    """What the first ``of`` of ``world_size`` processes print, which all must end by themselves."""
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    written = [tmp_path / f"output{rank}" for rank in range(world_size)]
    processes = [
        start_script(script, [str(rank), str(world_size), str(port), case], environ, written[rank], tmp_path / "errors")
        for rank in range(world_size)
    ]
    try:
        for process in processes[:of]:
            process.join(60)
            assert process.exitcode is not None, (tmp_path / "errors").read_text()
        return [file.read_text() for file in written[:of]]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["waiting", "late"])
def test_the_host_of_the_store_fails(tmp_path: Path, case: str) -> None:
    texts = outputs(tmp_path, 3, case, 3)
    assert texts[0].startswith("PluginNotFoundError: ")
    for text in texts[1:]:
        assert text.startswith("RankMismatchError: Sharding failed on other ranks")
        assert "rank 0: PluginNotFoundError: " in text
        assert "'bf61'" in text


@pytest.mark.nightly
def test_a_failure_is_known_before_the_last_rank_has_come(tmp_path: Path) -> None:
    texts = outputs(tmp_path, 3, "absent", 2)
    assert texts[1].startswith("RankMismatchError: Sharding failed on other ranks")
    assert "rank 0: PluginNotFoundError: " in texts[1]


@pytest.mark.slow
def test_the_host_of_the_store_is_gone_without_a_word(tmp_path: Path) -> None:
    texts = outputs(tmp_path, 3, "killed", 3)
    for rank, text in enumerate(texts[1:], 1):
        assert text.startswith("RankMismatchError: ")
        assert f"while rank {rank} waited" in text
        assert "rank 0's unless the launcher has it" in text
        assert "The store of the ranks ended" in text
