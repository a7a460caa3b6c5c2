"""Clipping by the norm over all shards, and communication hooks."""

from __future__ import annotations

import pytest
from fsdp_parity import clipping, comm_hooks
from fsdp_parity.ranks import Pools


class TestClipping:
    @pytest.mark.parametrize("world_size", [1, 2])
    def test_norms_are_those_of_ddp(self, ranks: Pools, world_size: int) -> None:
        assert ranks.run(world_size, clipping.clipped_against_ddp) == [192] * world_size

    def test_an_expert_of_each_rank(self, ranks: Pools) -> None:
        assert ranks.run(3, clipping.an_expert_of_each_rank) == [8] * 3

    def test_the_norm_has_the_dtype_of_the_gradients(self, ranks: Pools) -> None:
        assert ranks.run(2, clipping.dtypes_of_the_norm) == [12, 12]

    def test_no_gradients_are_warned_about(self, ranks: Pools) -> None:
        assert ranks.run(2, clipping.without_gradients) == [2, 2]

    def test_infinite_gradients(self, ranks: Pools) -> None:
        assert ranks.run(2, clipping.infinite_gradients) == [6, 6]


class TestCommunicationHooks:
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_default_hooks_reduce_as_ddp(self, ranks: Pools, world_size: int) -> None:
        assert ranks.run(world_size, comm_hooks.hooks_against_ddp) == [36] * world_size

    def test_what_a_hook_writes_is_the_gradient(self, ranks: Pools) -> None:
        assert ranks.run(2, comm_hooks.gradients_by_hand) == [6, 6]

    def test_registration(self, ranks: Pools) -> None:
        assert ranks.run(2, comm_hooks.registration) == [6, 6]

    def test_hybrid_strategies_are_refused(self, ranks: Pools) -> None:
        ranks.run(2, comm_hooks.hybrid_is_refused)
