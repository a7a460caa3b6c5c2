"""Optimizer state dicts: what an unsharded optimizer has, saved and loaded across every way of sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsdp_parity import optim_order, optim_refusals, optim_state
from fsdp_parity.optim_models import FULL_SHARD, SHARD_GRAD_OP, Settings
from fsdp_parity.ranks import Pools
from polyshard_fsdp import StateDictType

on_cpu = pytest.mark.parametrize("ranks", ["cpu"], indirect=True)
world_sizes = pytest.mark.parametrize(
    ("ranks", "world_size"),
    [("cpu", 1), ("cpu", 3), pytest.param("cuda", 2, marks=pytest.mark.gpu)],
    indirect=["ranks"],
)


@world_sizes
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
def test_full_state_is_the_unsharded_optimizers(ranks: Pools, world_size: int, use_orig_params: bool) -> None:
    ranks.run(world_size, optim_state.full_state, use_orig_params)


@world_sizes
@pytest.mark.parametrize(
    ("kind", "rank0_only"),
    [
        pytest.param(StateDictType.FULL_STATE_DICT, False, marks=pytest.mark.nightly),
        (StateDictType.FULL_STATE_DICT, True),
        (StateDictType.SHARDED_STATE_DICT, False),
        (StateDictType.LOCAL_STATE_DICT, False),
    ],
    ids=["full", "rank0", "sharded", "local"],
)
def test_resumed_training_is_the_uninterrupted_one(
    ranks: Pools, world_size: int, kind: StateDictType, rank0_only: bool
) -> None:
    ranks.run(world_size, optim_state.resume, kind, rank0_only)


@on_cpu
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 1), pytest.param(1, 2, marks=pytest.mark.nightly)])
def test_resumed_over_other_numbers_of_ranks(ranks: Pools, saved_by: int, loaded_by: int) -> None:
    for saved_as, loaded_as in ((False, True), (True, False)):
        before = Settings(saved_as, FULL_SHARD, "counting", grouped=True)
        state, parameters = ranks.run(saved_by, optim_state.save_full, before)[0]
        after = Settings(loaded_as, SHARD_GRAD_OP, "counting", grouped=True)
        ranks.run(loaded_by, optim_state.resume_full, after, state, parameters)


@on_cpu
@pytest.mark.parametrize("meshed", [False, True], ids=["sharded_tensor", "dtensor"])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
def test_distributed_checkpoint_over_other_numbers_of_ranks(
    ranks: Pools, use_orig_params: bool, meshed: bool, tmp_path: Path
) -> None:
    settings = Settings(use_orig_params)
    folder = str(tmp_path / "checkpoint")
    parameters = ranks.run(2, optim_state.save_distributed, settings, meshed, folder)[0]
    ranks.run(3, optim_state.resume_distributed, settings, meshed, folder, parameters)


@world_sizes
def test_distributed_values(ranks: Pools, world_size: int) -> None:
    ranks.run(world_size, optim_state.distributed_values)


@on_cpu
def test_hybrid_strategies(ranks: Pools) -> None:
    ranks.run(4, optim_state.hybrid)


@world_sizes
def test_moves_to_and_from_an_unsharded_model(ranks: Pools, world_size: int) -> None:
    ranks.run(world_size, optim_state.to_and_from_unsharded)


@world_sizes
def test_older_functions(ranks: Pools, world_size: int) -> None:
    ranks.run(world_size, optim_refusals.legacy)


@world_sizes
def test_state_without_groups_user_state_and_reordered_groups(ranks: Pools, world_size: int) -> None:
    ranks.run(world_size, optim_refusals.odds_and_ends)


@world_sizes
def test_optimizer_keyed_by_names(ranks: Pools, world_size: int) -> None:
    ranks.run(world_size, optim_refusals.optimizer_keyed_by_names)


def test_refusals(ranks: Pools) -> None:
    ranks.run(2, optim_refusals.refusals)


def test_strides_and_recorded_names(ranks: Pools) -> None:
    ranks.run(2, optim_refusals.strides_and_recorded_names)


@pytest.mark.parametrize(
    "kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT], ids=["full", "sharded"]
)
def test_order_of_the_first_ranks_optimizer(ranks: Pools, kind: StateDictType) -> None:
    ranks.run(2, optim_order.order_of_first_rank, kind)


def test_entries_keep_their_order(ranks: Pools) -> None:
    ranks.run(2, optim_order.entries_keep_their_order)


def test_settings_tell_of_distributed_tensors(ranks: Pools) -> None:
    ranks.run(2, optim_order.settings_tell_of_dtensors)
