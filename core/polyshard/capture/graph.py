"""CUDA graphs: records a function once, and replays it.

[Note: memory of a recorded step]
Memory that a step allocates while it is recorded comes from a pool of the graph: activations, gradients, and gather
buffers, which get their memory in the step and lose it there. Only the graph allocates from the pool, so that a replay
may write to it, whatever Python holds by then. Memory that the graph takes from outside must stay where it is: masters,
the optimizer's state, the static inputs. So buffers that have memory before the recording are released first.

A backend may give gather buffers and the inputs of reductions other memory, which eager steps have left free:
registered memory, or memory that other processes map, is not the graph's. So buffers are released before each replay
too. A replay is ordered behind the streams of eager gathers and reductions, as theirs are behind it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from .. import _torch_private
from ..errors import CaptureError
from ..interfaces import Collectives
from ..nested import iter_tensors

T = TypeVar("T")


@dataclass(eq=False)
class Recording(Generic[T]):
    graph: torch.cuda.CUDAGraph
    outputs: T
    device: torch.device

    def replay(self) -> T:
        """Run it once more, on the current stream; returns its outputs, the same tensors every time."""
        self.graph.replay()
        return self.outputs

    def close(self) -> None:
        """Free its memory, once it no longer runs."""
        torch.cuda.synchronize(self.device)
        self.graph.reset()


class Capturer:
    """Runs steps so that they can be recorded, and records one."""

    def __init__(self, device: torch.device, groups: Iterable[Collectives]) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._groups = tuple(groups)
        # Two: memory that the warm-up leaves on its stream (a library's workspace) must not become part of the graph,
        # and the caller's may be the default stream, which records nothing.
        self._warm_up_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # PyTorch's allocators may hold on to the graph of a capture that failed.
        self._failed: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, step: Callable[[], T]) -> T:
        stream = self._warm_up_stream
        caller = torch.cuda.current_stream(self._device)
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                return step()
        finally:
            caller.wait_stream(stream)

    def record(self, step: Callable[[], T]) -> Recording[T]:
        """Record ``step``, which is called once and executes nothing.

        Raises:
            CaptureError: it returned a tensor that is not on the device.
            Exception: from ``step``. Nothing of the recording is left.
        """
        torch.cuda.synchronize(self._device)
        # Garbage freed during the recording could not be used by it, and cached memory not by its pool.
        gc.collect()
        torch.cuda.empty_cache()
        for group in self._groups:
            group.prepare_capture(self._stream, self._warm_up_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), self._undone_on_error(graph) as pool:
            # Other threads may query events meanwhile, as NCCL's watchdog does.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            outputs = step()
            for tensor in iter_tensors(outputs):
                if tensor.device != self._device:
                    raise CaptureError(
                        f"It returned a tensor on {tensor.device}, which a replay would not change. Return tensors on "
                        f"{self._device}."
                    )
            graph.capture_end()
        return Recording(graph, outputs, self._device)

    @contextmanager
    def _undone_on_error(self, graph: torch.cuda.CUDAGraph) -> Iterator[Any]:
        index = self._device.index
        generator = torch.cuda.default_generators[index]
        before = generator.clone_state()
        # A pool of a known name: that of a graph that failed cannot be asked for.
        pool = torch.cuda.graph_pool_handle()
        try:
            yield pool
        except BaseException:
            ended = False
            with warnings.catch_warnings(action="ignore"), suppress(RuntimeError):
                graph.capture_end()
                ended = True
            if ended:
                graph.reset()
            else:
                _torch_private.abandon_capture_pool(index, pool)
                # The generator still takes part in the capture, and would refuse to draw outside of it.
                generator.graphsafe_set_state(before)
                self._failed.append(graph)
            raise
