"""Optimizer state dicts: what an unsharded optimizer has, saved and loaded across every way of sharding."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_parity.optim_models import (
    FEWER,
    FROZEN,
    FULL_SHARD,
    IGNORED,
    NO_SHARD,
    OPTIMIZERS,
    SHARD_GRAD_OP,
    SHARED,
    STEPS_AFTER,
    STEPS_BEFORE,
    UNUSED,
    Reference,
    Settings,
    Sharded,
    assert_raises,
    assert_same_groups,
    assert_same_parameters,
    assert_same_state,
    mesh_of,
    quiet,
    strategies,
)
from fsdp_parity.ranks import Pools, Ranks, across, on_cpu, world_sizes
from fsdp_parity.subtests import named, run_subtests
from polyshard_fsdp import FullOptimStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor


@world_sizes
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
@across()
def test_full_state_is_the_unsharded_optimizers(ranks: Ranks, use_orig_params: bool) -> None:
    """A gathered state dict is what the unsharded optimizer has, names and groups included."""

    def case(strategy: ShardingStrategy, optimizer: str, grouped: bool, offload: bool) -> None:
        settings = Settings(use_orig_params, strategy, optimizer, grouped, offload)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        assert sharded.full_state()["state"] == {}
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        saved = sharded.full_state()
        expected = reference.state()
        assert not any(name.startswith((UNUSED, FROZEN)) for name in expected)
        assert_same_state(saved["state"], expected)
        assert_same_groups(saved["param_groups"], reference.groups())
        tensors = [value for entries in saved["state"].values() for value in entries.values()]
        assert all(value.device.type == "cpu" for value in tensors if isinstance(value, torch.Tensor))
        # Nothing of it is the optimizer's own memory, nor a part of something larger.
        whole = saved["state"][SHARED]
        kept = {key: copy.deepcopy(value) for key, value in whole.items()}
        sizes = [value.untyped_storage().nbytes() for value in whole.values() if isinstance(value, torch.Tensor)]
        assert max(sizes) == 7 * 7 * 4
        sharded.train(1)
        assert_same_state({SHARED: whole}, {SHARED: kept})
        on_first = sharded.save(StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(rank0_only=True))
        assert bool(on_first) == (ranks.rank == 0)
        if ranks.rank == 0:
            reference.train(1)
            assert_same_state(on_first["state"], reference.state())

    with quiet():
        run_subtests(
            {
                "strategy": strategies(ranks),
                # State of the others has no kind of value that these two have not.
                "optimizer": ["adam", "counting"] if ranks.world_size == 3 else list(OPTIMIZERS),
                "grouped": [False, True],
                "offload": [False] if ranks.on_cpu else [False, True],
            },
            case,
        )


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
@across()
def test_resumed_training_is_the_uninterrupted_one(ranks: Ranks, kind: StateDictType, rank0_only: bool) -> None:
    """What is saved and loaded into a new model, sharded otherwise, goes on as if nothing had happened."""
    config = FullOptimStateDictConfig(rank0_only=rank0_only) if kind is StateDictType.FULL_STATE_DICT else None

    def case(
        saved_as: bool, strategy: ShardingStrategy, loaded_as: bool, into: ShardingStrategy, optimizer: str
    ) -> None:
        before = Settings(saved_as, strategy, optimizer, grouped=True)
        reference, sharded = Reference(ranks.device, before), Sharded(ranks, before)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        saved = sharded.save(kind, config)
        after = Settings(loaded_as, into, optimizer, grouped=True)
        fresh = Sharded(ranks, after, parameters=sharded.parameters(), step=STEPS_BEFORE, lr=0.9)
        fresh.load(saved, kind, config)
        if not rank0_only:
            # Loading has not taken from the state dict what the optimizer goes on to change.
            kept = copy.deepcopy(saved) if kind is StateDictType.FULL_STATE_DICT else None
        reference.train(STEPS_AFTER)
        fresh.train(STEPS_AFTER)
        assert_same_parameters(fresh, reference)
        assert_same_state(fresh.full_state()["state"], reference.state())
        assert_same_groups(fresh.full_state()["param_groups"], reference.groups())
        if not rank0_only and kept is not None:
            assert_same_state(saved["state"], kept["state"])

    with quiet():
        run_subtests(
            {
                "saved_as": [False, True],
                "strategy": FEWER.get(ranks.world_size, [FULL_SHARD, NO_SHARD]),
                "loaded_as": [False, True],
                "into": FEWER.get(ranks.world_size, [SHARD_GRAD_OP, NO_SHARD]),
                # The other optimizers' state has no kind of value that these two have not.
                "optimizer": ["counting" if ranks.world_size == 3 and not rank0_only else "adam"],
            },
            case,
        )


def save_full(ranks: Ranks, settings: Settings) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Optimizer state and parameters after some steps."""
    with quiet():
        sharded = Sharded(ranks, settings)
        sharded.train(STEPS_BEFORE)
        return sharded.full_state(), sharded.parameters()


def resume_full(
    ranks: Ranks, settings: Settings, state: dict[str, Any], parameters: Mapping[str, torch.Tensor]
) -> None:
    """The other half, over any number of ranks: on rank 0 alone, and on all."""
    for rank0_only in (False, True):
        with named({"rank0_only": rank0_only}), quiet():
            reference = Reference(ranks.device, settings)
            reference.train(STEPS_BEFORE + STEPS_AFTER)
            fresh = Sharded(ranks, settings, parameters=parameters, step=STEPS_BEFORE, lr=0.9)
            given = state if ranks.rank == 0 or not rank0_only else {}
            fresh.load(given, StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(rank0_only=rank0_only))
            fresh.train(STEPS_AFTER)
            assert_same_parameters(fresh, reference)
            assert_same_state(fresh.full_state()["state"], reference.state())


def save_distributed(ranks: Ranks, settings: Settings, meshed: bool, folder: str) -> dict[str, torch.Tensor]:
    """Each rank writes its rows through ``torch.distributed.checkpoint``; returns the parameters."""
    with quiet():
        sharded = Sharded(ranks, replace(settings, mesh=mesh_of(ranks) if meshed else None))
        sharded.train(STEPS_BEFORE)
        saved = sharded.save(StateDictType.SHARDED_STATE_DICT)
        dcp.save({"optim": saved}, checkpoint_id=folder)
        return sharded.parameters()


def resume_distributed(
    ranks: Ranks, settings: Settings, meshed: bool, folder: str, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Each of another number of ranks reads its rows."""
    with quiet():
        settings = replace(settings, mesh=mesh_of(ranks) if meshed else None)
        reference = Reference(ranks.device, settings)
        reference.train(STEPS_BEFORE + STEPS_AFTER)
        fresh = Sharded(ranks, settings, parameters=parameters, step=STEPS_BEFORE - 1, lr=0.05)
        # A step, for something to read into.
        fresh.train(1)
        template = {"optim": fresh.save(StateDictType.SHARDED_STATE_DICT)}
        dcp.load(template, checkpoint_id=folder)
        fresh = Sharded(ranks, settings, parameters=parameters, step=STEPS_BEFORE, lr=0.9)
        fresh.load(template["optim"], StateDictType.SHARDED_STATE_DICT)
        fresh.train(STEPS_AFTER)
        assert_same_parameters(fresh, reference)
        assert_same_state(fresh.full_state()["state"], reference.state())


@world_sizes
@across()
def test_distributed_values(ranks: Ranks) -> None:
    """Each rank has its rows of every tensor, where the configuration says, and no more."""

    def case(use_orig_params: bool, meshed: bool, kind: StateDictType) -> None:
        settings = Settings(use_orig_params, mesh=mesh_of(ranks) if meshed else None)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        if meshed and kind is StateDictType.LOCAL_STATE_DICT:
            assert_raises(
                RuntimeError, "DeviceMesh is not compatible with LOCAL_STATE_DICT", lambda: sharded.save(kind)
            )
            return
        saved = sharded.save(kind)["state"]
        for name, entries in reference.state().items():
            assert set(saved[name]) == set(entries)
            for key, value in entries.items():
                got = saved[name][key]
                if name.startswith(IGNORED) or not value.dim():
                    torch.testing.assert_close(got.cpu(), value.cpu(), rtol=2e-5, atol=2e-6)
                    continue
                if ranks.world_size == 1 and type(got) is torch.Tensor:
                    # Nothing is cut.
                    torch.testing.assert_close(got.cpu(), value.cpu(), rtol=2e-5, atol=2e-6)
                    continue
                most = -(-value.shape[0] // ranks.world_size)
                rows = value[most * ranks.rank : most * (ranks.rank + 1)]
                assert got.shape == value.shape
                if meshed:
                    assert isinstance(got, DTensor)
                    local = got.to_local()
                else:
                    assert isinstance(got, ShardedTensor)
                    shards = got.local_shards()
                    assert len(shards) == (1 if len(rows) else 0)
                    local = shards[0].tensor if shards else rows.new_empty(rows.shape, device="cpu")
                # Only local state dicts stay where they are.
                assert local.device.type == (ranks.device.type if kind is StateDictType.LOCAL_STATE_DICT else "cpu")
                torch.testing.assert_close(local.cpu(), rows.cpu(), rtol=2e-5, atol=2e-6)

    with quiet():
        run_subtests(
            {
                "use_orig_params": [False, True],
                "meshed": [False, True],
                "kind": [StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT],
            },
            case,
        )


@on_cpu
@across(4)
def test_hybrid_strategies(ranks: Ranks) -> None:
    """Sharded over pairs of ranks and replicated over the pairs, with groups and with a mesh."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def case(use_orig_params: bool, meshed: bool, kind: StateDictType) -> None:
        groups = (pairs[ranks.rank // 2], replicas[ranks.rank % 2])
        mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard")) if meshed else None
        settings = Settings(use_orig_params, ShardingStrategy.HYBRID_SHARD, mesh=mesh, process_group=groups)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        saved = sharded.save(kind)
        if kind is StateDictType.FULL_STATE_DICT:
            assert_same_state(saved["state"], reference.state())
        fresh = Sharded(ranks, settings, parameters=sharded.parameters(), step=STEPS_BEFORE, lr=0.9)
        fresh.load(saved, kind)
        reference.train(STEPS_AFTER)
        fresh.train(STEPS_AFTER)
        assert_same_parameters(fresh, reference)

    with quiet():
        run_subtests(
            {
                "use_orig_params": [False, True],
                "meshed": [False, True],
                "kind": [StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT],
            },
            case,
        )


@on_cpu
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 1), pytest.param(1, 2, marks=pytest.mark.nightly)])
def test_resumed_over_other_numbers_of_ranks(ranks: Pools, saved_by: int, loaded_by: int) -> None:
    for saved_as, loaded_as in ((False, True), (True, False)):
        before = Settings(saved_as, FULL_SHARD, "adam", grouped=True)
        state, parameters = ranks.run(saved_by, save_full, before)[0]
        after = Settings(loaded_as, SHARD_GRAD_OP, "adam", grouped=True)
        ranks.run(loaded_by, resume_full, after, state, parameters)


@on_cpu
@pytest.mark.parametrize("meshed", [False, True], ids=["sharded_tensor", "dtensor"])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
def test_distributed_checkpoint_over_other_numbers_of_ranks(
    ranks: Pools, use_orig_params: bool, meshed: bool, tmp_path: Path
) -> None:
    settings = Settings(use_orig_params)
    folder = str(tmp_path / "checkpoint")
    parameters = ranks.run(2, save_distributed, settings, meshed, folder)[0]
    ranks.run(3, resume_distributed, settings, meshed, folder, parameters)
