"""Holds ``Loopback`` to the contract of collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from polyshard.interfaces import Collectives
from polyshard.testing import CollectivesSuite, plugin_context

from acme.loopback import Loopback

T = TypeVar("T")


class TestLoopback(CollectivesSuite):
    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        # Pretended ranks may come one after the other. Those that exchange bytes must run at once.
        return [fn(Loopback(plugin_context(), world_size=world_size, rank=rank)) for rank in range(world_size)]
