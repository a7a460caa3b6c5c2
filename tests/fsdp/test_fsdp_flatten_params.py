"""Flat parameters and what their shards hold, as PyTorch's FSDP tests of that name assert it."""

from __future__ import annotations

import pytest
from fsdp_parity import flatten_params as bodies
from fsdp_parity.ranks import Pools

in_both_precisions = pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])


@in_both_precisions
def test_partial_flattening(ranks: Pools, half: bool) -> None:
    """Two of four layers wrapped."""
    ranks.run(1, bodies.partial_flattening, half)


@in_both_precisions
def test_flatten_nothing(ranks: Pools, half: bool) -> None:
    """No parameters: refused."""
    ranks.run(1, bodies.nothing_to_flatten, half)


def test_empty_module(ranks: Pools) -> None:
    """No parameters in a wrapped module: fine."""
    ranks.run(1, bodies.empty_module)


@in_both_precisions
def test_numel_without_shared_params(ranks: Pools, half: bool) -> None:
    """No padding."""
    ranks.run(1, bodies.numel_of_flat_parameter, half, False)


@in_both_precisions
def test_numel_with_shared_params(ranks: Pools, half: bool) -> None:
    """No padding, and nothing twice."""
    ranks.run(1, bodies.numel_of_flat_parameter, half, True)


@in_both_precisions
def test_output_without_shared_params(ranks: Pools, half: bool) -> None:
    """Same output."""
    ranks.run(1, bodies.output_of_wrapped, half, False)


@in_both_precisions
def test_output_with_shared_params(ranks: Pools, half: bool) -> None:
    """Same output."""
    ranks.run(1, bodies.output_of_wrapped, half, True)


@in_both_precisions
def test_pnorm_after_step_with_shared_params(ranks: Pools, half: bool) -> None:
    """Same parameters after a step, as far as their norm tells."""
    ranks.run(1, bodies.norm_after_step, half)


def test_flat_param_shard_metadata_aligned_full_precision(ranks: Pools) -> None:
    """Two ranks' shards, cut out of a handle on one rank."""
    ranks.run(1, bodies.aligned_shard_metadata_in_full_precision)


def test_flat_param_shard_metadata_aligned_mixed_precision(ranks: Pools) -> None:
    """Two ranks' shards, cut out of a handle on one rank."""
    ranks.run(1, bodies.aligned_shard_metadata_in_mixed_precision)
