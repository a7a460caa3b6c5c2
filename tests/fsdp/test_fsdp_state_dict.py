"""FSDP's model state dicts against those of the same model unsharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fsdp_parity import state_dict
from fsdp_parity import state_dict_situations as situations
from fsdp_parity.ranks import Pools
from polyshard_fsdp import StateDictType

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
orig = pytest.mark.parametrize("use_orig_params", [False, True])
on_cpu = pytest.mark.parametrize("ranks", ["cpu"], indirect=True)


def bodies(*functions: Callable[..., Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("body", functions, ids=lambda function: function.__name__)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_full_state_equals_a_plain_models(ranks: Pools, world_size: int) -> None:
    ranks.run(world_size, state_dict.full_equals_plain)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("kind", list(StateDictType))
def test_round_trip(ranks: Pools, world_size: int, kind: StateDictType) -> None:
    ranks.run(world_size, state_dict.round_trip, kind)


@on_cpu
def test_on_one_rank_nothing_is_cut(ranks: Pools) -> None:
    ranks.run(1, state_dict.full_equals_plain)
    for kind in (FULL, SHARDED):
        ranks.run(1, state_dict.round_trip, kind)


@orig
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@bodies(state_dict.sharded_values, state_dict.local_values)
def test_each_rank_has_its_rows_or_its_part(
    ranks: Pools, body: Callable[..., Any], world_size: int, use_orig_params: bool
) -> None:
    ranks.run(world_size, body, use_orig_params)


@orig
@pytest.mark.parametrize(("world_size", "hybrid"), [(2, False), (4, True)])
def test_device_mesh(ranks: Pools, world_size: int, hybrid: bool, use_orig_params: bool) -> None:
    ranks.run(world_size, state_dict.device_mesh, hybrid, use_orig_params)


@on_cpu
def test_saved_by_another_number_of_ranks(ranks: Pools) -> None:
    ranks.run(3, situations.saved_by_another_number_of_ranks)


@bodies(
    state_dict.rank0_only_and_offload,
    state_dict.values_are_copies,
    situations.kinds,
    situations.between_passes,
    situations.refused_inside_forward,
    situations.activation_checkpointing,
)
def test_every_kind(ranks: Pools, body: Callable[..., Any]) -> None:
    ranks.run(2, body)


@orig
@bodies(
    state_dict.original_dtypes,
    state_dict.shared_names_share_memory,
    state_dict.no_shard_is_full,
    situations.load_by_assignment,
    situations.keys_are_reported_by_plain_names,
    situations.inside_summon_full_params,
    situations.ignored_states,
    situations.shared_instances,
    situations.hooks_of_modules_inside,
    situations.refusals_on_load,
)
def test_both_kinds_of_parameters(ranks: Pools, body: Callable[..., Any], use_orig_params: bool) -> None:
    ranks.run(2, body, use_orig_params)
