"""What holds for plugins of every group, as tests that the suites inherit."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch

from ..interfaces import CURRENT_API, OLDEST_API, Group
from .communication import collectives_noted


class PluginSuite:
    """The base of suites: what it tests does not depend on the group."""

    group: ClassVar[Group]
    """The plugin's entry-point group."""
    device: torch.device = torch.device("cpu")
    """Where models compute; override it to test on another device."""

    # What type checkers let any signature override: that of collectives takes the rank.
    def make(self, *args: Any, **kwargs: Any) -> Any:
        """A newly constructed plugin."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def factory(self) -> Callable[..., Any]:
        """What the entry point names: the class of what ``make`` returns. Override it where it is a function."""
        made: type = type(self.make())
        return made

    def test_api_version_stands_in_the_class_itself_and_is_served(self) -> None:
        factory = self.factory()
        # An inherited one says for which version the base was written, and changes with it. The class of an object that
        # can be called is the object's own.
        places = (getattr(factory, "__dict__", {}), {} if isinstance(factory, type) else vars(type(factory)))
        own = next((each["api_version"] for each in places if "api_version" in each), None)
        assert own is not None, f"{factory!r} has no api_version of its own"
        assert type(own) is int, f"api_version is {own!r}"
        assert OLDEST_API[self.group] <= own <= CURRENT_API[self.group]

    def test_factory_takes_a_context_and_options_by_name(self) -> None:
        signature = inspect.signature(self.factory())
        signature.bind_partial(None)
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds, f"an option that is misspelled is swallowed by {signature}"
        reachable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        assert all(kind in reachable for kind in kinds[1:]), f"options go by name, but there is {signature}"

    def test_local_options_are_options_of_the_factory(self) -> None:
        factory = self.factory()
        local: Any = getattr(factory, "local_options", frozenset())
        assert isinstance(local, Collection), f"local_options are {local!r}"
        assert not isinstance(local, str | bytes), f"local_options are {local!r}: put the name into a frozenset"
        options = list(inspect.signature(factory).parameters)[1:]
        assert set(local) <= set(options), f"local_options {sorted(local)} are not among the options {options}"

    def test_fingerprint_is_text_that_every_rank_has(self) -> None:
        with as_rank(0):
            first = _fingerprint(self.make())
        with as_rank(1):
            second = _fingerprint(self.make())
        assert isinstance(first, str | None), f"fingerprint() is {first!r}"
        assert first == second


class LocalPluginSuite(PluginSuite):
    """The base of suites of plugins that do not speak to other ranks."""

    def test_construction_does_not_communicate(self) -> None:
        # Ranks compare their plugins when all are constructed: one that lacks a plugin would leave the others waiting.
        with collectives_noted() as issued:
            self.make()
        assert not issued, f"{', '.join(issued)} while it was constructed"


def _fingerprint(plugin: Any) -> Any:
    method = getattr(plugin, "fingerprint", None)
    return method() if callable(method) else method


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Set what tells processes apart as it is on ``rank`` of two: a launcher's variables, and random numbers."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, variables), torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        yield
