"""Strategies: pairs of each, empty shards, one rank and a thousand, bytes of a step, meshes."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, cast

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    accumulating_step,
    adam,
    draw,
    fake,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    train,
    train_reference,
    units_of,
)
from polyshard.errors import ConfigError, StateError, UnsupportedError, WorldSizeError
from polyshard.planning.meshes import WorldMesh
from polyshard_backends.threaded import ThreadedWorld
from processes import run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

BLOCKS = {"policy": units_of(Block)}


def full(tensor: Any) -> torch.Tensor:
    """The whole of a ``DTensor``; every rank calls it."""
    whole: torch.Tensor = tensor.full_tensor()
    return whole.clone()


def assert_wholes(ranks: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    """What each rank sees of the whole is ``expected``, on all of them to the bit."""
    for wholes in ranks:
        for name, value in wholes.items():
            assert torch.equal(value, ranks[0][name])
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


# Shards without elements.


# One rank, and one of very many.


def test_no_sync_belongs_to_the_outermost_module() -> None:
    model = seeded(Net)
    polyshard.shard(model, polyshard.ShardConfig(collectives=fake(), **BLOCKS))
    block = cast("Net", model).blocks[1]
    with pytest.raises(StateError, match=r"no_sync\(\).*inner.*blocks\.1.*rank 0"), polyshard.no_sync(block):
        pass
    with pytest.raises(StateError, match=r"no_sync\(\) needs a sharded module"), polyshard.no_sync(nn.Linear(2, 2)):
        pass


# Bytes of a step, for each parameter of Ψ: [Table: bytes of a step] in docs/sharding.md. N ranks in H groups of n.

_N, _GROUP, _HOSTS, _MICROBATCHES = 8, 4, 2, 3


def _of(ranks: int) -> float:
    """What a rank sends of a unit in a gather or a reduction among so many."""
    return (ranks - 1) / ranks


#: What a rank sends in parts of Ψ, for each microbatch and for each step, by operation and ranks of the group.
SENT: dict[str, tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]] = {
    "no_shard": ({("all_reduce", _N): 2 * _of(_N)}, {}),
    "zero1": ({("reduce_scatter", _N): _of(_N)}, {("all_gather", _N): _of(_N)}),
    "zero2": ({("all_gather", _N): _of(_N), ("reduce_scatter", _N): _of(_N)}, {}),
    "full_shard": ({("all_gather", _N): 2 * _of(_N), ("reduce_scatter", _N): _of(_N)}, {}),
    "hybrid": (
        {
            ("all_gather", _GROUP): 2 * _of(_GROUP),
            ("reduce_scatter", _GROUP): _of(_GROUP),
            ("all_reduce", _HOSTS): 2 * _of(_HOSTS) / _GROUP,
        },
        {},
    ),
    "hpz": ({("all_gather", _N): _of(_N), ("all_gather", _GROUP): _of(_GROUP), ("reduce_scatter", _N): _of(_N)}, {}),
    "hfsdp": (
        {
            ("all_gather", _GROUP): 2 * _of(_GROUP),
            ("reduce_scatter", _GROUP): _of(_GROUP),
            ("all_to_all", _N): _of(_HOSTS) / _GROUP,
        },
        {("all_to_all", _N): _of(_HOSTS) / _GROUP},
    ),
    # Groups exchange gradients once a step.
    "hfsdp under no_all_reduce": (
        {("all_gather", _GROUP): 2 * _of(_GROUP), ("reduce_scatter", _GROUP): _of(_GROUP)},
        {("all_to_all", _N): 2 * _of(_HOSTS) / _GROUP},
    ),
    # Ranks have whole gradients until then.
    "zero1 under no_sync": ({}, {("all_gather", _N): _of(_N), ("reduce_scatter", _N): _of(_N)}),
}


class Pair(nn.Sequential):
    """Parameters that 8 ranks divide without padding, in reductions neither."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))


@pytest.mark.parametrize("case", SENT)
def test_a_step_sends_what_the_table_says(case: str) -> None:
    strategy, _, waits = case.partition(" under ")
    model = seeded(lambda: nn.Sequential(Pair(), Pair(), Pair()))
    numel = sum(p.numel() for p in model.parameters())
    settings: dict[str, Any] = {"shard_size": _GROUP} if strategy in ("hybrid", "hpz", "hfsdp") else {}
    if strategy in ("full_shard", "hybrid", "hfsdp"):
        # The last block, too, whose backward follows at once.
        settings["reshard_after_forward"] = True
    settings |= {"collectives": fake(0, _N), "policy": units_of(Pair), "batch_nbytes": 0}
    polyshard.shard(model, polyshard.ShardConfig(strategy=strategy, **settings))
    optimizer = adam(model)
    unit = root_of(model).units[0]
    ranks = unit.ranks
    groups: Any = {
        id(each): each for each in (ranks.owner, ranks.gather, ranks.replicate, unit.post_forward_ranks) if each
    }

    def step() -> None:
        for turn in range(_MICROBATCHES):
            with getattr(polyshard, waits)(model) if waits and turn + 1 < _MICROBATCHES else nullcontext():
                model(draw(4, 64, turn=turn)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for group in groups.values():
        group.calls.clear()
    step()
    sent: dict[tuple[str, int], float] = {}
    for group in groups.values():
        for call in group.calls:
            key = call.operation, group.world_size
            sent[key] = sent.get(key, 0) + call.sent / numel
    each, once = SENT[case]
    wanted = {key: _MICROBATCHES * each.get(key, 0) + once.get(key, 0) for key in {*each, *once}}
    assert sent == pytest.approx(wanted)


# Parameters that stay from one backward to the next forward.

LASTING: list[tuple[dict[str, Any], int]] = [
    ({"strategy": "zero1"}, 2),
    ({"strategy": "hfsdp", "shard_size": 2}, 4),
    # Of three groups, which drawn programs do not have.
    ({"strategy": "hfsdp", "shard_size": 2}, 6),
]


@one_by_one("settings, world_size", LASTING)
def test_what_a_program_writes_between_backwards_is_seen_by_the_next_forward(
    settings: dict[str, Any], world_size: int
) -> None:
    model = seeded(Net)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(2.0)
    wanted = [changed(draw(4, 3, turn=1, rank=rank)) for rank in range(world_size)]

    def write(mine: Any, how: str) -> None:
        with torch.no_grad():
            if how == "parameters":
                for parameter in mine.parameters():
                    parameter.mul_(2.0)
            elif how == "local":
                for parameter in mine.parameters():
                    parameter.to_local().mul_(2.0)
            elif how == "data behind an evaluation":
                mine(draw(4, 3))
                for parameter in mine.parameters():
                    parameter.data.mul_(2.0)
            elif how == "load":
                mine.load_state_dict(changed.state_dict())
            else:
                with polyshard.unsharded(mine, writeback=True):
                    for parameter in mine.parameters():
                        parameter.mul_(2.0)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        found = []
        for how in ("parameters", "local", "data behind an evaluation", "load", "whole"):
            mine = sharded_copy(model, rank, world, **BLOCKS, **settings)
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.0)
            square_step(mine, 0, rank)
            optimizer.step()
            square_step(mine, 0, rank)
            write(mine, how)
            found.append(mine(draw(4, 3, turn=1, rank=rank)).detach())
        return found

    for rank, outputs in enumerate(on_ranks(world_size, on_rank)):
        for output in outputs:
            torch.testing.assert_close(output, wanted[rank], rtol=1e-12, atol=1e-12)


# The three chosen by dimensions of a mesh.

#: Over four ranks, two hosts of two: what is chosen, and the shards of parameters and masters that come of it.
CHOSEN: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({}, (4, 4)),
    ({"shard_parameters": "gpu"}, (2, 4)),
    ({"shard_parameters": False}, (1, 4)),
    ({"shard_gradients": True}, (4, 4)),
    ({"shard_parameters": "gpu", "shard_gradients": True}, (2, 4)),
    ({"shard_parameters": False, "shard_gradients": True}, (1, 4)),
    ({"shard": "gpu", "replicate": "host", "strategy": "hybrid", "shard_parameters": False}, (1, 2)),
]


@one_by_one("chosen, shards", CHOSEN)
def test_parameters_gradients_and_state_are_sharded_over_what_each_names(
    chosen: dict[str, Any], shards: tuple[int, int]
) -> None:
    model = seeded(Net)
    settings = {"mesh": WorldMesh.pretended({"host": 2, "gpu": 2}), "shard": ("host", "gpu"), **chosen}

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[dict[str, torch.Tensor], set[tuple[int, int]], int]:
        mine = sharded_copy(model, rank, world, **BLOCKS, **settings)
        units = root_of(mine).units
        train(mine, adam(mine), accumulating_step, rank, 2)
        kept = 1 if shards[0] == 1 else units[1].ranks.gather.world_size  # type: ignore[union-attr]
        sums = sum(0 if unit.gradients.input.sum is None else 1 for unit in units)
        parts = {(kept, unit.ranks.shard_size) for unit in units}
        return {name: full(p.detach()) for name, p in mine.named_parameters()}, parts, sums

    found = on_ranks(4, on_rank)
    expected = train_reference(model, accumulating_step, 4, 2, adam).parameters
    assert_wholes([wholes for wholes, _, _ in found], expected)
    assert {part for _, parts, _ in found for part in parts} == {shards}
    # Whole sums wait nowhere where gradients are sharded.
    assert all((sums == 0) is chosen.get("shard_gradients", False) for _, _, sums in found)


def test_what_groups_cannot_share_is_refused_and_the_model_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(128, 1024), nn.Linear(1024, 128))  # fp8 encodes no smaller ones
    policy = units_of(nn.Linear)
    for wrong, kind, words in (
        ({"shard_size": 2, "precision": "fp8"}, UnsupportedError, r"Fp8 encodes what '0' gathers\. Choose a precision"),
        ({"shard_size": 1}, ConfigError, r"'hfsdp' are of one rank each.*or write 'zero1'"),
        ({"shard_size": 3}, WorldSizeError, "4 ranks cannot be divided into shard groups of 3"),
    ):
        with pytest.raises(kind, match=words):
            polyshard.shard(model, polyshard.ShardConfig(collectives=fake(), policy=policy, strategy="hfsdp", **wrong))
    polyshard.shard(model, polyshard.ShardConfig(collectives=fake(), policy=policy, strategy="hfsdp", shard_size=2))
    model(torch.ones(2, 128)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.numel())


# Norms.


def test_clipping_without_gradients_answers_zero() -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> float:
        mine = sharded_copy(model, rank, world, **BLOCKS)
        return polyshard.clip_grad_norm_(mine, 1.0).item()

    assert on_ranks(2, on_rank) == [0.0, 0.0]


# Whole parameters outside of compute.


def test_unsharded_is_refused_inside_itself_and_inside_a_step() -> None:
    model = seeded(Net)
    polyshard.shard(model, polyshard.ShardConfig(collectives=fake(), **BLOCKS))

    def enters(*_: Any) -> None:
        with polyshard.unsharded(model):
            pass

    def watch(output: torch.Tensor) -> None:
        output.register_hook(enters)

    with polyshard.unsharded(model), pytest.raises(StateError, match=r"already unsharding parameters.*rank 0"):
        enters()
    hook = cast("Net", model).blocks[0].register_forward_pre_hook(enters)
    with pytest.raises(StateError, match=r"during forward/backward.*rank 0.*forward"):
        model(draw(4, 3))
    hook.remove()
    inner = cast("Net", model).blocks[0].up
    hook = inner.register_forward_hook(lambda module, args, output: watch(output))
    out = model(draw(4, 3))
    hook.remove()
    with pytest.raises(StateError, match=r"during forward/backward.*rank 0.*backward"):
        out.sum().backward()
    # None of it left a trace.
    assert_trains(model)


def assert_trains(model: nn.Module) -> None:
    square_step(model, 0, 0)
    assert root_of(model).gathered == ()
    assert all(p.grad is not None for p in model.parameters() if p.numel())


# Beside tensor parallelism.


def of_uneven_parts(rank: int) -> list[str]:
    """Which of the parameters that two parts and two shards cut unevenly torch shows otherwise than whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrong = []
    for rows in (1, 3, 5, 7):
        for dim in (0, 1):
            wanted = torch.arange(rows * 7.0).view(rows, 7)
            model = nn.ParameterDict({"weight": nn.Parameter(distribute_tensor(wanted, mesh["tp"], [Shard(dim)]))})
            polyshard.shard(model, polyshard.ShardConfig(mesh=mesh, shard=("dp",)))
            weight: Any = model["weight"].detach()
            same = torch.equal(weight.full_tensor(), wanted) and weight.norm().full_tensor().isclose(wanted.norm())
            wrong += [] if same else [f"{rows} rows, {weight.placements}"]
    return wrong


@pytest.mark.slow
def test_parts_that_are_cut_unevenly_are_whole_again() -> None:
    assert run_processes(4, of_uneven_parts) == [[]] * 4
