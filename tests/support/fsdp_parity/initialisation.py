"""What the constructor and its group do, on every rank."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from polyshard.interfaces import Collectives, ReduceOp
from polyshard_fsdp import FullyShardedDataParallel, ShardingStrategy, _init_utils
from polyshard_fsdp._collectives import collectives_of
from polyshard_fsdp._common_utils import clean_tensor_name
from polyshard_fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from .ranks import Ranks

T = TypeVar("T")


class DummyGroup:
    """A group of any rank and size, with which nothing can be exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def on_group(ranks: Ranks, fn: Callable[[Collectives], T]) -> T:
    """``fn`` of the whole group's collectives."""
    return fn(collectives_of(ranks.group, ranks.device))


def count_replaced_calls(ranks: Ranks, name: str) -> int:
    """How often one operation of the engine calls what stands in ``torch.distributed`` for it at that moment."""
    collectives = collectives_of(ranks.group, ranks.device)
    seen: list[Any] = []
    # The replacement takes what FSDP passes and no more: positional tensors, the group, and a source.
    newer = {"reduce_scatter_tensor": "reduce_scatter_single", "all_gather_into_tensor": "all_gather_single"}
    torchs = getattr(dist, newer.get(name, name), None) or getattr(dist, name)

    def replacement(*tensors: torch.Tensor, group: Any, src: int | None = None) -> None:
        seen.append(tensors)
        torchs(*tensors, group=group, **({} if src is None else {"src": src}))

    whole = torch.arange(4.0, device=ranks.device)
    part = torch.full((2,), float(ranks.rank), device=ranks.device)
    with mock.patch.object(dist, name, replacement):
        if name == "reduce_scatter_tensor":
            collectives.reduce_scatter(part, whole, op=ReduceOp.MEAN).wait()
            assert part.tolist() == [2.0 * ranks.rank, 2.0 * ranks.rank + 1]
        elif name == "all_gather_into_tensor":
            collectives.all_gather(whole, part).wait()
            assert whole.tolist() == [0.0, 0.0, 1.0, 1.0]
        elif name == "all_reduce":
            collectives.all_reduce(part, op=ReduceOp.SUM).wait()
            assert part.tolist() == [1.0, 1.0]
        else:
            collectives.broadcast(part, 1).wait()
            assert part.tolist() == [1.0, 1.0]
    return len(seen)


def count_new_groups(ranks: Ranks) -> int:
    """How many groups are made by the construction and the first use of a group's collectives."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        collectives = collectives_of(ranks.group, ranks.device)
        collectives.barrier()
        collectives.all_gather_object(ranks.rank)
        collectives.all_reduce(torch.ones(1, device=ranks.device), op=ReduceOp.SUM).wait()
    return new_group.call_count


def mean_of_large_halves(ranks: Ranks) -> float:
    """The mean of 60000 on each of two ranks, in fp16."""
    tensor = torch.full((2,), 60000.0, dtype=torch.float16, device=ranks.device)
    part = torch.empty(1, dtype=torch.float16, device=ranks.device)
    collectives_of(ranks.group, ranks.device).reduce_scatter(part, tensor, op=ReduceOp.MEAN).wait()
    return part.item()


class Filled(nn.Module):
    """A parameter and a buffer that ``reset_parameters`` fills with ``value``."""

    scale: torch.Tensor

    def __init__(self, value: float, device: str = "cpu") -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.zeros(3, device=device))
        self.register_buffer("scale", torch.zeros(2, device=device))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(self.value)
            self.scale.fill_(self.value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum() * self.scale.sum()


def values_of(model: nn.Module) -> dict[str, list[float]]:
    """Every whole parameter and buffer, by clean name."""
    with FullyShardedDataParallel.summon_full_params(model):
        named = [*model.named_parameters(), *model.named_buffers()]
        return {clean_tensor_name(name): tensor.flatten().tolist() for name, tensor in named}


def _destroy(*groups: Any) -> None:
    for group in groups:
        dist.destroy_process_group(group)


def group_arguments(ranks: Ranks) -> None:
    """Which groups instances have for each way to name them; 4 ranks."""
    fsdp = FullyShardedDataParallel
    model = fsdp(nn.Linear(2, 2, device=ranks.device))
    assert model.process_group is ranks.group
    assert (model.rank, model.world_size) == (ranks.rank, 4)

    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][ranks.rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][ranks.rank % 2]
    model = fsdp(nn.Linear(2, 2, device=ranks.device), half)
    assert (model.rank, model.world_size) == (ranks.rank % 2, 2)

    line = init_device_mesh(ranks.device.type, (4,))
    model = fsdp(nn.Linear(2, 2, device=ranks.device), device_mesh=line)
    assert model.process_group is line.get_group()

    hybrid = ShardingStrategy.HYBRID_SHARD
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(ranks.device)
    model = fsdp(two, (half, across), hybrid, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    for instance in fsdp.fsdp_modules(model):
        assert instance.process_group is half
        assert instance._groups.replicate_group is across
        assert (instance.rank, instance.world_size) == (ranks.rank % 2, 2)
        assert instance.sharding_strategy is hybrid

    square = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fsdp(nn.Linear(2, 2, device=ranks.device), sharding_strategy=hybrid, device_mesh=square)
    assert model.process_group is square.get_group("shard")
    assert model._groups.replicate_group is square.get_group("replicate")
    with pytest.raises(ValueError, match="Expected device_mesh to have ndim=2 but got 1"):
        fsdp(nn.Linear(2, 2, device=ranks.device), sharding_strategy=hybrid, device_mesh=line)
    with pytest.raises(ValueError, match="Cannot pass both process_group and device_mesh at the same time"):
        fsdp(nn.Linear(2, 2, device=ranks.device), half, device_mesh=line)
    # A rank outside of a new group gets a number for it.
    outside = dist.new_group([ranks.world_size - 1])
    if ranks.rank < ranks.world_size - 1:
        with pytest.raises(ValueError, match="not a process group that this process is in"):
            fsdp(nn.Linear(2, 2, device=ranks.device), outside)
    else:
        _destroy(outside)
    groups = {half, across, line.get_group(), *square.get_all_groups()} - {ranks.group}
    _destroy(*sorted(groups, key=lambda group: group.group_name))


def groups_of_nodes(ranks: Ranks) -> tuple[list[int], list[int]]:
    """The ranks of the groups that a hybrid strategy makes on two nodes of two ranks each, shared by all instances."""
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(ranks.device)
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
    ):
        model = FullyShardedDataParallel(
            two,
            sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
    assert new_group.call_count == 4
    instances = FullyShardedDataParallel.fsdp_modules(model)
    assert len({(each.process_group, each._groups.replicate_group) for each in instances}) == 1
    shard, replicate = model.process_group, model._groups.replicate_group
    ranks_of = dist.get_process_group_ranks(shard), dist.get_process_group_ranks(replicate)
    _destroy(shard, replicate)
    return ranks_of


def refuse_uneven_nodes(ranks: Ranks) -> str:
    """What is said where nodes of two do not divide three ranks; nothing is sent."""
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}),
        mock.patch.object(dist, "new_group") as new_group,
        pytest.raises(ValueError, match="cannot be divided over nodes") as caught,
    ):
        FullyShardedDataParallel(
            nn.Sequential(nn.Linear(2, 2)),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
    assert not new_group.called
    return str(caught.value)


class Mixed(nn.Module):
    """Parameters of two dtypes at two depths, and buffers of two more."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.inner = nn.Linear(3, 2)
        self.outer = nn.Linear(2, 2)
        self.register_buffer("counts", torch.arange(4) + 10 * rank)
        self.register_buffer("floats", torch.full((2, 2), float(rank)).t())
        self.inner.register_buffer("empty", torch.zeros(0))


def synchronised(ranks: Ranks, use_orig_params: bool) -> None:
    """All ranks have rank 0's values after wrapping with ``sync_module_states``, and their own without."""
    for sync in (True, False):
        model = Mixed(ranks.rank).to(ranks.device)
        expected = {
            name: tensor.flatten().tolist() for name, tensor in Mixed(0 if sync else ranks.rank).state_dict().items()
        }
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(partial(operator.is_, model.inner)),
            sync_module_states=sync,
            use_orig_params=use_orig_params,
        )
        found = values_of(wrapped)
        assert found.keys() == expected.keys()
        for name in expected:
            if not sync and name.endswith(("weight", "bias")):
                # Every rank keeps its own part of what it had: sharding sends nothing.
                continue
            assert found[name] == expected[name], f"sync={sync}: {name}"


def synchronised_over_two_groups(ranks: Ranks) -> None:
    """With a hybrid strategy rank 0's values reach all four ranks."""
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][ranks.rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][ranks.rank % 2]
    wrapped = FullyShardedDataParallel(
        Mixed(ranks.rank).to(ranks.device),
        (half, across),
        ShardingStrategy.HYBRID_SHARD,
        sync_module_states=True,
    )
    expected = {name: tensor.flatten().tolist() for name, tensor in Mixed(0).state_dict().items()}
    assert values_of(wrapped) == expected
    _destroy(half, across)


def broadcast_sizes(ranks: Ranks, limit: int) -> list[int]:
    """Bytes of each broadcast with which a module's states are synchronised, with buckets of ``limit`` bytes."""
    sizes = []

    def broadcast(tensor: torch.Tensor, **options: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return torchs(tensor, **options)

    torchs = dist.broadcast
    model = Mixed(ranks.rank).to(ranks.device)
    with (
        mock.patch.object(dist, "broadcast", broadcast),
        mock.patch.object(_init_utils, "PARAM_BROADCAST_BUCKET_SIZE", limit),
    ):
        FullyShardedDataParallel(model, sync_module_states=True)
    return sizes


def materialised(ranks: Ranks, use_orig_params: bool, with_function: bool) -> None:
    """Meta modules get values when they are wrapped, each from the instance that manages it, and once."""
    calls: list[nn.Module] = []

    def initialise(module: nn.Module) -> None:
        calls.append(module)
        if isinstance(module, Filled):
            module.to_empty(device=ranks.device, recurse=False)
            module.reset_parameters()

    model = nn.Sequential(Filled(1.0, "meta"), nn.Sequential(Filled(2.0, "meta"), Filled(3.0, "meta")))
    inside = list(model.modules())
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module is inside[2]),
        param_init_fn=initialise if with_function else None,
        use_orig_params=use_orig_params,
    )
    expected = {}
    for prefix, value in (("0", 1.0), ("1.0", 2.0), ("1.1", 3.0)):
        expected[f"{prefix}.weight"] = [value] * 3
        expected[f"{prefix}.scale"] = [value] * 2
    assert values_of(wrapped) == expected
    # The inner instance is made first, and each module is initialised by the instance that manages it, and once.
    assert calls == ([inside[2], inside[3], inside[4], inside[0], inside[1]] if with_function else [])


def placement(ranks: Ranks) -> None:
    """``device_id``, and where an instance computes, on the device of this run."""
    fsdp = FullyShardedDataParallel
    on_cpu = nn.Linear(3, 3)
    on_cpu.weight.grad = torch.ones(3, 3)
    ignored = nn.Linear(1, 1)
    model = fsdp(nn.Sequential(on_cpu, ignored), device_id=ranks.device, ignored_modules=[ignored])
    assert model.compute_device == ranks.device
    assert {parameter.device for parameter in model.params} == {ranks.device}
    assert ignored.weight.device.type == "cpu"
    if ranks.on_cpu:
        # Without an accelerator nothing is moved, nothing is warned about, and any rank may send what it has.
        assert fsdp(nn.Linear(2, 2), sync_module_states=True).compute_device == torch.device("cpu")
        return
    assert fsdp(nn.Linear(2, 2), device_id=ranks.rank).compute_device == ranks.device
    with pytest.warns(UserWarning, match=r"`device_id` cuda on rank \d, which does not have an explicit index"):
        assert fsdp(nn.Linear(2, 2), device_id=torch.device("cuda")).compute_device == ranks.device
    with pytest.warns(UserWarning, match="The passed-in `module` is on CPU"):
        assert fsdp(nn.Linear(2, 2)).compute_device == ranks.device
    other = torch.device("cuda", (ranks.rank + 1) % ranks.world_size)
    with pytest.raises(ValueError, match=rf"Inconsistent compute device and `device_id` on rank {ranks.rank}: {other}"):
        fsdp(nn.Linear(2, 2, device=other), device_id=ranks.device)
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=ranks.device))
    with pytest.raises(RuntimeError, match="To support a module with both CPU and GPU params, please pass"):
        fsdp(both)
    assert [parameter.device.type for parameter in both.parameters()] == ["cpu", "cpu", "cuda", "cuda"]
    assert fsdp(both, device_id=ranks.device).compute_device == ranks.device
    with pytest.raises(RuntimeError, match="FSDP only supports single device modules but got params on"):
        fsdp(nn.Sequential(nn.Linear(2, 2, device=other), nn.Linear(2, 2, device=ranks.device)))
    with (
        pytest.warns(UserWarning, match="The passed-in `module` is on CPU"),
        pytest.raises(ValueError, match="The module has CPU parameters or buffers when `sync_module_states=True`"),
    ):
        fsdp(nn.Linear(2, 2), sync_module_states=True)
