"""The mechanisms of the engine's fast path, and what runs in the place of each while it is switched off.

``polyshard:without=NAME`` is a peer that lacks one. What a setting switches off is a peer with that setting, as
``polyshard:split_root=false`` and ``polyshard:collectives=nccl:collectives__registered=false``. The others replace a
constant or a function of the engine or of its NCCL backend: names of which nothing is promised, so that each must
exist, and a test says of each what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any
from unittest import mock

import torch


@contextmanager
def _replaced(*changes: tuple[object, str, object]) -> Iterator[None]:
    """Other attributes for a while: (owner, name, value). Raises ``AttributeError`` where an owner has no such name."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _no_direct_gradients() -> AbstractContextManager[None]:
    from polyshard.runtime.unit import Unit

    return _replaced((Unit, "writes_gradients_directly", False))


def _embeddings_gathered() -> AbstractContextManager[None]:
    from polyshard.planning import units

    def always(module: Any) -> bool:
        return True

    return _replaced((units, "reads_in_backward", always))


def _no_turning_unit() -> AbstractContextManager[None]:
    from polyshard.runtime import order

    def none(module_states: Sequence[Any]) -> None:
        return None

    return _replaced((order, "_turning", none))


def _single_gathers() -> AbstractContextManager[None]:
    from polyshard.runtime import order

    def batch_ends(sizes: Sequence[int], limit: int) -> list[int]:
        return list(range(1, len(sizes) + 1))

    return _replaced((order, "batch_ends", batch_ends))


def _buckets(*names: str) -> AbstractContextManager[None]:
    from polyshard.planning import thresholds

    return _replaced(*((thresholds, name, 0) for name in names))


def _nothing_held() -> AbstractContextManager[None]:
    from polyshard.planning import thresholds

    return _replaced((thresholds, "HELD_NBYTES", -1))


def _gradients_apart() -> AbstractContextManager[None]:
    from polyshard.runtime.reduce import ReductionInput

    taken = ReductionInput.new_result

    def new_result(self: ReductionInput, numel: int) -> torch.Tensor:
        # The reduction writes behind what compute does by then, so that it may come from any stream's pool.
        with torch.cuda.stream(_gradient_stream(self.device)):
            return taken(self, numel)

    return _replaced((ReductionInput, "new_result", new_result))


def _gradient_stream(device: torch.device) -> torch.cuda.Stream:
    stream = _GRADIENT_STREAMS.get(device)
    if stream is None:
        stream = _GRADIENT_STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


# Nothing runs on them: memory is allocated under them.
_GRADIENT_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _no_places() -> AbstractContextManager[None]:
    from polyshard.runtime.streams import CudaStreams

    def current(self: CudaStreams) -> None:
        return None

    return _replaced((CudaStreams, "current", current))


def _no_kernel() -> AbstractContextManager[None]:
    from polyshard_backends import nccl

    def none(dtype: torch.dtype, world_size: int, device_index: int) -> None:
        return None

    return _replaced((nccl, "mean_of_rows", none))


class _EagerScope:
    """A pool for eager steps alone: what a captured one allocates is the graph's, and not registered."""

    def __init__(self, pool: torch.cuda.MemPool, index: int) -> None:
        from polyshard_backends import _torch_private

        self._inner = _torch_private.PoolScope(pool, index)

    def share(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        """Nothing is shared."""

    def has_room(self, nbytes: int) -> bool:
        """Whether a captured step may have ``nbytes``: never."""
        return False

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, at)


def _no_shared_pool() -> AbstractContextManager[None]:
    from polyshard_backends import nccl

    return _replaced((nccl, "SharedScope", _EagerScope))


#: By name, a context in which the mechanism is switched off, for building a model and for its steps. "nothing" is the
#: engine as it is once more: what noise alone makes.
SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    # One more copy of each.
    "direct-weight-gradients": _no_direct_gradients,
    # Embeddings are gathered for their backward.
    "embedding-not-gathered": _embeddings_gathered,
    # Released and gathered again.
    "kept-at-the-turn": _no_turning_unit,
    # A launch for each unit.
    "batched-gathers": _single_gathers,
    # Small units are grouped, and each segment is reduced by itself.
    "merged-reductions": lambda: _buckets("MERGED_NBYTES", "SIDE_BY_SIDE_NBYTES"),
    # Medium units are reduced one by one.
    "grouped-reductions": lambda: _buckets("GROUPED_NBYTES"),
    # Every unit is reduced by itself.
    "buckets": lambda: _buckets("MERGED_NBYTES", "GROUPED_NBYTES"),
    # Copied where they were computed.
    "held-gradients": _nothing_held,
    # In a pool of their own; CUDA alone, as are the next two.
    "gradients-in-computes-pool": _gradients_apart,
    # Registered memory in eager steps alone, under their own streams.
    "shared-pool": _no_shared_pool,
    # ``torch.mean``.
    "mean-kernel": _no_kernel,
    # All compute on one stream.
    "places": _no_places,
}
