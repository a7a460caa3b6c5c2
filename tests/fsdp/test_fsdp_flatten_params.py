"""Flat parameters and what their shards hold, as PyTorch's FSDP tests of that name assert it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fsdp_parity import flatten_params as bodies
from fsdp_parity.ranks import Pools


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("body", "shared"),
    [
        (bodies.partial_flattening, ()),
        (bodies.nothing_to_flatten, ()),
        (bodies.numel_of_flat_parameter, (False,)),
        (bodies.numel_of_flat_parameter, (True,)),
        (bodies.output_of_wrapped, (False,)),
        (bodies.output_of_wrapped, (True,)),
        (bodies.norm_after_step, ()),
    ],
)
def test_flattening(ranks: Pools, body: Callable[..., Any], half: bool, shared: tuple[bool, ...]) -> None:
    ranks.run(1, body, half, *shared)


@pytest.mark.parametrize(
    "body",
    [
        bodies.empty_module,
        bodies.aligned_shard_metadata_in_full_precision,
        bodies.aligned_shard_metadata_in_mixed_precision,
    ],
    ids=lambda body: body.__name__,
)
def test_empty_modules_and_shard_metadata(ranks: Pools, body: Callable[..., Any]) -> None:
    """Two ranks' shards, cut out of a handle on one rank."""
    ranks.run(1, body)
