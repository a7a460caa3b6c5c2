"""Recording of a training step in a CUDA graph, and checks that the engine is still as the graph recorded it.

[Note: memory of a recorded step]
While a step is recorded, its allocations come from a pool that the graph owns: activations, gradients, and gather
buffers, which get their memory in the step and lose it in the step. Nothing but the graph allocates from the pool, so
that a replay may write to it, whatever tensors Python holds by then. Memory from outside must stay where it is:
masters, the optimizer's state, the static inputs. Buffers that still have memory before the recording are therefore
released first.

A backend may instead give gather buffers and the inputs of reductions memory that eager steps have freed: registered
memory, or memory that other processes map, is not the graph's. So buffers are released before each replay too, and a
replay, issued where the step was called, is ordered behind the streams of eager gathers and reductions, and these
behind it.
"""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from .. import _torch_private
from ..errors import CaptureError
from ..interfaces import Collectives
from ..nested import iter_tensors
from .root import Root
from .streams import streams_for
from .unit import Unit

T = TypeVar("T")

_address_of = torch.Tensor.data_ptr

_is_trained = attrgetter("requires_grad")

_state_of = attrgetter("state")

_master_of = attrgetter("master")

_waits = attrgetter("gradients.unreduced")


class Recording(ABC, Generic[T]):
    """A recorded step."""

    @abstractmethod
    def replay(self) -> T:
        """Run it once more, on the current stream; returns its outputs, the same tensors every time."""

    @abstractmethod
    def close(self) -> None:
        """Free its memory, once it no longer runs."""


class Capturer(ABC):
    """Runs steps so that they can be recorded, and records one."""

    def obstacle(self) -> str | None:
        """The reason why this device cannot record; None where it can."""
        return None

    def warm_up(self, step: Callable[[], T]) -> T:
        """Run ``step``."""
        return step()

    @abstractmethod
    def record(self, step: Callable[[], T]) -> Recording[T]:
        """Record ``step``, which is called once and executes nothing.

        Raises:
            CaptureError: it returned a tensor that is not on the device.
            Exception: from ``step``. Nothing of the recording is left.
        """


def capturer_for(root: Root) -> Capturer:
    """The capturer for the device of the model."""
    device = root.collectives.device
    return CudaCapturer(device, _groups(root)) if device.type == "cuda" else NoCapturer(device)


class CudaCapturer(Capturer):
    """Records CUDA graphs."""

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
        return _GraphRecording(graph, outputs, self._device)

    @contextmanager
    def _undone_on_error(self, graph: torch.cuda.CUDAGraph) -> Iterator[Any]:
        index = self._device.index
        generator = torch.cuda.default_generators[index]
        before = generator.clone_state()
        # A pool of a known name: a graph that failed does not tell its pool.
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
                # The generator of the capture still takes part in it, and would refuse to draw outside of it.
                generator.graphsafe_set_state(before)
                self._failed.append(graph)
            raise


@dataclass(eq=False)
class _GraphRecording(Recording[T]):
    graph: torch.cuda.CUDAGraph
    outputs: T
    device: torch.device

    def replay(self) -> T:
        self.graph.replay()
        return self.outputs

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.graph.reset()


class NoCapturer(Capturer):
    """For devices that cannot record."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def obstacle(self) -> str | None:
        return (
            f"The model computes on {self._device.type}, and only CUDA devices record graphs. Move it to a CUDA device."
        )

    def record(self, step: Callable[[], T]) -> Recording[T]:
        raise CaptureError(str(self.obstacle()))


def engine_obstacle(root: Root) -> str | None:
    """The reason why no step of this model can be recorded, or None: from its configuration, alike on all ranks."""
    for group in _groups(root):
        if not group.capabilities.capturable:
            return f"{type(group).__name__} cannot be recorded in a graph. Choose collectives that can, such as 'nccl'."
    for unit in root.units:
        if unit.parks:
            return (
                f"{type(unit.offload).__name__} keeps the parameters of '{unit.name}' away from the device, and the "
                "host waits for them in each step. Shard with offload='none'."
            )
        if unit.caster.capabilities.encodes:
            return (
                f"{type(unit.caster).__name__} encodes what travels, and prepares that on the host before each "
                "forward. Choose a precision that casts only."
            )
    if root.events.active or any(unit.observers for unit in root.units):
        return "The model has listeners, which a replay would not call. Shard it without listeners."
    return None


def _groups(root: Root) -> Iterable[Collectives]:
    """All groups that exchange the model's tensors, each once."""
    groups = {id(root.collectives): root.collectives}
    for unit in root.units:
        for group in (unit.grid.shard, unit.grid.replicate):
            if group is not None:
                groups[id(group)] = group
    return groups.values()


def step_obstacle(root: Root) -> str | None:
    """The reason why the next step cannot be recorded or replayed in the engine's present state, or None."""
    if not root.synchronises:
        return (
            "It was called under no_sync(). Enter no_sync() inside train_step, around the backwards that do not reduce."
        )
    if any(map(_waits, root.units)):
        return (
            "Gradients of earlier backwards under no_sync() wait to be reduced. Let train_step reduce what it computed."
        )
    return None


def prepare_engine(root: Root) -> None:
    """Prepare the engine for a recording: do the work that a forward does once, before its first operation.

    Raises:
        ParameterChangedError: a parameter was removed, or replaced by one of another shape, dtype or device.
    """
    root.take_up_changes()
    release_buffers(root)


def release_buffers(root: Root) -> None:
    """Release all gather buffers, and order the current stream after everything that was issued."""
    for unit in root.units:
        unit.reshard()
    root.streams.drain()


def reset_engine(root: Root) -> None:
    """Restore the state between steps after a recording that failed."""
    # The old streams' events belong to a recording that is gone: waiting for one would fail.
    root.use_streams(streams_for(root.collectives))
    root.abandon()


class Obstacle(NamedTuple):
    """The reason why a recorded step cannot be replayed now."""

    reason: str
    lasting: bool
    """Whether it stays so until the step is captured anew."""


class EngineWatch:
    """The engine as it was when a step was recorded, its buffers released.

    Changes are found by lists that are made and compared at C speed: a launch-bound step waits for the answer.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._module = root.module_states[0].module
        self._training = self._module.training
        self._units = list(root.units)
        self._masters = _addresses(self._units)
        self._states = list(map(_state_of, self._units))
        self._tensors = HeldTensors(self._module, [(unit.name, unit.receivers) for unit in self._units])

    @property
    def released(self) -> bool:
        """Whether no buffer has been given memory since."""
        return list(map(_state_of, self._units)) == self._states

    def obstacle(self) -> Obstacle | None:
        """The obstacle to a replay, or None."""
        reason = step_obstacle(self._root)
        if reason is not None:
            return Obstacle(reason, False)
        if self._module.training is not self._training:
            mode = "train" if self._training else "eval"
            return Obstacle(
                f"The model was in {mode} mode when the step was captured. Call {mode}() before the step.", False
            )
        if _addresses(self._units) != self._masters:
            return Obstacle("Parameters moved since the step was captured. Call reset() to capture again.", True)
        changed = self._tensors.changed()
        if changed is not None:
            return Obstacle(f"{changed} since the step was captured. Call reset() to capture again.", True)
        return None


def _addresses(units: list[Unit]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, map(_master_of, units)))


class HeldTensors:
    """Notices a tensor or a module that was replaced or added, and a tensor that was moved, frozen or unfrozen.

    Each replay checks every one. Modules' contents are compared as dicts, where identity decides at 10 ns an entry;
    addresses and ``requires_grad`` take 85 ns a parameter together: 0.1 ms a replay for a thousand parameters.
    """

    def __init__(self, module: nn.Module, others: Iterable[tuple[str, Sequence[torch.Tensor]]]) -> None:
        """``others``: named tensors beside those that ``module`` and the modules inside it hold."""
        self._sites = [
            _Site(f"{prefix}.{key}" if prefix else key, holder, key, value)
            for prefix, inner in module.named_modules()
            for holder in (inner._parameters, inner._buffers, inner._modules)
            for key, value in dict.items(holder)
        ]
        tensors = [(site, site.value) for site in self._sites if isinstance(site.value, torch.Tensor)]
        self._holders: list[dict[str, Any]] = list({id(site.holder): site.holder for site in self._sites}.values())
        self._held = list(map(dict.copy, self._holders))
        # Tensors of one element compare as equal where their values are.
        single = [(site, tensor) for site, tensor in tensors if tensor.numel() <= 1]
        self._single_holders = [site.holder for site, _ in single]
        self._single_keys = [site.key for site, _ in single]
        self._single = [tensor for _, tensor in single]
        named = {tensor: site.name for site, tensor in tensors}
        for name, several in others:
            for tensor in several:
                named.setdefault(tensor, f"flat parameter of {name}")
        self._addressed = [tensor for tensor in named if _has_address(tensor)]
        self._addresses = list(map(_address_of, self._addressed))
        self._parameters = [tensor for tensor in named if isinstance(tensor, nn.Parameter)]
        self._trained = list(map(_is_trained, self._parameters))
        self._named = named

    def changed(self) -> str | None:
        """The first change, as the begin of a sentence; None for no change."""
        if (
            differ(self._holders, self._held)
            or not all(map(is_, map(dict.get, self._single_holders, self._single_keys), self._single))
            or list(map(_is_trained, self._parameters)) != self._trained
            or list(map(_address_of, self._addressed)) != self._addresses
        ):
            return self._change_text()
        return None

    def _change_text(self) -> str:
        for name, holder, key, value in self._sites:
            if dict.get(holder, key) is not value:
                return f"'{name}' was replaced"
        for tensor, address in zip(self._addressed, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                return f"'{self._named[tensor]}' was given other data"
        for tensor, trained in zip(self._parameters, self._trained, strict=True):
            if tensor.requires_grad is not trained:
                return f"'{self._named[tensor]}' was {'frozen' if trained else 'unfrozen'}"
        return "A parameter, a buffer or a module was added to the model"


class _Site(NamedTuple):
    name: str
    holder: dict[str, Any]
    key: str
    value: torch.Tensor | nn.Module | None


def _has_address(tensor: torch.Tensor) -> bool:
    # Ignored parameters may be of any kind.
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided


def differ(these: list[Any], those: list[Any]) -> bool:
    """Whether two lists of lists or dicts hold other tensors, compared at C speed: identical tensors are equal."""
    try:
        return these != those
    except RuntimeError:
        # Two tensors were compared, so they are not the same.
        return True
