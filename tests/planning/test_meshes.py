"""Groups of ranks from meshes, against lists that were written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from polyshard.config import ShardConfig, Strategy
from polyshard.errors import ConfigError, ParameterError
from polyshard.planning.meshes import (
    UnitLists,
    WorldMesh,
    divisor_of,
    lists_of,
    override_lists,
    refuse_overlap,
    unit_lists,
    world_mesh,
)
from polyshard.planning.plan import plan_modules
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def job(ranks: int, rank: int = 0) -> Iterator[None]:
    """A job in which this process is one of many ranks, and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(**dimensions: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def told(lists: UnitLists) -> tuple[Any, Any, str]:
    return lists.shard, lists.replicate, lists.label


ALONE8 = [[rank] for rank in range(8)]


def test_positions_count_in_the_world_of_the_mesh() -> None:
    with job(12, 10):
        mesh = DeviceMesh("cpu", [[4, 6], [8, 10]], mesh_dim_names=("dp", "tp"))
        assert world_mesh(mesh).ranks == [4, 6, 8, 10]
        assert unit_lists(mesh, ["dp"]).shard == [[0, 2], [1, 3]]
        with pytest.raises(
            ConfigError, match=r"'ddp' is no dimension of the mesh\. Did you mean 'dp'\? It has: dp, tp"
        ):
            unit_lists(mesh, ["ddp"])
    with job(12, 3), pytest.raises(ConfigError, match=r"This rank is not in the mesh of ranks \[4, 6, 8, 10\]"):
        world_mesh(DeviceMesh("cpu", [[4, 6], [8, 10]]))


def test_the_configuration_chooses_by_names_or_by_position() -> None:
    with job(8):
        mesh = mesh_of(replicate=2, shard=4)
        world = world_mesh(mesh)
        by_position = ShardConfig(mesh=mesh, strategy="hybrid_shard")
        by_name = ShardConfig(mesh=mesh, strategy="hybrid_shard", shard="shard", replicate=["replicate"])
        wanted = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]], "shard and replicate"
        for config in (by_position, by_name):
            assert told(lists_of(config, config.strategy, world)) == wanted
        plain = ShardConfig(mesh=mesh, shard="shard", strategy="no_shard")
        assert told(lists_of(plain, Strategy.NO_SHARD, world)) == (ALONE8, wanted[0], "shard")
        both = ShardConfig(mesh=mesh, shard=("replicate", "shard"))
        assert lists_of(both, both.strategy, world).shard == [list(range(8))]
        one = mesh["shard"]
        assert lists_of(ShardConfig(mesh=one), Strategy.FULL_SHARD, world_mesh(one)).shard == [[0, 1, 2, 3]]
    with pytest.raises(ConfigError, match=r"shard names 'dp', but there is no mesh.*from_toml\(path, mesh=mesh\)"):
        polyshard.shard(nn.Linear(2, 2), ShardConfig(shard="dp"))


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_a_slice_reaches_the_ranks_of_the_dtensors(rank: int) -> None:
    with job(8, rank):
        whole = mesh_of(pp=2, dp=2, tp=2)
        stage = [0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7]
        world = world_mesh(whole["dp"], [whole["tp"], whole["tp"]])
        assert (world.ranks, world.names) == (stage, ("dp", "tp"))
        lists = lists_of(ShardConfig(mesh=whole["dp"]), Strategy.FULL_SHARD, world)
        assert told(lists) == ([[0, 2], [1, 3]], [[0], [1], [2], [3]], "dp")
        refuse_overlap(lists, whole["tp"], world, "w")
        # Without DTensors the slice is all there is.
        assert len(world_mesh(whole["dp"]).ranks) == 2
        # Of the whole mesh, nothing is added.
        assert world_mesh(whole, [whole["tp"]]).names == ("pp", "dp", "tp")
        flat = whole["dp", "tp"]._flatten("dp_tp")
        assert world_mesh(whole["pp"], [flat, whole["tp"]]).names == ("pp", "dp_tp")
        with pytest.raises(ConfigError, match=r"dimension 'dp_tp' .* is not orthogonal"):
            world_mesh(whole["dp"], [flat])
        with pytest.raises(ParameterError, match=r"'w' is a DTensor, and its unit is cut over .*'dp_tp'.* has several"):
            refuse_overlap(lists, flat, world, "w")
        with pytest.raises(ParameterError, match="'w' is a DTensor, and its unit is cut over"):
            refuse_overlap(lists, whole["dp"], world, "w")


def test_overrides_by_names() -> None:
    with job(8):
        mesh = mesh_of(dp_replicate=2, edp=2, ep=2)
        world, replicate = world_mesh(mesh), ("dp_replicate",)
        model = unit_lists(world, ["edp", "ep"], replicate)
        experts = override_lists(world, model, "edp", replicate, "mesh of 'experts'")
        assert told(experts) == (
            [[0, 2], [1, 3], [4, 6], [5, 7]],
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            "edp and dp_replicate",
        )
        assert [divisor_of(choice, experts, model) for choice in ("data", "group", "sum", 2)] == [8, 4, 1, 2]
        # Ranks that share shards are no replicas.
        over = override_lists(world, model, ["dp_replicate"], replicate, "mesh of 'experts'")
        assert told(over) == ([[0, 4], [1, 5], [2, 6], [3, 7]], ALONE8, "dp_replicate")
        with pytest.raises(ConfigError, match=r"mesh of 'experts': 'eep' is no dimension.*'edp'|'ep'"):
            override_lists(world, model, "eep", replicate, "mesh of 'experts'")


@pytest.mark.parametrize("rank", [0, 13])
def test_overrides_by_meshes(rank: int) -> None:
    # torchtitan's: dense and sparse dimensions of the same ranks, where dp * tp = edp * ep.
    with job(16, rank):
        dense, sparse = mesh_of(rep=2, dp=4, tp=2), mesh_of(rep=2, edp=2, ep=4)
        world = world_mesh(dense)
        model = unit_lists(world, ["dp"], ["rep"])
        shards = [[base, base + 4] for base in (0, 1, 2, 3, 8, 9, 10, 11)]
        replicas = [[rank, rank + 8] for rank in range(8)]
        one = override_lists(world, model, sparse["edp"], ["rep"], "mesh")
        two = override_lists(world, model, sparse["rep", "edp"], ["rep"], "mesh")
        for lists in (one, two):
            assert sorted(lists.shard) == shards
            assert sorted(lists.replicate) == replicas
            assert lists.label == "edp and rep"
        with pytest.raises(ConfigError, match=r"mesh has the ranks \[0, 1\], where those of the model are"):
            override_lists(world, model, DeviceMesh("cpu", [0, 1]), [], "mesh")
        ring = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12], [13, 14], [0, 15]])
        crossed = DeviceMesh("cpu", ring, mesh_dim_names=("a", "b"))
        pairs = unit_lists(world, ["tp"])
        with pytest.raises(ConfigError, match="mesh is not orthogonal to the model's: its groups"):
            override_lists(world, pairs, crossed["b"], [], "mesh")
        with pytest.raises(ConfigError, match="not orthogonal"):
            refuse_overlap(pairs, crossed["b"], world, "w")


def test_meshes_in_another_order_are_served_where_ranks_agree_on_shards() -> None:
    with job(4):
        turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("tp", "dp"))
        assert unit_lists(turned, ["dp"]).shard == [[0, 2], [1, 3]]
        down = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("r", "s"))
        assert told(unit_lists(down, ["s"], ["r"]))[:2] == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
        mixed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("r", "s"))
        with pytest.raises(ConfigError, match="ascend in one group that shares shards and descend in another"):
            unit_lists(mixed, ["s"], ["r"])


def test_groups_of_thousands_of_ranks_take_no_time() -> None:
    with job(4096):
        mesh = mesh_of(rep=8, edp=16, ep=32)
        world = world_mesh(mesh)
        model = unit_lists(world, ["edp", "ep"], ["rep"])
        experts = override_lists(world, model, mesh["edp"], ["rep"], "mesh")
        assert (len(experts.shard), experts.data_ranks, model.data_ranks) == (256, 128, 4096)


def experts_model() -> nn.Module:
    """``0``: plain; ``1``: experts, each a module of two layers."""
    experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)])
    return nn.Sequential(nn.Linear(2, 2), experts)


def test_a_parameter_of_two_meshes_is_refused() -> None:
    model: Any = experts_model()
    first, second = model[1]
    first[0].weight = second[0].weight
    with pytest.raises(ParameterError, match=r"is shared.*'1\.0\.0\.weight' over 'edp', '1\.1\.0\.weight' over 'edp'"):
        plan_modules(model, {first: {"mesh": "edp"}, second: {"mesh": "edp"}})
    with pytest.raises(ParameterError, match=r"'1\.1\.0\.weight' over the model"):
        plan_modules(model, {first: {"mesh": "edp"}, second: {}})
    plan_modules(model, {model[1]: {"mesh": "edp"}, first: {}, second: {}})
    plan_modules(model, {first: {"mesh": "edp"}, second: {}}, ignored_parameters=[second[0].weight])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(
            ({"mesh": wrong}, r"overrides mesh for '1' \(rank 0\) by .*Give a dimension of the configuration's mesh")
            for wrong in (3, [], ["dp", "dp"], [1])
        ),
        (
            {"gradient_divisor": "grup"},
            r"gradient_divisor for '1' .* by 'grup'. Did you mean 'group'\? Give 'data', 'gr",
        ),
        *(
            ({"gradient_divisor": wrong}, "Give 'data', 'group', 'sum', or a number above 0")
            for wrong in (0, -1, True, float("nan"), float("inf"), [2])
        ),
    ],
)
def test_wrong_meshes_and_divisors_of_modules_are_refused(settings: dict[str, Any], words: str) -> None:
    model: Any = experts_model()
    with pytest.raises(ConfigError, match=words):
        plan_modules(model, {model[1]: settings})


def test_units_over_two_meshes_in_report_and_dtensors() -> None:
    mesh: Any = WorldMesh.pretended({"dp_replicate": 2, "edp": 2, "ep": 2})
    config = ShardConfig(
        collectives={"name": "fake", "world_size": 8},
        mesh=mesh,
        strategy="hybrid_shard",
        shard=("edp", "ep"),
        replicate="dp_replicate",
        policy={"name": "module_class", "classes": nn.Sequential, "overrides": {"1.*": {"mesh": "edp"}}},
    )
    model = polyshard.shard(experts_model(), config)
    report = polyshard.report(model)
    assert (report.world_size, report.units) == (8, 3)
    assert report.over == {"edp, ep and dp_replicate": ("(root)",), "edp and dp_replicate": ("1.0", "1.1")}
    # A row of each weight, and an element of each bias, at multiples of 16 bytes: 0 and 4; 0, 4, 8 and 12.
    assert report.master_nbytes == 4 * (5 + 13 + 13)
    assert model[0].weight.device_mesh.shape == (2, 4)
    assert model[1][0][0].weight.device_mesh.shape == (2, 2)
