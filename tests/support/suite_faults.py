"""Runs a conformance suite over a plugin within a test, to say which of its tests fail."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from polyshard_testing import plugin_context
from polyshard_testing.plugin import LocalPluginSuite


@dataclass(frozen=True)
class Fault:
    """A plugin that breaks its contract in one way."""

    make: Callable[[], Any]
    fails: str
    """Name of the test, without ``test_``, that fails over it."""


def fault(sound: type[Any], fails: str, name: str, **body: Any) -> Any:
    """A case of a test: ``sound``, changed by ``body``, which is constructed with a context alone."""
    plugin = type(name, (sound,), {"api_version": 1, **body})
    return pytest.param(Fault(lambda: plugin(plugin_context()), fails), id=name)


def plugin_faults(sound: type[Any]) -> Iterator[Any]:
    """Faults that a plugin of every group can have, in subclasses of ``sound``: their tests are the suites' bases'."""

    def swallowing(self: Any, context: Any, **options: Any) -> None:
        sound.__init__(self, context)

    def asking(self: Any, context: Any) -> None:
        sound.__init__(self, context)
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))

    # Says no version itself.
    inherits = type("Inherits", (sound,), {})
    rule = "api_version_stands_in_the_class_itself_and_is_served"
    yield pytest.param(Fault(lambda: inherits(plugin_context()), rule), id="Inherits")
    # Takes every option, the misspelled ones too.
    yield fault(sound, "factory_takes_a_context_and_options_by_name", "Swallows", __init__=swallowing)
    # Excuses an option that it does not have.
    unknown = frozenset({"folder"})
    yield fault(sound, "local_options_are_options_of_the_factory", "NamesNone", local_options=unknown)
    # Says something else on each rank.
    told = {"fingerprint": lambda self: f"of rank {os.environ.get('RANK')}"}
    yield fault(sound, "fingerprint_is_text_that_every_rank_has", "TellsItsRank", **told)
    # Asks the others while it is constructed.
    yield fault(sound, "construction_does_not_communicate", "Asks", __init__=asking)


def names_of(suite: type[Any]) -> set[str]:
    """Names of the suite's tests, without ``test_``."""
    return {name.removeprefix("test_") for name in dir(suite) if name.startswith("test_")}


#: Tests of the base of all suites, which ``plugin_faults`` are for.
EVERY_PLUGINS = names_of(LocalPluginSuite)


def is_caught(suite: type[Any], fault: Fault) -> bool:
    """Whether the test that the fault is for fails over the plugin."""

    class Suite(suite):  # type: ignore[misc]
        def make(self) -> Any:
            return fault.make()

    return not passes(Suite(), f"test_{fault.fails}")


def rules_of(faults: Sequence[Any]) -> set[str]:
    """Names of the tests that one of ``faults`` fails."""
    return {each.values[0].fails for each in faults}


def cases(test: Callable[..., None], world_size: int = 2) -> Iterator[dict[str, Any]]:
    """Every case of a test that has marks of ``parametrize``, with so many ranks."""
    axes: list[list[dict[str, Any]]] = []
    for mark in getattr(test, "pytestmark", ()):
        names, values = mark.args
        if isinstance(names, str):
            axes.append([{names: value} for value in values])
        else:
            axes.append([dict(zip(names, value, strict=True)) for value in values])
    if "world_size" in inspect.signature(test).parameters:
        axes.append([{"world_size": world_size}])
    for case in itertools.product(*axes):
        yield {name: value for part in case for name, value in part.items()}


def passes(suite: Any, name: str, world_size: int = 2) -> bool:
    """Whether every case of the test ``name`` passes with so many ranks."""
    test = getattr(suite, name)
    try:
        for arguments in cases(test, world_size):
            getattr(type(suite)(), name)(**arguments)
    except pytest.skip.Exception:
        return True
    except (Exception, pytest.fail.Exception):
        return False
    return True
