"""Stands between polyshard and a listener, and notes what the listener does that it may not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..events import Events
from ..hookspecs import hookimpl
from ..interfaces import Listener, Observer, UnitSpec
from .communication import group_of_one, is_collective
from .module_state import ModuleState

if TYPE_CHECKING:
    from ..config import ShardConfig

#: What copies values of a device to the host to decide something.
_READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"})
#: What waits for a device, by the object that has it. Of classes written in C, the device itself tells.
_WAITS: tuple[tuple[Any, str], ...] = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.accelerator, "synchronize"),
)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations of torch while a listener runs, under the name of the call."""

    def __init__(self, watched: Watched, call: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = watched
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if is_collective(func):
            self._watched.collectives.append(f"{name} in {self._call}")
        elif name in _READS:
            self._watched.note_wait(name)
        return func(*args, **(kwargs or {}))


class Watched(Listener):
    """A listener that hands everything on to another one.

    Raises what ``Events`` does of a listener whose hooks do not fit.
    """

    api_version = 1

    def __init__(self, listener: object, device: torch.device) -> None:
        self._events = Events([("listener", listener)])
        self._device = device
        self._calls: list[str] = []
        self.collectives: list[str] = []
        """Collectives that it issued, and where."""
        self.waits: list[str] = []
        """Where it waited for the device inside a step, and by what."""
        self.changes: list[str] = []
        """What it changed of the model, and where."""

    def note_wait(self, by: str) -> None:
        """Of hooks, those of a step must not wait."""
        if self._calls and self._calls[-1] not in _AT_REST:
            self.waits.append(f"{by} in {self._calls[-1]}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note waits, and have a process group over which there could be collectives."""
        with ExitStack() as stack:
            for owner, name in _WAITS:
                stack.enter_context(mock.patch.object(owner, name, self._noting(getattr(owner, name), name)))
            stack.enter_context(group_of_one())
            yield

    def _noting(self, wait: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if not self._calls:
                return wait(*args, **kwargs)
            self.note_wait(name)
            return None

        return noting

    @contextmanager
    def inside(self, call: str, model: torch.nn.Module | None = None) -> Iterator[None]:
        """The listener runs, called by the hook or the observer's method ``call``."""
        before = None if model is None else ModuleState.of(model, values=False)
        self._calls.append(call)
        try:
            with _Operations(self, call), self._device_tells():
                yield
        finally:
            self._calls.pop()
        if before is not None and model is not None:
            try:
                before.check(model, call, may_hook=call == "after_shard")
            except AssertionError as error:
                self.changes.append(str(error))

    @contextmanager
    def _device_tells(self) -> Iterator[None]:
        if self._device.type != "cuda" or self._calls[-1] in _AT_REST:
            yield
            return
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                # Torch calls the mode a prototype, once a process; whoever turns warnings into errors tests their own.
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    @hookimpl
    def before_shard(self, model: torch.nn.Module, config: ShardConfig) -> None:
        with self.inside("before_shard", model):
            self._events.before_shard(model, config)

    @hookimpl
    def after_shard(self, model: torch.nn.Module) -> None:
        with self.inside("after_shard", model):
            self._events.after_shard(model)

    @hookimpl
    def on_save(self, model: torch.nn.Module, path: Path) -> None:
        with self.inside("on_save", model):
            self._events.on_save(model, path)

    @hookimpl
    def on_load(self, model: torch.nn.Module, path: Path) -> None:
        with self.inside("on_load", model):
            self._events.on_load(model, path)

    @hookimpl
    def step_begin(self, model: torch.nn.Module) -> None:
        with self.inside("step_begin", model):
            self._events.step_begin(model)

    @hookimpl
    def step_end(self, model: torch.nn.Module) -> None:
        with self.inside("step_end", model):
            self._events.step_end(model)

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer | None:
        with self.inside("make_observer"):
            made = self._events.observers(unit)
        return _WatchedObserver(self, made[0]) if made else None


#: Hooks that are not called inside a step.
_AT_REST = frozenset({"before_shard", "after_shard", "on_save", "on_load", "make_observer"})


class _WatchedObserver:
    def __init__(self, watched: Watched, observer: Observer) -> None:
        self._watched = watched
        self._observer = observer

    def unshard(self, unit: UnitSpec) -> None:
        with self._watched.inside("unshard"):
            self._observer.unshard(unit)

    def unsharded(self, unit: UnitSpec) -> None:
        with self._watched.inside("unsharded"):
            self._observer.unsharded(unit)

    def compute(self, unit: UnitSpec, backward: bool) -> None:
        with self._watched.inside("compute"):
            self._observer.compute(unit, backward)

    def computed(self, unit: UnitSpec, backward: bool) -> None:
        with self._watched.inside("computed"):
            self._observer.computed(unit, backward)

    def wait(self, unit: UnitSpec) -> None:
        with self._watched.inside("wait"):
            self._observer.wait(unit)

    def waited(self, unit: UnitSpec) -> None:
        with self._watched.inside("waited"):
            self._observer.waited(unit)

    def reduce(self, unit: UnitSpec) -> None:
        with self._watched.inside("reduce"):
            self._observer.reduce(unit)

    def reduced(self, unit: UnitSpec) -> None:
        with self._watched.inside("reduced"):
            self._observer.reduced(unit)

    def reshard(self, unit: UnitSpec) -> None:
        with self._watched.inside("reshard"):
            self._observer.reshard(unit)
