"""``polyshard.placement``: which elements of a whole parameter a rank holds."""

from __future__ import annotations

from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded, sharded_copy, threaded, units_of
from polyshard import Placement
from polyshard.errors import UnsupportedError
from polyshard_backends.threaded import ThreadedWorld
from processes import run_processes
from torch import nn

STRATEGIES = [
    (3, {"strategy": "full_shard"}),
    (2, {"strategy": "no_shard"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2}),
]


def places(model: nn.Module) -> dict[str, tuple[Placement, torch.Tensor]]:
    return {name: (polyshard.placement(p), p.detach().flatten().clone()) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("world_size", "settings"), STRATEGIES)
def test_shape_and_elements_are_those_of_the_unsharded_parameter(world_size: int, settings: dict[str, Any]) -> None:
    plain = dict(seeded(Net).named_parameters())

    def on_rank(rank: int, world: ThreadedWorld) -> list[dict[str, tuple[Placement, torch.Tensor]]]:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block), **settings)
        before = places(model)
        model(draw(4, 3, rank=rank)).sum().backward()
        with polyshard.unsharded(model):
            whole = {name: polyshard.placement(p) for name, p in model.named_parameters()}
        assert whole == {name: place for name, (place, _) in before.items()}
        return [before, places(model)]

    for ranks in zip(*on_ranks(world_size, on_rank), strict=True):
        for name, parameter in plain.items():
            found = sorted((each[name] for each in ranks), key=lambda pair: pair[0].start)
            assert {place.shape for place, _ in found} == {tuple(parameter.shape)}
            assert {place.stride for place, _ in found} == {parameter.stride()}
            assert {place.unit for place, _ in found} == {name.rpartition(".")[0][:8] if "blocks" in name else "(root)"}
            for place, held in found:
                assert torch.equal(held, parameter.detach().flatten()[place.start : place.stop])
            assert sum(place.stop - place.start for place, _ in found) == parameter.numel() * (
                1 if "full" in settings["strategy"] else 2
            )


def test_what_is_not_sharded_lies_here_as_a_whole() -> None:
    assert polyshard.placement(torch.zeros(2, 3)) == Placement((2, 3), (3, 1), 0, 6, None, 0, ((0, 6),))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    polyshard.shard(
        model, polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}), ignored_modules=[model[1]]
    )
    assert polyshard.placement(model[1].weight) == Placement((3, 2), (2, 1), 0, 6, None, 0, ((0, 6),))
    assert polyshard.placement(model[0].weight) == Placement((2, 2), (2, 1), 0, 3, "(root)", 0, ((0, 3), (3, 4)))
    assert polyshard.placement(model[0].bias).shape == (2,)


def test_a_flat_parameter_stands_for_its_units_padded_elements() -> None:
    model = seeded(lambda: nn.Linear(3, 3))
    polyshard.shard(model, polyshard.ShardConfig(collectives={"name": "fake", "world_size": 4, "rank": 1}))
    (flat,) = polyshard.flat_parameters(model)
    place = polyshard.placement(flat)
    assert place.shape == (16,)
    assert (place.start, place.stop) == (4, 8)
    assert flat.numel() == 4


@pytest.mark.parametrize("layout", ["flat", "rows", {"name": "blocks", "size": 4, "smallest": 0}])
@pytest.mark.parametrize(("world_size", "settings"), STRATEGIES)
def test_every_rank_tells_the_same_of_all_pieces(world_size: int, settings: dict[str, Any], layout: Any) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, tuple[Placement, torch.Tensor]]:
        return places(sharded_copy(seeded(Net), rank, world, policy=units_of(Block), layout=layout, **settings))

    ranks = on_ranks(world_size, on_rank)
    plain = dict(seeded(Net).named_parameters())
    for name, parameter in plain.items():
        pieces = {each[name][0].pieces for each in ranks}
        assert len(pieces) == 1
        # Without overlap, and nothing left out.
        taken = sorted(piece for piece in pieces.pop() if piece[0] < piece[1])
        assert [stop for _, stop in taken[:-1]] == [start for start, _ in taken[1:]]
        assert (taken[0][0], taken[-1][1]) == (0, parameter.numel())
        for place, held in (each[name] for each in ranks):
            assert place.pieces[place.shard] == (place.start, place.stop)
            assert held.numel() == place.stop - place.start


def test_rows_are_told_where_the_layout_cuts_between_them() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[Placement, Placement, torch.Size]:
        model = polyshard.shard(seeded(lambda: nn.Linear(6, 10)), threaded(world, rank, layout="rows"))
        return polyshard.placement(model.weight), polyshard.placement(model.bias), model.weight.shape

    found = on_ranks(3, on_rank)
    assert [weight.rows for weight, _, _ in found] == [(0, 4), (4, 8), (8, 10)]
    assert [tuple(shape) for _, _, shape in found] == [(4, 6), (4, 6), (2, 6)]
    assert sum(bias.rows[1] - bias.rows[0] for _, bias, _ in found if bias.rows is not None) == 10


def as_dtensors(rank: int) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8)))
    whole = model[0].weight.detach().clone()
    policy = {"name": "lambda", "fn": lambda module: module is model[0]}
    polyshard.shard(model, polyshard.ShardConfig(layout="rows", policy=policy, collectives="gloo"))
    given = polyshard.as_dtensor(model[0].weight)
    same = torch.equal(given.full_tensor(), whole)
    # No copy: what is written to the one is in the other.
    given.to_local().mul_(2)
    shared = given.to_local().data_ptr() == model[0].weight.data_ptr()
    with polyshard.unsharded(model):
        doubled = torch.equal(model[0].weight, 2 * whole)
    try:
        polyshard.as_dtensor(model[1][0].weight)
    except UnsupportedError as error:
        refused = str(error)
    return [tuple(given.shape), tuple(given.to_local().shape), same, shared, doubled, refused]


@pytest.mark.slow
def test_rows_as_shard_0_gives_them_are_a_dtensor_without_a_copy() -> None:
    for rank, (shape, local, same, shared, doubled, refused) in enumerate(run_processes(2, as_dtensors)):
        assert (shape, local) == ((8, 4), (4, 4))
        assert same
        assert shared
        assert doubled
        # It lies in one unit with another matrix, so that it is not cut in the middle.
        assert refused.startswith(f"The ranks do not hold of '1.0.weight' (rank {rank}) what Shard(0) would give them")


def test_what_is_no_dtensor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"is whole here, or flat\. Use it as it is"):
        polyshard.as_dtensor(torch.zeros(2, 3))


def test_pretended_ranks_have_dtensors_too() -> None:
    model = seeded(lambda: nn.Linear(2, 4, bias=False))
    half = model.weight[:2].detach().clone()
    polyshard.shard(model, polyshard.ShardConfig(layout="rows", collectives={"name": "fake", "world_size": 2}))
    assert torch.equal(polyshard.as_dtensor(model.weight).full_tensor(), torch.cat([half, half]))
