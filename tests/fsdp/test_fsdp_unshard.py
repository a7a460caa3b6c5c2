"""Whole parameters outside of compute, and gathers ahead of it."""

from __future__ import annotations

import pytest
from fsdp_parity import unshard as bodies
from fsdp_parity.ranks import Pools


@pytest.mark.parametrize("world_size", [2, 3])
def test_flat_parameters_are_whole_inside(ranks: Pools, world_size: int) -> None:
    assert ranks.run(world_size, bodies.whole_flat_parameters) == [16] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_writes_are_kept_where_that_is_asked_for(ranks: Pools, world_size: int) -> None:
    assert ranks.run(world_size, bodies.writes_through_flat_parameters) == [48] * world_size


def test_padding_is_not_written_back(ranks: Pools) -> None:
    ranks.run(2, bodies.padding_is_not_written_back)


def test_gathered_memory_is_left_as_it_was(ranks: Pools) -> None:
    assert ranks.run(2, bodies.gathered_memory) == [16, 16]


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_ddp(ranks: Pools, world_size: int) -> None:
    assert ranks.run(world_size, bodies.gradients_against_ddp) == [6] * world_size


def test_gradients_that_nobody_has_are_none(ranks: Pools) -> None:
    ranks.run(3, bodies.gradients_that_nobody_has)


def test_unreduced_gradients_survive(ranks: Pools) -> None:
    assert ranks.run(2, bodies.unreduced_gradients_survive) == [12, 12]


def test_the_root_is_found(ranks: Pools) -> None:
    ranks.run(2, bodies.the_root_is_found)


def test_private_names_mean_what_they_say(ranks: Pools) -> None:
    assert ranks.run(2, bodies.private_names) == [2, 2]


def test_a_gather_ahead_serves_the_forward(ranks: Pools) -> None:
    assert ranks.run(2, bodies.gathers_ahead) == [12, 12]


def test_later_gathers_read_what_was_written(ranks: Pools) -> None:
    ranks.run(2, bodies.write_between_forward_and_backward)
