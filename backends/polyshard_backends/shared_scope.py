"""How memory is allocated that eager steps and captured ones share."""

from __future__ import annotations

from types import TracebackType

import torch

from . import _torch_private


class SharedScope:
    """Allocations inside come from ``pool``. May be entered again and again, not nested.

    Only for allocations: an operation inside would run on a stream that nothing waits for.

    [Note: homes]
    Memory of the pool is allocated under a *home*: a stream on which nothing runs, one for each stream that
    allocates. The allocator gives what one stream freed back to that stream alone, and so it does with homes. But
    whatever is allocated on a stream that is being captured comes from the graph's own memory, which is not what the
    pool's is for: registered, or mapped by other processes. A home is never captured: what is allocated under it comes
    from the pool, in a capture too.

    Args:
        pool: of memory that does not come from the usual allocator.
        index: of the CUDA device.
    """

    def __init__(self, pool: torch.cuda.MemPool, index: int) -> None:
        self._pool = pool
        self._inner = _torch_private.pool_scope(pool, index)
        self._index = index
        self._homes: dict[_torch_private.StreamKey, _torch_private.StreamKey] = {}
        self._outer: _torch_private.StreamKey = (0, index, 0)

    def share(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        """Let ``stream`` be given what ``like`` freed, and the reverse. Whoever asks orders the two."""
        self._homes[_torch_private.key_of(stream)] = self._home_of(_torch_private.key_of(like))

    def has_room(self, nbytes: int) -> bool:
        """Whether the current stream can be given ``nbytes`` that are there already. Looks at the whole pool."""
        home = self._home_of(_torch_private.current_stream(self._index))
        return any(size >= nbytes for size in _torch_private.idle_blocks(self._pool, _torch_private.stream_of(home)))

    def __enter__(self) -> None:
        outer = _torch_private.current_stream(self._index)
        home = self._home_of(outer)
        # First: where torch refuses, the current stream must not be one that nothing waits for.
        self._inner.__enter__()
        self._outer = outer
        _torch_private.set_stream(home)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _torch_private.set_stream(self._outer)
        self._inner.__exit__(kind, error, at)

    def _home_of(self, key: _torch_private.StreamKey) -> _torch_private.StreamKey:
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = self._unused_home() or key
        return home

    def _unused_home(self) -> _torch_private.StreamKey | None:
        # torch hands streams out in turns, to other scopes as well: one that came up before would let two streams have
        # each other's memory. Where all came up, a stream is a home of its own, which only a capture makes less of.
        for _ in range(_torch_private.UNUSED_STREAMS):
            home = _torch_private.key_of(_torch_private.unused_stream(self._index))
            if home not in self._homes.values():
                return home
        return None


class ZeroedScope(SharedScope):
    """``SharedScope`` of a pool whose new segments are zeroed on the legacy default stream.

    torch's own streams do not wait for that one: what a gather wrote into its slice meanwhile would be overwritten by
    zeros. What is allocated inside may be written on the current stream as soon as the scope is left.
    """

    def __init__(self, pool: torch.cuda.MemPool, index: int) -> None:
        super().__init__(pool, index)
        self._segments = self._count()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        made = self._count()
        if made != self._segments:
            self._segments = made
            # In a capture, which is given no new segment of this pool, those that are new are others'.
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(self._index).wait_stream(torch.cuda.default_stream(self._index))

    def _count(self) -> int:
        made: int = torch.cuda.memory_stats_as_nested_dict(self._index)["segment"]["all"]["allocated"]
        return made
