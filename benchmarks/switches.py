"""The mechanisms of the engine's fast path, and what runs in the place of each while it is switched off.

A switch is a setting where there is one. Otherwise it replaces a constant or a function of the engine or of its NCCL
backend: names of which nothing is promised, so that each must exist, and a test says of each what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from unittest import mock

import torch

#: What has every mechanism, and what has every mechanism once more: their ratio is what noise alone makes.
WHOLE, AGAIN = "nothing", "nothing, again"


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One thing that can be switched off."""

    name: str
    off: str
    """What runs in its place."""
    eager: tuple[str, ...] = ()
    """The workloads whose eager steps it takes part in."""
    captured: tuple[str, ...] = ()
    """Those whose captured steps it takes part in."""
    setting: str = ""
    """The setting that switches it off, as a peer's name has it."""
    switch: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Switches it off while the model is built and steps."""
    needs_cuda: bool = False

    def acts_in(self, workload: str, captured: bool, device_type: str) -> bool:
        """Whether it has anything to do, where that is known."""
        if device_type != "cuda" and (captured or self.needs_cuda):
            return False
        return workload not in _KNOWN or workload in (self.captured if captured else self.eager)


@contextmanager
def _replaced(*changes: tuple[object, str, object]) -> Iterator[None]:
    """Other attributes for a while: (owner, name, value). Raises ``AttributeError`` where an owner has no such name."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _no_lending() -> AbstractContextManager[None]:
    from polyshard.runtime.bindings import Bindings, ShardedParameter
    from polyshard.setup import build

    def refusing(self: Bindings, index: int, parameter: Any) -> torch.Tensor:
        return ShardedParameter.of(parameter)

    return _replaced((Bindings, "_stand_in", refusing), (build, "LazyParameters", dict))


def _no_stand_ins() -> AbstractContextManager[None]:
    from polyshard.runtime.bindings import Bindings, Shown

    def hide(self: Bindings, computing: bool) -> None:
        self.show(Shown.ORIGINALS)

    return _replaced((Bindings, "hide", hide))


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

    def here(self: CudaStreams) -> None:
        return None

    return _replaced((CudaStreams, "here", here))


def _no_kernel() -> AbstractContextManager[None]:
    from polyshard_backends import nccl

    def none() -> None:
        return None

    return _replaced((nccl, "_find_mean_of_rows", none))


class _EagerScope:
    """A pool for eager steps alone: what a captured one allocates is the graph's, and not registered."""

    def __init__(self, pool: torch.cuda.MemPool, index: int) -> None:
        from polyshard_backends import _torch_private

        self._inner = _torch_private.pool_scope(pool, index)

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


_KNOWN = ("host", "300m", "1b")
_LARGE = ("300m", "1b")
_SMALL = ("host", "300m")

#: In host nothing is large enough for what is for large tensors; in 1b nothing waits for the host or for neighbours.
MECHANISMS = (
    Mechanism(AGAIN, "the same", _KNOWN, _KNOWN),
    Mechanism("split root", "embedding and tail in the root's unit", _LARGE, _LARGE, "split_root=false"),
    Mechanism("lending", "a stand-in that refuses, for parts as well", ("300m",), switch=_no_lending),
    Mechanism("stand-ins", "modules see 1-D pieces outside of their unit's compute", _SMALL, switch=_no_stand_ins),
    Mechanism("direct weight gradients", "one more copy of each", _LARGE, _LARGE, switch=_no_direct_gradients),
    Mechanism("embedding not gathered", "gathered for its backward", _LARGE, _LARGE, switch=_embeddings_gathered),
    Mechanism("kept at the turn", "released and gathered again", _LARGE, ("1b",), switch=_no_turning_unit),
    Mechanism("batched gathers", "a launch for each unit", _SMALL, _SMALL, switch=_single_gathers),
    Mechanism(
        "merged reductions",
        "small units grouped, as medium ones are",
        ("host",),
        ("host",),
        switch=lambda: _buckets("MERGED_NBYTES"),
    ),
    Mechanism(
        "grouped reductions",
        "medium units reduced one by one",
        ("300m",),
        ("300m",),
        switch=lambda: _buckets("GROUPED_NBYTES"),
    ),
    Mechanism(
        "buckets",
        "every unit reduced by itself",
        ("host",),
        ("host",),
        switch=lambda: _buckets("MERGED_NBYTES", "GROUPED_NBYTES"),
    ),
    Mechanism("held gradients", "copied where they were computed", _LARGE, _LARGE, switch=_nothing_held),
    Mechanism(
        "gradients in compute's pool", "in a pool of their own", _LARGE, switch=_gradients_apart, needs_cuda=True
    ),
    Mechanism(
        "registered memory",
        "plain memory for gathers",
        _LARGE,
        _LARGE,
        "collectives=nccl:collectives__registered=false",
        needs_cuda=True,
    ),
    Mechanism(
        "shared pool",
        "registered memory in eager steps alone, under their own streams",
        _LARGE,
        _LARGE,
        switch=_no_shared_pool,
        needs_cuda=True,
    ),
    Mechanism("mean kernel", "torch.mean", _LARGE, _LARGE, switch=_no_kernel, needs_cuda=True),
    Mechanism("places", "all compute on one stream", _SMALL, switch=_no_places),
)
