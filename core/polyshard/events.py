"""Calls the hooks of one sharded model's listeners."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
import torch

from . import hookspecs
from .config import did_you_mean
from .errors import ConfigError, PluginContractError
from .interfaces import Observer, UnitSpec

if TYPE_CHECKING:
    from .config import ShardConfig


class Events:
    """The listeners of one sharded model, behind typed methods named like the hooks of ``polyshard.hookspecs``.

    ``listeners``: pairs of a name and a listener, in the order in which they are to be called. Raises
    ``PluginContractError`` for a listener without any hook, with a hook that does not exist, or whose hook asks for an
    argument that does not exist, and ``ConfigError`` for a listener that is given twice.
    """

    def __init__(self, listeners: Sequence[tuple[str, object]]) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
        self._manager.add_hookspecs(hookspecs)
        self._hook_names = frozenset(vars(self._manager.hook))
        #: Whether there are listeners at all.
        self.active = bool(listeners)
        given = [name for name, _ in listeners]
        # pluggy calls the last registered first.
        for position in reversed(range(len(given))):
            name, listener = listeners[position]
            # pluggy wants each name once, and two objects may share a class.
            earlier = given[:position].count(name)
            self._register(f"{name}#{earlier + 1}" if earlier else name, listener)
        self._check_pending()
        #: Whether one of them hears of steps. False lets the engine skip ``step_begin`` and ``step_end``.
        self.steps = any(hook.get_hookimpls() for hook in (self._manager.hook.step_begin, self._manager.hook.step_end))

    def before_shard(self, model: torch.nn.Module, config: ShardConfig) -> None:
        self._call("before_shard", model=model, config=config)

    def after_shard(self, model: torch.nn.Module) -> None:
        self._call("after_shard", model=model)

    def on_save(self, model: torch.nn.Module, path: Path | str) -> None:
        self._call("on_save", model=model, path=path)

    def on_load(self, model: torch.nn.Module, path: Path | str) -> None:
        self._call("on_load", model=model, path=path)

    def on_progress(self, model: torch.nn.Module, work: str, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of ``work`` are written, or read."""
        self._call("on_progress", model=model, work=work, done=done, total=total)

    def on_replicas(self, model: torch.nn.Module, before: int, now: int) -> None:
        """``now`` jobs take part in a step, and ``before`` in the last one."""
        self._call("on_replicas", model=model, before=before, now=now)

    def step_begin(self, model: torch.nn.Module) -> None:
        self._call("step_begin", model=model)

    def step_end(self, model: torch.nn.Module) -> None:
        self._call("step_end", model=model)

    def observers(self, unit: UnitSpec) -> tuple[Observer, ...]:
        """What the listeners want to watch ``unit`` with, in the order of the listeners.

        Raises ``PluginContractError`` for an answer that cannot be called.
        """
        answers = tuple(self._call("make_observer", unit=unit))
        for answer in answers:
            if not callable(answer):
                asked = ", ".join(repr(each.plugin_name) for each in self._manager.hook.make_observer.get_hookimpls())
                raise PluginContractError(
                    f"make_observer of listener {asked} answered {type(answer).__module__}:{type(answer).__qualname__} "
                    f"for unit {unit.label!r}, which cannot be called. An observer is a function of one UnitEvent, and "
                    "no object with a method for each moment, as it once was. Return one, or None."
                )
        return answers

    def _call(self, hook: str, **arguments: Any) -> list[Any]:
        caller = getattr(self._manager.hook, hook)
        try:
            answers: list[Any] = caller(**arguments)
        except Exception as error:
            # What a listener raises stays what it is, for whoever waits for it.
            ran = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
            for each in caller.get_hookimpls():
                if getattr(each.function, "__code__", None) in ran:
                    error.add_note(f"Raised in the hook {hook} of listener {each.plugin_name!r}.")
            raise
        return answers

    def _register(self, name: str, listener: object) -> None:
        if self._manager.is_registered(listener):
            raise ConfigError(
                f"listener {name!r} is the same object as {self._manager.get_name(listener)!r}. Give it once."
            )
        try:
            self._manager.register(listener, name=name)
        except pluggy.PluginValidationError as error:
            raise PluginContractError(f"listener {name!r} does not fit the hooks of polyshard: {error}") from error
        if not self._manager.get_hookcallers(listener):
            raise PluginContractError(
                f"listener {name!r} ({type(listener).__module__}:{type(listener).__qualname__}) implements no hook. "
                f"Mark its methods with polyshard.hookimpl. Hooks: {', '.join(sorted(self._hook_names))}."
            )

    def _check_pending(self) -> None:
        """Refuse implementations of hooks that do not exist, which pluggy would keep and never call."""
        for name, listener in self._manager.list_name_plugin():
            for hook in self._manager.get_hookcallers(listener) or ():
                optional = all(each.optionalhook for each in hook.get_hookimpls())
                if not hook.has_spec() and not optional:
                    raise PluginContractError(
                        f"listener {name!r} implements a hook {hook.name!r} that does not exist."
                        f"{did_you_mean(hook.name, self._hook_names)} Hooks: {', '.join(sorted(self._hook_names))}."
                    )
