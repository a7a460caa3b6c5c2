"""The conformance suite for listeners."""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import checkpoint as checkpoints
from .. import hookspecs
from ..api import close, no_sync, shard, unsharded
from ..config import ShardConfig
from ..errors import PolyshardError
from ..events import Events
from ..interfaces import Group, Observer, UnitSpec
from .listener_watch import Watched
from .plugin import LocalPluginSuite
from .training import Block, Model, Values, seeded, tokens

_OBSERVER = {
    "unshard": ("unit",),
    "unsharded": ("unit",),
    "compute": ("unit", "backward"),
    "computed": ("unit", "backward"),
    "wait": ("unit",),
    "waited": ("unit",),
    "reduce": ("unit",),
    "reduced": ("unit",),
    "reshard": ("unit",),
}


class _PlannedError(Exception):
    """Raised by a model in the middle of a step."""


class _Model(Model):
    """With dropout, so that numbers depend on who else draws random ones, and with ways to go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.25)
        self.recomputes = False
        self.fails = False

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


class ListenerSuite(LocalPluginSuite):
    """Subclass it, name the class ``Test…``, and override ``make``; override ``device`` to test on another one.

    What ``polyshard.hookspecs`` and ``polyshard.interfaces.Observer`` ask of a listener, over every kind of step of a
    small model that one pretended rank of two has. Where its hooks or observers do not fit, one test says so, and those
    that need them are skipped.
    """

    group = Group.PLUGINS

    def make(self) -> object:
        """A newly constructed listener."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def test_hooks_exist_and_take_their_arguments(self) -> None:
        listener = self.make()
        try:
            Events([("listener", listener)])
        except PolyshardError as error:
            pytest.fail(str(error))
        hooks = {name for name, value in vars(hookspecs).items() if hasattr(value, "polyshard_spec")}
        for name in hooks:
            method = getattr(listener, name, None)
            marked = hasattr(method, f"{hookspecs.PROJECT_NAME}_impl")
            assert method is None or marked, f"{name} is the name of a hook: mark it with polyshard.hookimpl"

    def test_observers_have_all_methods(self) -> None:
        events = self._events()
        for unit in self._units():
            try:
                observers = events.observers(unit)
            except PolyshardError as error:
                pytest.fail(str(error))
            for observer in observers:
                _check_signatures(observer, unit)

    def test_training_gives_the_same_numbers_as_without_it(self) -> None:
        self._same_numbers(_train)

    def test_a_forward_without_a_backward(self) -> None:
        self._same_numbers(_evaluate)

    def test_a_step_after_one_that_failed(self) -> None:
        self._same_numbers(_fail)

    def test_activations_that_are_computed_again(self) -> None:
        self._same_numbers(_recompute)

    def test_units_that_are_frozen(self) -> None:
        self._same_numbers(_freeze)

    def test_two_models_at_once(self) -> None:
        self._same_numbers(_train_two)

    def test_saving_and_loading(self) -> None:
        self._same_numbers(_save_and_load)

    def test_the_model_is_left_as_it_was(self) -> None:
        assert not (changes := self._watched().changes), changes[0]

    def test_no_collective_is_issued(self) -> None:
        assert not (collectives := self._watched().collectives), ", ".join(collectives)

    def test_nothing_in_a_step_waits_for_the_device(self) -> None:
        assert not (waits := self._watched().waits), ", ".join(waits)

    def _units(self) -> Sequence[UnitSpec]:
        suffixes = ("", "[float32, frozen]")
        return [
            UnitSpec(
                name=f"{name}{suffix}",
                module_class=nn.Linear,
                parameter_names=(f"{name}.weight".lstrip("."),),
                numel=64,
                shard_numel=32,
                master_dtype=torch.float32,
                device=self.device,
                is_root=not name,
                suffix=suffix,
            )
            for name in ("", "blocks.0")
            for suffix in suffixes
        ]

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
                _check_signatures(observer, self._units()[0])
        except (PolyshardError, AssertionError) as error:
            pytest.skip(f"its hooks or observers do not fit: {error}")
        return self.make()

    def _same_numbers(self, use: _Use) -> None:
        with _seeds(self.device):
            with_it = use(self._listener, self.device)
        assert _equal(with_it, _without(use, self.device)), "parameters differ from those without the listener"

    def _watched(self) -> Watched:
        """What it did while a model was sharded and over a step."""
        watched = Watched(self._listener(), self.device)
        with watched.watching(), _seeds(self.device):
            run = _Run(watched, self.device)
            run.step()
            run.end()
        return watched


#: Makes a listener, or None, for each model, and returns the models' parameters at the end.
_Use = Callable[[Callable[[], object | None], torch.device], list[Values]]


def _train(make: Callable[[], object | None], device: torch.device) -> list[Values]:
    run = _Run(make(), device)
    with no_sync(run.model):
        run.loss().backward()  # type: ignore[no-untyped-call]
    run.step()
    run.step()
    return [run.end()]


def _evaluate(make: Callable[[], object | None], device: torch.device) -> list[Values]:
    run = _Run(make(), device)
    run.evaluate()
    run.evaluate()
    run.step()
    return [run.end()]


def _fail(make: Callable[[], object | None], device: torch.device) -> list[Values]:
    run = _Run(make(), device)
    run.model.fails = True
    with pytest.raises(_PlannedError):
        run.step()
    run.model.fails = False
    loss = run.loss()
    loss.register_hook(_raise)  # type: ignore[no-untyped-call]
    with pytest.raises(_PlannedError):
        loss.backward()  # type: ignore[no-untyped-call]
    run.step()
    return [run.end()]


def _raise(gradient: torch.Tensor) -> None:
    raise _PlannedError


def _recompute(make: Callable[[], object | None], device: torch.device) -> list[Values]:
    run = _Run(make(), device)
    run.model.recomputes = True
    run.step()
    return [run.end()]


def _freeze(make: Callable[[], object | None], device: torch.device) -> list[Values]:
    run = _Run(make(), device, frozen=True)
    run.step()
    return [run.end()]


def _train_two(make: Callable[[], object | None], device: torch.device) -> list[Values]:
    runs = [_Run(make(), device), _Run(make(), device)]
    # One step lies within the other, and the next behind it.
    outer = runs[0].loss()
    runs[1].step()
    outer.backward()  # type: ignore[no-untyped-call]
    runs[0].optimizer.step()
    runs[0].optimizer.zero_grad()
    runs[0].step()
    return [run.end() for run in runs]


def _save_and_load(make: Callable[[], object | None], device: torch.device) -> list[Values]:
    with tempfile.TemporaryDirectory() as folder:
        saved = _Run(make(), device)
        saved.step()
        directory = checkpoints.save(Path(folder), 1, saved.model, saved.optimizer)
        loaded = _Run(make(), device)
        checkpoints.load(directory, loaded.model, loaded.optimizer)
    loaded.step()
    return [saved.end(), loaded.end()]


@functools.cache
def _without(use: _Use, device: torch.device) -> list[Values]:
    """What comes of ``use`` without a listener: the same for all of them."""
    with _seeds(device):
        return use(lambda: None, device)


@contextmanager
def _seeds(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(1)
        yield


def _check_signatures(observer: Observer, unit: UnitSpec) -> None:
    for name, arguments in _OBSERVER.items():
        signature = inspect.signature(getattr(observer, name))
        try:
            signature.bind(*(unit if argument == "unit" else True for argument in arguments))
        except TypeError as error:
            raise AssertionError(
                f"{name}{signature} of the observer must take ({', '.join(arguments)}): {error}"
            ) from error


def _equal(one: Sequence[Values], other: Sequence[Values]) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(one, other, strict=True)
    )
