"""Plans of models over meshes: bytes of each group of ranks, beside formulas and what the engine asks to be sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from polyshard import ShardConfig
from polyshard.errors import ConfigError
from polyshard.inspect import outermost_model
from polyshard.interfaces import PluginContext
from polyshard.planning.meshes import WorldMesh
from polyshard_backends.fake import FakeCollectives
from polyshard_tools.forecast import Operation, Plan, ShapedBatches, Span, UnitGroup, plan
from polyshard_tools.forecast.recording import StepRecorder
from polyshard_tools.forecast.trace import RecordedCollectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH, DEPTH, EXPERTS, ROWS = 64, 3, 4, 8


class Experts(nn.Module):
    """This rank's: ``EXPERTS`` of two matrices each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ self.up) @ self.down).mean(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + self.experts(self.mixed(x))
        return mixed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


#: Elements of a block's own matrix, and of the head; of a block's experts on one rank.
DENSE, SPARSE = WIDTH * WIDTH, EXPERTS * 2 * WIDTH * 2 * WIDTH
BATCH = ShapedBatches.parse(f"float32[{ROWS},{WIDTH}]")


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def config_over(sizes: Mapping[str, int], **settings: Any) -> ShardConfig:
    policy = {"name": "module_class", "classes": [Block, Experts], "overrides": {"Experts": {"mesh": "edp"}}}
    return ShardConfig(mesh=WorldMesh.pretended(sizes), precision="bf16", **{"policy": policy, **settings})


def sent(found: Plan) -> dict[tuple[Operation, str, int], int]:
    return {(row.operation, row.over, row.ranks): row.received_nbytes for row in found.traffic}


@pytest.mark.parametrize("batch", [None, BATCH])
@pytest.mark.parametrize(("edp", "ep"), [(2, 2), (4, 4)])
def test_experts_and_the_rest_by_hand(edp: int, ep: int, batch: ShapedBatches | None) -> None:
    world = edp * ep
    found = plan(
        config_over({"edp": edp, "ep": ep}, shard=("edp", "ep")), on_meta(Net), world, batch=batch, samples=ROWS
    )
    dense, sparse = (DEPTH + 1) * DENSE, DEPTH * SPARSE
    # fp32 masters, gradients and two states over the ranks that share them; whole in bf16. Everything divides evenly.
    assert found.padding == 0
    assert found.groups == (
        UnitGroup("edp, ep", "", world, 1, DEPTH + 1, 4 * dense // world, 4 * dense // world, 8 * dense // world,
                  2 * dense),
        UnitGroup("edp", "", edp, 1, DEPTH, 4 * sparse // edp, 4 * sparse // edp, 8 * sparse // edp, 2 * sparse),
    )  # fmt: skip
    # Gathered for forward and backward, but the root once; each reduced once. All but the own part comes from others.
    assert sent(found) == {
        (Operation.ALL_GATHER, "edp, ep", world): 2 * (2 * dense - DENSE) * (world - 1) // world,
        (Operation.ALL_GATHER, "edp", edp): 2 * 2 * sparse * (edp - 1) // edp,
        (Operation.REDUCE_SCATTER, "edp, ep", world): 2 * dense * (world - 1) // world,
        (Operation.REDUCE_SCATTER, "edp", edp): 2 * sparse * (edp - 1) // edp,
    }


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_as_much_is_sent_as_the_engine_asks_for(strategy: str) -> None:
    sizes = {"rep": 2, "edp": 2, "ep": 4}
    # Replicas are of hybrid strategies.
    names = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}
    settings: dict[str, Any] = {"shard": ("edp", "ep"), "strategy": names.get(strategy, strategy)}
    settings["replicate"] = "rep" if strategy in names else None
    config = config_over(sizes, **settings)
    found = plan(config, on_meta(Net), 16, batch=BATCH, samples=ROWS)

    # The same on the CPU, with values, over collectives that note what one rank would send.
    collectives = FakeCollectives(PluginContext("fake", torch.device("cpu")), 0, 16)
    model = polyshard.shard(Net(), config_over(sizes, collectives=collectives, device="cpu", **settings))
    groups = {
        group
        for unit in outermost_model(model, "test").units
        for group in (unit.shard, unit.replicate)
        if isinstance(group, FakeCollectives)
    }
    for _ in range(2):
        for group in groups:
            group.calls.clear()
        model(torch.ones(ROWS, WIDTH)).backward()
    # A training step sends nothing to the rest of the world.
    expected = Counter[tuple[str, int]]()
    for group in groups:
        for call in group.calls:
            expected[call.operation, group.world_size] += call.sent_nbytes
    assert sum(expected.values())
    planned = Counter[tuple[str, int]]()
    for (operation, _, ranks), nbytes in sent(found).items():
        planned[operation.value, ranks] += nbytes
    assert planned == expected


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return mixed


class Parallel(nn.Module):
    """Blocks in parts over ``tp`` of four, in a job of 4 x 4 ranks that this process pretends."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        self.feeds = nn.ModuleList(Feed() for _ in range(DEPTH))
        for feed in self.feeds:
            parallelize_module(feed, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)


def test_parts_of_tensors_are_a_group_of_their_own() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    try:
        model = on_meta(Parallel)
        policy = {"name": "module_class", "classes": Feed}
        found = plan(config_over({"dp": 4, "tp": 4}, shard="dp", policy=policy), model, 16)
        part = DEPTH * 8 * WIDTH * WIDTH // 4
        by_parts = {group.parts: group for group in found.groups}
        assert by_parts["tp"] == UnitGroup("dp", "tp", 4, 1, DEPTH, part, part, 2 * part, 2 * part)
        assert by_parts[""].parameters_nbytes == 4 * DENSE // 4
        assert sent(found)[Operation.REDUCE_SCATTER, "dp", 4] == 2 * (part + DENSE) * 3 // 4
        with pytest.raises(ConfigError, match=r"'feeds.0.up.weight' is a DTensor.*job of 16, and the plan is of 32"):
            plan(config_over({"dp": 8, "tp": 4}, shard="dp", policy=policy), on_meta(Parallel), 32)
    finally:
        dist.destroy_process_group()


def test_a_mesh_that_is_not_of_the_planned_ranks_is_named() -> None:
    with pytest.raises(ConfigError, match="the mesh edp=2, ep=2 is not one of the ranks 0 to 7"):
        plan(config_over({"edp": 2, "ep": 2}, shard=("edp", "ep")), on_meta(Net), 8)
    with pytest.raises(ConfigError, match="'edp' is no dimension of the mesh"):
        plan(config_over({"dp": 2, "ep": 2}, shard=("dp", "ep")), on_meta(Net), 4)


def test_groups_are_told_by_dimensions_and_reach_over_their_own_hosts() -> None:
    world = RecordedCollectives(StepRecorder(), range(16), {"pp": 1, "edp": 2, "tp": 4, "ep": 2})
    rows = [[row, row + 1, row + 8, row + 9] for row in (0, 2, 4, 6)]
    part = world.partition(rows)
    assert part.span.over == ("edp", "ep")
    # As many ranks side by side would be on one host of eight.
    assert (part.span.hosts(8), Span(range(4)).hosts(8)) == (2, 1)
    assert part.partition([[0, 2], [1, 3]]).span.over == ("edp",)
    # Three of a dimension of four are none of the mesh's.
    assert world.partition([[0, 2, 4], [rank for rank in range(16) if rank not in (0, 2, 4)]]).span.over == ()
