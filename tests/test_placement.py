"""``polyshard.placement``: which elements of a whole parameter a rank holds."""

from __future__ import annotations

from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded, sharded_copy, threaded, units_of
from polyshard import Placement
from polyshard_backends.threaded import ThreadedWorld
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


def test_elements_are_counted_in_memory_order() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        conv = seeded(lambda: nn.Conv2d(2, 3, 3, bias=False)).to(memory_format=torch.channels_last)
        whole = conv.weight.detach().clone(memory_format=torch.preserve_format)
        model = polyshard.shard(conv, threaded(world, rank))
        place = polyshard.placement(model.weight)
        assert place.shape == (3, 2, 3, 3)
        assert place.stride == whole.stride()
        return whole.as_strided((54,), (1,))[place.start : place.stop] - model.weight.detach()

    for difference in on_ranks(2, on_rank):
        assert difference.numel() == 27
        assert not difference.any()


def test_what_is_not_sharded_lies_here_as_a_whole() -> None:
    assert polyshard.placement(torch.zeros(2, 3)) == Placement((2, 3), (3, 1), 0, 6, None)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    polyshard.shard(
        model, polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}), ignored_modules=[model[1]]
    )
    assert polyshard.placement(model[1].weight) == Placement((3, 2), (2, 1), 0, 6, None)
    assert polyshard.placement(model[0].weight) == Placement((2, 2), (2, 1), 0, 3, "(root)")
    assert polyshard.placement(model[0].bias).shape == (2,)


def test_a_flat_parameter_stands_for_its_units_padded_elements() -> None:
    model = seeded(lambda: nn.Linear(3, 3))
    polyshard.shard(model, polyshard.ShardConfig(collectives={"name": "fake", "world_size": 4, "rank": 1}))
    (flat,) = polyshard.flat_parameters(model)
    place = polyshard.placement(flat)
    assert place.shape == (16,)
    assert (place.start, place.stop) == (4, 8)
    assert flat.numel() == 4
