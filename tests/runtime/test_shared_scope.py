"""Under which stream memory of a shared pool is allocated, on a pretended device; GPU twin: ``gpu/test_capture``."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from polyshard_backends import _torch_private
from polyshard_backends.nccl import SharedScope
from polyshard_backends.symmetric import ZeroedScope


class Stream(NamedTuple):
    stream_id: int
    device_index: int = 0
    device_type: int = 1

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, other: Stream) -> None:
        DEVICE.waits.append((self.stream_id, other.stream_id))


class Device:
    """Serves allocations as torch's allocator does: a freed block goes back to the stream that it was given to."""

    def __init__(self) -> None:
        self.current = Stream(0)
        self.capturing: set[int] = set()
        self.pooled = False
        self.streams = 0
        self.segments = 0
        self.idle: Counter[tuple[int, int]] = Counter()
        self.waits: list[tuple[int, int]] = []

    def allocate(self, nbytes: int) -> tuple[str, int, int]:
        """Whose memory ``nbytes`` come from, under which stream, and how many they are."""
        key = self.current.stream_id, nbytes
        if self.current.stream_id in self.capturing:
            return "graph", *key
        if not self.pooled:
            return "usual", *key
        if self.idle[key]:
            self.idle[key] -= 1
        else:
            self.segments += 1
        return "shared", *key

    def free(self, block: tuple[str, int, int]) -> None:
        self.idle[block[1:]] += 1

    def unused_stream(self, index: int) -> Stream:
        self.streams += 1
        return Stream(100 + self.streams % _torch_private.UNUSED_STREAMS)


DEVICE = Device()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    DEVICE.__init__()  # type: ignore[misc]

    class Pool:
        def __enter__(self) -> None:
            if DEVICE.pooled:
                raise RuntimeError("already recording to mempool_id")
            DEVICE.pooled = True

        def __exit__(self, *_: object) -> None:
            DEVICE.pooled = False

    def set_stream(key: _torch_private.StreamKey) -> None:
        DEVICE.current = Stream(*key)

    def statistics(index: int) -> dict[str, Any]:
        return {"segment": {"all": {"allocated": DEVICE.segments}}}

    def idle_blocks(pool: None, stream: Stream) -> list[int]:
        return [nbytes for (owner, nbytes), count in DEVICE.idle.items() if owner == stream.stream_id and count]

    monkeypatch.setattr(_torch_private, "PoolScope", lambda pool, index: Pool())
    monkeypatch.setattr(_torch_private, "current_stream", lambda index: tuple(DEVICE.current))
    monkeypatch.setattr(_torch_private, "stream_of", lambda key: Stream(*key))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: DEVICE.current)
    monkeypatch.setattr(_torch_private, "unused_stream", DEVICE.unused_stream)
    monkeypatch.setattr(_torch_private, "idle_blocks", idle_blocks)
    monkeypatch.setattr(_torch_private, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: Stream(0))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: DEVICE.current.stream_id in DEVICE.capturing)
    return DEVICE


def taken(scope: SharedScope, stream: int, nbytes: int) -> tuple[str, int, int]:
    """An allocation inside ``scope`` on a stream, which is the current one again behind it."""
    DEVICE.current = Stream(stream)
    with scope:
        block = DEVICE.allocate(nbytes)
    assert DEVICE.current == Stream(stream)
    return block


def test_a_stream_gets_back_what_it_freed_and_nothing_of_another(device: Device) -> None:
    scope = ZeroedScope(None, 0)  # type: ignore[arg-type]
    first = taken(scope, 7, 64)
    other = taken(scope, 8, 64)
    assert first[0] == other[0] == "shared"
    assert first[1] != other[1]
    device.free(first)
    assert taken(scope, 8, 64) != first
    assert taken(scope, 7, 64) == first
    assert device.segments == 3


def test_allocation_streams_stay_apart_where_torch_hands_out_the_same_streams_again(device: Device) -> None:
    scope = SharedScope(None, 0)  # type: ignore[arg-type]
    first = taken(scope, 7, 64)
    device.free(first)
    for _ in range(_torch_private.UNUSED_STREAMS - 1):
        device.unused_stream(0)
    assert taken(scope, 8, 64)[1] != first[1]
    # As many streams as allocate: those that are left allocate under themselves.
    allocating = {taken(scope, 1000 + number, 64)[1] for number in range(2 * _torch_private.UNUSED_STREAMS)}
    assert len(allocating | {first[1]}) == 2 * _torch_private.UNUSED_STREAMS + 1


def test_new_memory_is_waited_for_where_it_is_used_and_old_memory_is_not(device: Device) -> None:
    scope = ZeroedScope(None, 0)  # type: ignore[arg-type]
    block = taken(scope, 7, 64)
    assert device.waits == [(7, 0)]
    device.free(block)
    taken(scope, 7, 64)
    assert device.waits == [(7, 0)]


def test_a_capture_is_given_what_the_steps_before_it_left_free(device: Device) -> None:
    scope = ZeroedScope(None, 0)  # type: ignore[arg-type]
    gathered, filled = taken(scope, 7, 64), taken(scope, 8, 32)
    device.free(gathered)
    device.free(filled)
    # The step that was warmed up on stream 8 is captured on 9, and gathers on 7 as before.
    scope.share(Stream(9), Stream(8))  # type: ignore[arg-type]
    device.capturing = {7, 9}
    made, waits = device.segments, list(device.waits)
    device.segments += 5  # What the graph's own pool takes.
    for stream, block in ((7, gathered), (9, filled)):
        device.current = Stream(stream)
        assert scope.has_room(block[2])
        assert not scope.has_room(block[2] + 1)
        assert taken(scope, stream, block[2]) == block
        assert not scope.has_room(block[2])
    assert device.segments == made + 5
    # Nothing from outside may be waited for inside.
    assert device.waits == waits


def test_the_stream_is_the_same_again_after_an_allocation_that_failed(device: Device) -> None:
    scope = ZeroedScope(None, 0)  # type: ignore[arg-type]
    device.current = Stream(7)
    with pytest.raises(MemoryError), scope:
        raise MemoryError
    assert device.current == Stream(7)
    assert not device.pooled


def test_the_stream_is_the_same_where_the_pool_is_in_use_already(device: Device) -> None:
    scope = ZeroedScope(None, 0)  # type: ignore[arg-type]
    device.current, device.pooled = Stream(7), True
    with pytest.raises(RuntimeError, match="already recording"), scope:
        pass
    assert device.current == Stream(7)
