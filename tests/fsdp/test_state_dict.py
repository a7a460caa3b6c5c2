"""FSDP's model state dicts against those of the same model unsharded."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fsdp_parity.models import wrap_fsdp
from fsdp_parity.ranks import Pools, Ranks, across, on_cpu, orig
from fsdp_parity.state_models import (
    FULL,
    LOCAL,
    SHARDED,
    STRATEGIES,
    assert_same,
    kind,
    plain_model,
    step,
    wrapped_model,
)
from fsdp_parity.subtests import run_subtests, subtests
from polyshard_fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

#: How a model is wrapped: as a whole, with a submodule apart, and that submodule alone inside a plain module.
WRAPPINGS = ("root", "nested", "inside")


def saved_again(values: Mapping[str, Any]) -> Any:
    """What a file gives back."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        # Torch's own pickling of its own class.
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        torch.save(values, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


def full_equals_plain(ranks: Ranks) -> None:
    """Saved after training, loaded into a plain model; a plain model's loaded, and trained on.

    Offloading is nothing where all is in host memory.
    """

    def case(strategy: ShardingStrategy, use_orig_params: bool, wrapping: str, offload: bool) -> None:
        plain = plain_model(ranks, seed=0)
        settings = {
            "sharding_strategy": strategy,
            "use_orig_params": use_orig_params,
            "cpu_offload": CPUOffload(offload_params=offload),
        }
        model = wrapped_model(ranks, 0, wrapping, **settings)
        assert_same(model.state_dict(), plain.state_dict())
        if offload and wrapping == "inside" and not ranks.on_cpu:
            return
        step(plain, ranks)
        step(model, ranks)
        saved = model.state_dict()
        assert_same(saved, plain.state_dict(), rtol=1e-5, atol=1e-6)
        assert all(type(value) is torch.Tensor for value in saved.values())

        restored = plain_model(ranks, seed=1)
        assert restored.load_state_dict(saved).missing_keys == []
        assert_same(restored.state_dict(), saved)

        other = plain_model(ranks, seed=2)
        result = model.load_state_dict(other.state_dict())
        assert result.missing_keys == []
        assert result.unexpected_keys == []
        assert_same(model.state_dict(), other.state_dict())
        step(other, ranks)
        step(model, ranks)
        assert_same(model.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)

    axes = {
        "strategy": STRATEGIES,
        "use_orig_params": (False, True),
        "wrapping": WRAPPINGS,
        "offload": (False,) if ranks.on_cpu else (False, True),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD`")
        run_subtests(axes, case)


def round_trip(ranks: Ranks, state_dict_type: StateDictType) -> None:
    """Saved by one model, through a file, into another that had other values."""

    def case(strategy: ShardingStrategy, use_orig_params: bool, wrapping: str, offload: bool) -> None:
        settings = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        plain = plain_model(ranks, seed=0)
        model = wrapped_model(ranks, 0, wrapping, **settings)
        step(plain, ranks)
        step(model, ranks)
        other = wrapped_model(ranks, 1, wrapping, **settings)
        config: StateDictConfig = {
            FULL: FullStateDictConfig,
            LOCAL: LocalStateDictConfig,
            SHARDED: ShardedStateDictConfig,
        }[state_dict_type](offload_to_cpu=offload)
        with kind(model, state_dict_type, config):
            saved = saved_again(model.state_dict())
        with kind(other, state_dict_type, config):
            result = other.load_state_dict(saved)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_same(other.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
        step(plain, ranks)
        step(other, ranks)
        assert_same(other.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)

    axes = {
        "strategy": STRATEGIES[:2] if state_dict_type is LOCAL else STRATEGIES,
        "use_orig_params": (False, True),
        "wrapping": WRAPPINGS,
        "offload": (False,) if ranks.on_cpu else (False, True),
    }
    run_subtests(axes, case)


@orig
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@across()
def test_sharded_values(ranks: Ranks, use_orig_params: bool) -> None:
    """This rank's rows of every parameter, as ``torch.chunk`` cuts them; buffers whole."""
    plain = plain_model(ranks, seed=0)
    model = wrapped_model(ranks, 0, "nested", use_orig_params=use_orig_params)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    with kind(model, SHARDED):
        saved = model.state_dict()
    assert list(saved) == list(plain.state_dict())
    for name, whole in plain.state_dict().items():
        value = saved[name]
        if name not in parameters:
            assert type(value) is torch.Tensor
            assert torch.equal(value, whole)
            continue
        assert type(value) is ShardedTensor
        assert value.metadata().size == whole.shape
        assert value.metadata().tensor_properties.dtype == whole.dtype
        chunks = whole.chunk(ranks.world_size)
        assert [each.shard_sizes for each in value.metadata().shards_metadata] == [list(each.shape) for each in chunks]
        shards = value.local_shards()
        assert len(shards) == (ranks.rank < len(chunks))
        for shard in shards:
            assert torch.equal(shard.tensor, chunks[ranks.rank])
            rows = sum(len(chunk) for chunk in chunks[: ranks.rank])
            assert shard.metadata.shard_offsets == [rows, *(0 for _ in whole.shape[1:])]
            assert shard.tensor.untyped_storage().nbytes() == shard.tensor.nbytes, "a piece keeps the whole alive"


@orig
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@across()
def test_local_values(ranks: Ranks, use_orig_params: bool) -> None:
    """One flat tensor an instance, cut evenly, which stays the parameters' own memory."""
    plain = plain_model(ranks, seed=0)
    model = wrapped_model(ranks, 0, "nested", use_orig_params=use_orig_params)
    with kind(model, LOCAL):
        saved = model.state_dict()
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    assert set(saved) == set(plain.state_dict()) - set(parameters) | {"_flat_param", "block._flat_param"}
    inside = [parameter.detach().flatten() for parameter in plain.block.parameters()]
    value = saved["block._flat_param"]
    assert type(value) is ShardedTensor
    local = value.local_shards()[0].tensor
    if not use_orig_params:
        # 4 * 5 + 5 + 5 + 5 + 5 * 4 elements, back to back.
        assert value.metadata().size == (55,)
        per_rank = -(-55 // ranks.world_size)
        assert torch.equal(local, torch.cat(inside)[ranks.rank * per_rank : (ranks.rank + 1) * per_rank])
    before = local.clone()
    step(model, ranks)
    assert not torch.equal(local, before), "a local state dict is a view of the shards"


@across(2)
@subtests(strategy=STRATEGIES, use_orig_params=(False, True), wrapping=WRAPPINGS)
def test_rank0_only_and_offload(ranks: Ranks, strategy: ShardingStrategy, use_orig_params: bool, wrapping: str) -> None:
    """Rank 0 has everything in host memory, the others nothing; and so with each of the two settings alone."""
    plain = plain_model(ranks, seed=0)
    model = wrapped_model(ranks, 0, wrapping, use_orig_params=use_orig_params, sharding_strategy=strategy)
    on_cpu = {name: value.cpu() for name, value in plain.state_dict().items()}
    with kind(model, FULL, FullStateDictConfig(offload_to_cpu=True)):
        saved = model.state_dict()
    managed = [name for name in saved if wrapping != "inside" or name.startswith("block")]
    assert_same({name: saved[name] for name in managed}, {name: on_cpu[name] for name in managed})
    with kind(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        saved = model.state_dict()
    if ranks.rank == 0:
        assert_same({name: saved[name] for name in managed}, {name: on_cpu[name] for name in managed})
    else:
        # Of a module around FSDP, every rank saves what is its own.
        assert set(saved) == set(on_cpu) - set(managed)
    with kind(model, FULL, FullStateDictConfig(rank0_only=True)):
        saved = model.state_dict()
    assert len(saved) == len(on_cpu) - (0 if ranks.rank == 0 else len(managed))
    step(plain, ranks)
    step(model, ranks)
    assert_same(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@orig
@across(2)
def test_original_dtypes(ranks: Ranks, use_orig_params: bool) -> None:
    """Under mixed precision everything is saved in the dtype that it came in, and the model keeps its low one."""
    policy = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    for state_dict_type in (FULL, SHARDED):
        model = wrapped_model(ranks, 0, "nested", mixed_precision=policy, use_orig_params=use_orig_params)
        step(model, ranks)
        offset = dict(model.named_buffers())["_fsdp_wrapped_module.offset"]
        assert offset.dtype == torch.bfloat16
        plain = plain_model(ranks, 0).state_dict()
        with kind(model, state_dict_type):
            saved = model.state_dict()
            assert {name: _dtype_of(value) for name, value in saved.items()} == {n: v.dtype for n, v in plain.items()}
            # Rounded once when the buffer was cast, and not again.
            assert torch.equal(saved["offset"], plain["offset"].bfloat16().float())
            assert dict(model.named_buffers())["_fsdp_wrapped_module.offset"].dtype == torch.bfloat16
            saved["offset"] = saved["offset"] + 1
            model.load_state_dict(saved)
        offset = dict(model.named_buffers())["_fsdp_wrapped_module.offset"]
        assert offset.dtype == torch.bfloat16
        assert torch.equal(offset, saved["offset"].bfloat16())
        step(model, ranks)


def _dtype_of(value: Any) -> torch.dtype:
    dtype = value.metadata().tensor_properties.dtype if isinstance(value, ShardedTensor) else value.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def device_mesh(ranks: Ranks, hybrid: bool, use_orig_params: bool) -> None:
    """With a mesh, pieces are ``DTensor``: rows over the last dimension of the mesh, replicas over the first."""
    shape = (2, ranks.world_size // 2) if hybrid else (ranks.world_size,)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    settings = {
        "device_mesh": mesh,
        "use_orig_params": use_orig_params,
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
    }

    def build(seed: int) -> nn.Module:
        model = plain_model(ranks, seed)
        model.block = wrap_fsdp(model.block, **settings)
        return wrap_fsdp(model, **settings)

    plain = plain_model(ranks, 0)
    model, other = build(0), build(1)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    for offload in (False, True):
        with kind(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=offload)):
            assert FSDP.get_state_dict_type(model).state_dict_config.offload_to_cpu is offload
            saved = model.state_dict()
        assert list(saved) == list(plain.state_dict())
        for name, whole in parameters.items():
            value = saved[name]
            assert type(value) is DTensor
            assert value.shape == whole.shape
            assert value.placements == ((Replicate(), Shard(0)) if hybrid else (Shard(0),))
            assert value.device_mesh == mesh
            chunks = whole.chunk(mesh.size(-1))
            index = mesh.get_local_rank(mesh.ndim - 1)
            local = value.to_local()
            assert local.device.type == ("cpu" if offload else ranks.device.type)
            assert torch.equal(local.to(ranks.device), chunks[index] if index < len(chunks) else whole[:0])
        with kind(other, SHARDED, ShardedStateDictConfig(offload_to_cpu=offload)):
            other.load_state_dict(saved)
        assert_same(other.state_dict(), plain.state_dict())
        other.load_state_dict(plain_model(ranks, 1).state_dict())
    with kind(model, LOCAL), pytest.raises(RuntimeError, match="DeviceMesh is not compatible with LOCAL_STATE_DICT"):
        model.state_dict()
    assert_same(model.state_dict(), plain.state_dict())


@orig
@across(2)
def test_no_shard_is_full(ranks: Ranks, use_orig_params: bool) -> None:
    """Where nothing is cut, every kind is the full one, with a warning where another was asked for."""
    plain = plain_model(ranks, 0)
    strategy = ShardingStrategy.NO_SHARD
    model = wrapped_model(ranks, 0, "root", sharding_strategy=strategy, use_orig_params=use_orig_params)
    assert_same(model.state_dict(), plain.state_dict())
    for state_dict_type in (SHARDED, LOCAL):
        with kind(model, state_dict_type):
            with pytest.warns(UserWarning, match="When using ``NO_SHARD`` .*, full_state_dict will be returned."):
                saved = copy.deepcopy(model.state_dict())
            assert_same(saved, plain.state_dict())
            with pytest.warns(UserWarning, match="When using ``NO_SHARD`` .*, full_state_dict will be returned."):
                model.load_state_dict(plain_model(ranks, 1).state_dict())
        assert_same(model.state_dict(), plain_model(ranks, 1).state_dict())
        model.load_state_dict(saved)


@orig
@across(2)
def test_shared_names_share_memory(ranks: Ranks, use_orig_params: bool) -> None:
    """A shared parameter is saved once, under each of its names, as a plain model's is."""
    saved = wrapped_model(ranks, 0, "root", use_orig_params=use_orig_params).state_dict()
    assert saved["head.weight"].data_ptr() == saved["projection.weight"].data_ptr()
    assert saved["block.again.weight"].data_ptr() == saved["block.once_more.weight"].data_ptr()
    assert saved["block.first.weight"].untyped_storage().nbytes() == 4 * 5 * 4, "a copy keeps the whole unit alive"


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_full_state_equals_a_plain_models(ranks: Pools, world_size: int) -> None:
    ranks.run(world_size, full_equals_plain)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("kind", [SHARDED, LOCAL])
def test_round_trip(ranks: Pools, world_size: int, kind: StateDictType) -> None:
    ranks.run(world_size, round_trip, kind)


@on_cpu
def test_on_one_rank_nothing_is_cut(ranks: Pools) -> None:
    ranks.run(1, full_equals_plain)
    for each in (FULL, SHARDED):
        ranks.run(1, round_trip, each)


@orig
@pytest.mark.parametrize(("world_size", "hybrid"), [(2, False), (4, True)])
def test_device_mesh(ranks: Pools, world_size: int, hybrid: bool, use_orig_params: bool) -> None:
    ranks.run(world_size, device_mesh, hybrid, use_orig_params)
