"""FSDP's model state dicts against those of the same model unsharded."""

from __future__ import annotations

import pytest
from fsdp_parity import state_dict
from fsdp_parity import state_dict_situations as situations
from fsdp_parity.ranks import Pools
from polyshard_fsdp import StateDictType

orig = pytest.mark.parametrize("use_orig_params", [False, True])
on_cpu = pytest.mark.parametrize("ranks", ["cpu"], indirect=True)


def cases(ranks: Pools, wrapped: int) -> int:
    """How many cases each rank is to have run: with and without offloading where there is somewhere to offload to."""
    return wrapped if ranks.device_type == "cpu" else 2 * wrapped


world_sizes = pytest.mark.parametrize("world_size", [2, 3])


class TestFull:
    """Names, order, values and dtypes are a plain model's."""

    @world_sizes
    def test_equals_plain_model(self, ranks: Pools, world_size: int) -> None:
        assert ranks.run(world_size, state_dict.full_equals_plain) == [cases(ranks, 18)] * world_size

    @world_sizes
    def test_round_trip(self, ranks: Pools, world_size: int) -> None:
        kind = StateDictType.FULL_STATE_DICT
        assert ranks.run(world_size, state_dict.round_trip, kind) == [cases(ranks, 18)] * world_size

    def test_rank0_only_and_offload(self, ranks: Pools) -> None:
        assert ranks.run(2, state_dict.rank0_only_and_offload) == [18] * 2

    @orig
    def test_original_dtypes(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, state_dict.original_dtypes, use_orig_params)

    @orig
    def test_shared_names_share_memory(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, state_dict.shared_names_share_memory, use_orig_params)

    @orig
    def test_load_by_assignment(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, situations.load_by_assignment, use_orig_params)

    @orig
    def test_keys_are_reported_by_plain_names(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, situations.keys_are_reported_by_plain_names, use_orig_params)

    @orig
    def test_no_shard_is_full(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, state_dict.no_shard_is_full, use_orig_params)


class TestOneRank:
    """Nothing is cut, and state dicts are a plain model's all the same."""

    @on_cpu
    def test_equals_plain_model(self, ranks: Pools) -> None:
        assert ranks.run(1, state_dict.full_equals_plain) == [18]

    @on_cpu
    @pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
    def test_round_trip(self, ranks: Pools, kind: StateDictType) -> None:
        assert ranks.run(1, state_dict.round_trip, kind) == [18]


class TestSharded:
    """Each rank has its rows of each parameter."""

    @world_sizes
    @orig
    def test_values(self, ranks: Pools, world_size: int, use_orig_params: bool) -> None:
        ranks.run(world_size, state_dict.sharded_values, use_orig_params)

    @world_sizes
    def test_round_trip(self, ranks: Pools, world_size: int) -> None:
        kind = StateDictType.SHARDED_STATE_DICT
        assert ranks.run(world_size, state_dict.round_trip, kind) == [cases(ranks, 18)] * world_size

    @orig
    def test_device_mesh(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, state_dict.device_mesh, False, use_orig_params)

    @orig
    def test_hybrid_device_mesh(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(4, state_dict.device_mesh, True, use_orig_params)

    @on_cpu
    def test_saved_by_another_number_of_ranks(self, ranks: Pools) -> None:
        ranks.run(3, situations.saved_by_another_number_of_ranks)


class TestLocal:
    """Each rank has its part of each flat parameter."""

    @world_sizes
    @orig
    def test_values(self, ranks: Pools, world_size: int, use_orig_params: bool) -> None:
        ranks.run(world_size, state_dict.local_values, use_orig_params)

    @world_sizes
    def test_round_trip(self, ranks: Pools, world_size: int) -> None:
        kind = StateDictType.LOCAL_STATE_DICT
        assert ranks.run(world_size, state_dict.round_trip, kind) == [cases(ranks, 12)] * world_size


class TestEveryKind:
    """What does not depend on the kind."""

    def test_kinds(self, ranks: Pools) -> None:
        ranks.run(2, situations.kinds)

    def test_values_are_copies(self, ranks: Pools) -> None:
        assert ranks.run(2, state_dict.values_are_copies) == [12] * 2

    def test_between_passes(self, ranks: Pools) -> None:
        assert ranks.run(2, situations.between_passes) == [18] * 2

    def test_refused_inside_forward(self, ranks: Pools) -> None:
        ranks.run(2, situations.refused_inside_forward)

    def test_activation_checkpointing(self, ranks: Pools) -> None:
        assert ranks.run(2, situations.activation_checkpointing) == [12] * 2

    def test_sharded_in_place(self, ranks: Pools) -> None:
        ranks.run(2, situations.sharded_in_place)

    @orig
    def test_inside_summon_full_params(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, situations.inside_summon_full_params, use_orig_params)

    @orig
    def test_ignored_states(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, situations.ignored_states, use_orig_params)

    @orig
    def test_shared_instances(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, situations.shared_instances, use_orig_params)

    @orig
    def test_hooks_of_modules_inside(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, situations.hooks_of_modules_inside, use_orig_params)

    @orig
    def test_refusals_on_load(self, ranks: Pools, use_orig_params: bool) -> None:
        ranks.run(2, situations.refusals_on_load, use_orig_params)
