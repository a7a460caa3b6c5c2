from __future__ import annotations

from pathlib import Path

import pytest
import torch
from polyshard.config import ShardConfig
from polyshard.errors import ConfigError, PluginContractError
from polyshard.events import Events
from polyshard.hookspecs import hookimpl
from polyshard.interfaces import Observer, UnitEvent, UnitSpec

UNIT = UnitSpec(
    name="blocks.0",
    module_class=torch.nn.Linear,
    parameter_names=("blocks.0.weight",),
    numel=16,
    shard_numel=8,
    master_dtype=torch.float32,
    device=torch.device("cpu"),
    is_root=False,
)


class Recorder:
    """Implements every hook and writes down what it was told."""

    def __init__(self, name: str, log: list[tuple[object, ...]]) -> None:
        self.name, self.log = name, log

    @hookimpl
    def before_shard(self, model: torch.nn.Module, config: ShardConfig) -> None:
        self.log.append((self.name, "before_shard", model, config))

    @hookimpl
    def after_shard(self, model: torch.nn.Module) -> None:
        self.log.append((self.name, "after_shard", model))

    @hookimpl
    def on_save(self, model: torch.nn.Module, path: Path) -> None:
        self.log.append((self.name, "on_save", model, path))

    @hookimpl
    def on_load(self, path: Path) -> None:
        self.log.append((self.name, "on_load", path))

    @hookimpl
    def on_progress(self, work: str, done: int, total: int) -> None:
        self.log.append((self.name, "on_progress", work, done, total))

    @hookimpl
    def step_begin(self, model: torch.nn.Module) -> None:
        self.log.append((self.name, "step_begin", model))

    @hookimpl
    def step_end(self) -> None:
        self.log.append((self.name, "step_end"))

    @hookimpl
    def on_replicas(self, before: int, now: int) -> None:
        self.log.append((self.name, "on_replicas", before, now))

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer | None:
        self.log.append((self.name, "make_observer", unit))
        return self.observe

    def observe(self, event: UnitEvent) -> None: ...


def test_listeners_hear_everything_in_the_order_of_the_configuration() -> None:
    log: list[tuple[object, ...]] = []
    model, config, path = torch.nn.Linear(2, 2), ShardConfig(), Path("runs/1")
    first, second = Recorder("first", log), Recorder("second", log)
    events = Events([("first", first), ("second", second)])

    events.before_shard(model, config)
    events.after_shard(model)
    events.step_begin(model)
    events.step_end(model)
    events.on_save(model, path)
    events.on_load(model, path)
    events.on_progress(model, "Loading runs/1", 3, 4)
    events.on_replicas(model, 2, 1)
    assert events.observers(UNIT) == (first.observe, second.observe)

    told = [
        ("before_shard", model, config),
        ("after_shard", model),
        ("step_begin", model),
        ("step_end",),
        ("on_save", model, path),
        ("on_load", path),
        ("on_progress", "Loading runs/1", 3, 4),
        ("on_replicas", 2, 1),
        ("make_observer", UNIT),
    ]
    assert log == [(name, *call) for call in told for name in ("first", "second")]


def test_a_hook_of_a_newer_version_may_be_marked_optional() -> None:
    class Newer:
        @hookimpl(optionalhook=True)
        def on_graph_capture(self) -> None: ...

    assert Events([("newer", Newer())]).active


def test_two_objects_of_one_class_are_two_listeners_and_one_object_is_one() -> None:
    log: list[tuple[object, ...]] = []
    events = Events([("Recorder", Recorder("a", log)), ("Recorder", Recorder("b", log))])
    events.step_end(torch.nn.Identity())
    assert log == [("a", "step_end"), ("b", "step_end")]
    same = Recorder("a", log)
    with pytest.raises(ConfigError, match="same object"):
        Events([("x", same), ("y", same)])


class Misspelt:
    @hookimpl
    def befor_shard(self, model: torch.nn.Module) -> None: ...


class Wrong:
    @hookimpl
    def after_shard(self, modul: torch.nn.Module) -> None: ...


class Unmarked:
    def after_shard(self, model: torch.nn.Module) -> None: ...


class Observes:
    """Answers an observer that cannot be called."""

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> object:
        return self


@pytest.mark.parametrize(
    ("listener", "words"),
    [
        (Misspelt, r"'trace' implements a hook 'befor_shard' .*Did you mean 'before_sh"),
        (Wrong, r"(?s)listener 'trace' does not fit.*modul"),
        (Unmarked, r"Unmarked\) implements no hook.*polyshard\.hookimpl"),
        (Observes, r"'trace'.*'blocks\.0', which cannot be called\. .*one UnitEvent"),
    ],
)
def test_a_listener_that_does_not_fit_the_hooks_is_refused_by_name(listener: type[object], words: str) -> None:
    with pytest.raises(PluginContractError, match=words):
        Events([("good", Recorder("good", [])), ("trace", listener())]).observers(UNIT)
