"""Clipping by the norm over all shards, and communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fsdp_parity import clipping, comm_hooks
from fsdp_parity.ranks import Pools


@pytest.mark.parametrize(
    ("body", "world_sizes"),
    [
        (clipping.clipped_against_ddp, (1, 2)),
        (clipping.an_expert_of_each_rank, (3,)),
        (clipping.dtypes_of_the_norm, (2,)),
        (clipping.without_gradients, (2,)),
        (clipping.infinite_gradients, (2,)),
        (comm_hooks.hooks_against_ddp, (1, 3)),
        (comm_hooks.gradients_by_hand, (2,)),
        (comm_hooks.registration, (2,)),
        (comm_hooks.hybrid_is_refused, (2,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_clipping_and_hooks(ranks: Pools, body: Callable[..., Any], world_sizes: tuple[int, ...]) -> None:
    for world_size in world_sizes:
        ranks.run(world_size, body)
