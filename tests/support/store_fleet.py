"""Many ranks that meet through one real TCP store, with what each of them asks of it counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import pytest
import torch.distributed as dist
from polyshard import _torch_private

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
