"""The tests of collectives about streams fail over backends whose waits do not order them, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from polyshard.interfaces import COMPLETED, Collectives, Work
from polyshard_backends.fake import FakeCollectives
from polyshard_testing import CollectivesSuite, plugin_context
from suite_faults import names_of, passes

pytestmark = pytest.mark.gpu

T = TypeVar("T")


def delay() -> None:
    """Keep the current stream busy for some milliseconds: longer than the host takes to issue what follows."""
    matrix = torch.zeros(4096, 4096, device="cuda")
    for _ in range(20):
        matrix = matrix @ matrix


class GathersUnordered(FakeCollectives):
    """What it gathers is there for the stream that asked, and for no other."""

    api_version = 1

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            delay()
        super().all_gather(out, shard)
        return COMPLETED


class ExchangesUnordered(FakeCollectives):
    """The same of blocks."""

    api_version = 1

    def all_to_all(self, out: torch.Tensor, *blocks: Any) -> Work:
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            delay()
        super().all_to_all(out, *blocks)
        return COMPLETED


@pytest.mark.parametrize("backend", [GathersUnordered, ExchangesUnordered])
def test_only_the_order_of_streams_fails(backend: type[FakeCollectives]) -> None:
    class Suite(CollectivesSuite):
        def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
            context = plugin_context(device="cuda")
            return [fn(backend(context, rank=rank, world_size=world_size)) for rank in range(world_size)]

        def factory(self) -> Callable[..., Any]:
            return backend

    found = {name for name in names_of(CollectivesSuite) if not passes(Suite(), f"test_{name}", 2)}
    assert found == {"waiting_orders_streams"}
