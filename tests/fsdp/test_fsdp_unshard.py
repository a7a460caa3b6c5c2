"""Whole parameters outside of compute, and gathers ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fsdp_parity import unshard
from fsdp_parity.ranks import Pools


@pytest.mark.parametrize(
    ("body", "world_sizes"),
    [
        (unshard.whole_flat_parameters, (2, 3)),
        (unshard.writes_through_flat_parameters, (1, 2)),
        (unshard.padding_is_not_written_back, (2,)),
        (unshard.gathered_memory, (2,)),
        (unshard.gradients_against_ddp, (2, 3)),
        (unshard.gradients_that_nobody_has, (3,)),
        (unshard.unreduced_gradients_survive, (2,)),
        (unshard.the_root_is_found, (2,)),
        (unshard.functions_of_polyshard, (2,)),
        (unshard.private_names, (2,)),
        (unshard.gathers_ahead, (2,)),
        (unshard.write_between_forward_and_backward, (2,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unshard(ranks: Pools, body: Callable[..., Any], world_sizes: tuple[int, ...]) -> None:
    for world_size in world_sizes:
        ranks.run(world_size, body)
