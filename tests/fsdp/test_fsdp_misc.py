"""Unused units, optimizers in backward, and unusual ways to train, beside a model without FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fsdp_parity import misc
from fsdp_parity.ranks import Pools
from polyshard_fsdp import BackwardPrefetch
from polyshard_fsdp._common_utils import HandleTrainingState


@pytest.mark.parametrize(
    ("body", "world_sizes"),
    [
        (misc.unused_output_has_no_gradient, (2,)),
        (misc.output_used_on_some_ranks, (2,)),
        (misc.optimizer_in_backward, (2,)),
        (misc.optimizer_in_backward_needs_original_parameters, (2,)),
        (misc.setattr_overrides, (1, 2)),
        (misc.homogeneous_attributes, (2,)),
        (misc.cpu_is_a_device, (2,)),
        (misc.checkpointing, (2,)),
        (misc.freezing_between_steps, (2,)),
        (misc.shapes_of_models, (2, 3)),
        (misc.after_exceptions, (2,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_misc(ranks: Pools, body: Callable[..., Any], world_sizes: tuple[int, ...]) -> None:
    for world_size in world_sizes:
        ranks.run(world_size, body)


@pytest.mark.parametrize(
    ("prefetch", "state", "expected"),
    [
        (BackwardPrefetch.BACKWARD_PRE, HandleTrainingState.BACKWARD_PRE, "321"),
        (BackwardPrefetch.BACKWARD_POST, HandleTrainingState.BACKWARD_POST, "321"),
        (None, HandleTrainingState.BACKWARD_PRE, ""),
    ],
)
def test_order_of_prefetches_in_backward(
    ranks: Pools, prefetch: BackwardPrefetch | None, state: HandleTrainingState, expected: str
) -> None:
    follows = {"3": "2", "2": "1", "1": "0"}
    order = [(current, follows[current]) for current in expected]
    one = [*order, ("0", None)] if order else []
    assert ranks.run(2, misc.prefetched, prefetch, state) == [[one, one]] * 2
