"""The conformance suite for listeners."""

from __future__ import annotations

import functools
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from polyshard import checkpoint as checkpoints
from polyshard import hookspecs
from polyshard.api import close, no_sync, shard, unsharded
from polyshard.config import ShardConfig
from polyshard.errors import PolyshardError
from polyshard.events import Events
from polyshard.hookspecs import hookimpl
from polyshard.interfaces import Group, Listener, Observer, UnitEvent, UnitOperation, UnitSpec
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from .plugin import Dispatched, LocalPluginSuite, ModuleState, group_of_one, is_collective
from .training import Block, Model, Values, seeded, tokens

if TYPE_CHECKING:
    from polyshard.config import ShardConfig


_HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT_NAME}_spec")]


class _PlannedError(Exception):
    """Raised by a model in the middle of a step."""


class _Model(Model):
    """With dropout, whose numbers depend on who else draws random ones, and with ways to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.25)
        self.recomputes = False
        self.fails = False

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        if self.fails:
            raise _PlannedError
        scores: torch.Tensor = self.head(x)
        return scores


class _Run:
    """A sharded model, on one of two pretended ranks, with what a loop needs."""

    def __init__(self, listener: object | None, device: torch.device, frozen: bool = False) -> None:
        model = seeded(_Model, device)
        assert isinstance(model, _Model)
        model.blocks[1].requires_grad_(not frozen)
        self.model = model
        shard(
            model,
            ShardConfig(
                collectives={"name": "polyshard:fake", "world_size": 2},
                policy={"name": "polyshard:module_class", "classes": Block},
                listeners=() if listener is None else (listener,),
                device=device,
            ),
        )
        self.optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        self._batch = tokens().to(device)

    def loss(self) -> torch.Tensor:
        scores: torch.Tensor = self.model(self._batch)
        return scores.square().mean()

    def step(self) -> None:
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(self._batch)
        self.model.train()

    def end(self) -> Values:
        """Whole parameters; the model is closed."""
        with unsharded(self.model):
            values = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        close(self.model)
        return values


#: Begins a run: a sharded model with a listener of its own, or without one.
_Start = Callable[..., _Run]
_Use = Callable[[_Start], None]


def _train(start: _Start) -> None:
    run = start()
    with no_sync(run.model):
        run.loss().backward()  # type: ignore[no-untyped-call]
    run.step()
    run.step()


def _evaluate(start: _Start) -> None:
    run = start()
    run.evaluate()
    run.evaluate()
    run.step()


def _fail(start: _Start) -> None:
    run = start()
    run.model.fails = True
    with pytest.raises(_PlannedError):
        run.step()
    run.model.fails = False
    loss = run.loss()
    loss.register_hook(_raise)  # type: ignore[no-untyped-call]
    with pytest.raises(_PlannedError):
        loss.backward()  # type: ignore[no-untyped-call]
    run.step()


def _raise(gradient: torch.Tensor) -> None:
    raise _PlannedError


def _recompute(start: _Start) -> None:
    run = start()
    run.model.recomputes = True
    run.step()


def _freeze(start: _Start) -> None:
    start(frozen=True).step()


def _train_two(start: _Start) -> None:
    first, second = start(), start()
    # One step lies within the other, and the next behind it.
    outer = first.loss()
    second.step()
    outer.backward()  # type: ignore[no-untyped-call]
    first.optimizer.step()
    first.optimizer.zero_grad()
    first.step()


def _save_and_load(start: _Start) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = start()
        saved.step()
        directory = checkpoints.save(Path(folder), 1, saved.model, saved.optimizer)
        loaded = start()
        checkpoints.load(directory, loaded.model, loaded.optimizer)
    loaded.step()


def _same_numbers(use: _Use) -> Callable[[ListenerSuite], None]:
    """A test that ``use`` comes to the same parameters with a listener as without."""

    def test(self: ListenerSuite) -> None:
        with_it = _results(use, self._listener, self.device)
        assert _equal(with_it, _without(use, self.device)), "parameters differ from those without the listener"

    return test


class ListenerSuite(LocalPluginSuite):
    """Subclass it, name the class ``Test…``, and override ``make``; override ``device`` to test on another one.

    The rules of ``polyshard.hookspecs`` and ``polyshard.interfaces.Observer``, over every kind of step of a small model
    on one pretended rank of two. Where the listener's hooks or observers do not fit, one test says so, and the tests
    that need them are skipped.
    """

    group = Group.PLUGINS

    @override
    def make(self) -> object:
        """A newly constructed listener."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def test_hooks_exist_and_take_their_arguments(self) -> None:
        listener = self.make()
        try:
            Events([("listener", listener)])
        except PolyshardError as error:
            pytest.fail(str(error))
        for name in _HOOKS:
            method = getattr(listener, name, None)
            marked = hasattr(method, f"{hookspecs.PROJECT_NAME}_impl")
            assert method is None or marked, f"{name} is the name of a hook: mark it with polyshard.hookimpl"

    def test_observers_take_an_event(self) -> None:
        events = self._events()
        for unit in self._units():
            try:
                observers = events.observers(unit)
            except PolyshardError as error:
                pytest.fail(str(error))
            for observer in observers:
                _check_signature(observer, unit)

    test_training_gives_the_same_numbers_as_without_it = _same_numbers(_train)
    test_a_forward_without_a_backward = _same_numbers(_evaluate)
    test_a_step_after_one_that_failed = _same_numbers(_fail)
    test_activations_that_are_computed_again = _same_numbers(_recompute)
    test_units_that_are_frozen = _same_numbers(_freeze)
    test_two_models_at_once = _same_numbers(_train_two)
    test_saving_and_loading = _same_numbers(_save_and_load)

    def test_the_model_is_left_as_it_was(self) -> None:
        assert not (changes := self._watched().changes), changes[0]

    def test_no_collective_is_issued(self) -> None:
        assert not (collectives := self._watched().collectives), ", ".join(collectives)

    def test_nothing_in_a_step_waits_for_the_device(self) -> None:
        assert not (waits := self._watched().waits), ", ".join(waits)

    def _units(self) -> Sequence[UnitSpec]:
        suffixes = ("", "[float32, frozen]")
        return [self._unit(name, 32, suffix=suffix) for name in ("", "blocks.0") for suffix in suffixes]

    def _events(self) -> Events:
        """Of a new listener; where its hooks do not fit, the test is skipped."""
        try:
            return Events([("listener", self.make())])
        except PolyshardError as error:
            pytest.skip(f"its hooks do not fit: {error}")

    def _listener(self) -> object:
        """A new one; where its hooks or observers do not fit, the test is skipped."""
        listener = self.make()
        try:
            events = Events([("listener", listener)])
            for observer in events.observers(self._units()[0]):
                _check_signature(observer, self._units()[0])
        except (PolyshardError, AssertionError) as error:
            pytest.skip(f"its hooks or observers do not fit: {error}")
        return self.make()

    def _watched(self) -> Watched:
        """A listener that was watched while a model was sharded and over a step."""
        watched = Watched(self._listener(), self.device)
        with watched.watching(), _seeds(self.device):
            run = _Run(watched, self.device)
            run.step()
            run.end()
        return watched


def _results(use: _Use, make: Callable[[], object | None], device: torch.device) -> list[Values]:
    """The models' parameters behind ``use``, each with a listener that ``make`` makes."""
    runs: list[_Run] = []

    def start(**settings: Any) -> _Run:
        runs.append(_Run(make(), device, **settings))
        return runs[-1]

    with _seeds(device):
        use(start)
        return [run.end() for run in runs]


@functools.cache
def _without(use: _Use, device: torch.device) -> list[Values]:
    """The result of ``use`` without a listener: the same for all of them."""
    return _results(use, lambda: None, device)


@contextmanager
def _seeds(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(1)
        yield


def _check_signature(observer: Observer, unit: UnitSpec) -> None:
    signature = inspect.signature(observer)
    try:
        signature.bind(UnitEvent(UnitOperation.GATHER, unit))
    except TypeError as error:
        raise AssertionError(f"the observer {signature} must take (event): {error}") from error


def _equal(one: Sequence[Values], other: Sequence[Values]) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(one, other, strict=True)
    )


#: Hooks that are not called inside a step.
_AT_REST = frozenset(
    {"before_shard", "after_shard", "on_save", "on_load", "on_progress", "on_replicas", "make_observer"}
)
#: Operations that copy values of a device to the host to decide something.
_READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"})
#: Objects whose ``synchronize`` waits for a device. Of classes written in C, the device itself reports it.
_WAITING: tuple[Any, ...] = (torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator)


class Watched(Listener):
    """A listener that hands every call on to another one, and notes what that does although it may not.

    Raises as ``Events`` for a listener whose hooks do not fit.
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
        """Changes that it made to the model, and where."""
        for name in _HOOKS:
            if name != "make_observer":
                setattr(self, name, self._hand_on(name, getattr(hookspecs, name)))

    def _note(self, operation: Any) -> None:
        name = operation.name()
        if is_collective(operation):
            self.collectives.append(f"{name} in {self._calls[-1]}")
        elif name in _READS:
            self._note_wait(name)

    def _note_wait(self, by: str) -> None:
        """The listener waits, by the operation ``by``: hooks of a step must not."""
        if self._calls and self._calls[-1] not in _AT_REST:
            self.waits.append(f"{by} in {self._calls[-1]}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note waits, and have a process group over which there could be collectives."""
        with ExitStack() as stack:
            for owner in _WAITING:
                stack.enter_context(mock.patch.object(owner, "synchronize", self._noting(owner.synchronize)))
            stack.enter_context(group_of_one())
            yield

    def _noting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if not self._calls:
                return wait(*args, **kwargs)
            self._note_wait("synchronize")
            return None

        return noting

    @contextmanager
    def inside(self, call: str, model: torch.nn.Module | None = None) -> Iterator[None]:
        """The listener runs, called by the hook or for the event ``call``."""
        before = None if model is None else ModuleState.of(model, values=False)
        self._calls.append(call)
        try:
            with Dispatched(self._note), self._device_tells():
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

    def _hand_on(self, hook: str, spec: Callable[..., Any]) -> Callable[..., Any]:
        """An implementation of ``hook``, whose first argument is the model."""

        @hookimpl
        @functools.wraps(spec)
        def handed_on(*arguments: Any) -> None:
            with self.inside(hook, arguments[0]):
                getattr(self._events, hook)(*arguments)

        return handed_on

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer | None:
        with self.inside("make_observer"):
            made = self._events.observers(unit)

        def handed_on(event: UnitEvent) -> None:
            with self.inside(f"{event.operation} of an observer"):
                made[0](event)

        return handed_on if made else None
