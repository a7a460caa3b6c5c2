"""A gather whose bytes are no dtype: a caster that sends parameters as int8 with scales."""

from __future__ import annotations

import copy

import polyshard
import pytest
import torch
from parity import Block, Net, draw, fake, on_ranks, seeded, sharded_copy, units_of, whole_of
from polyshard.errors import RankMismatchError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from wires import Int8Wire


def inputs(turn: int, rank: int) -> torch.Tensor:
    return draw(8, 3, turn=turn, rank=rank).float()


def quantised(flat: torch.Tensor, ranks: int) -> torch.Tensor:
    """What 8 bits with one scale a shard make of ``flat``."""
    shards = torch.zeros(ranks * -(-flat.numel() // ranks))
    shards[: flat.numel()] = flat
    rows = shards.view(ranks, -1)
    scales = rows.abs().amax(1, keepdim=True) / 127.0
    return ((rows / scales).round() * scales).reshape(-1)[: flat.numel()]


def test_an_encoded_wire_is_decoded_into_what_computes() -> None:
    # One parameter of 256 elements: its shards are equal parts of it.
    model = nn.Linear(16, 16, bias=False)
    weight = model.weight.detach().clone()
    expected = quantised(weight.flatten(), 4).view(16, 16)
    assert (expected - weight).abs().max() > 0
    x = torch.randn(8, 16)
    casters = [Int8Wire() for _ in range(4)]

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, torch.Tensor]:
        mine = sharded_copy(model, rank, world, precision=casters[rank])
        output = mine(x)
        output.square().mean().backward()
        mine(x)
        assert mine.weight.grad is not None
        return output.detach(), mine.weight.grad

    ranks = on_ranks(4, on_rank)
    reference = expected.clone().requires_grad_(True)
    wanted = x @ reference.T
    wanted.square().mean().backward()
    assert reference.grad is not None
    for output, _ in ranks:
        torch.testing.assert_close(output, wanted.detach(), rtol=1e-5, atol=1e-6)
    gradient = whole_of(weight, [each for _, each in ranks])
    torch.testing.assert_close(gradient, reference.grad, rtol=1e-5, atol=1e-6)
    # Once when the model is sharded, and once a step, on every rank.
    assert [caster.prepared for caster in casters] == [[("",), ("",), ("",)]] * 4


@pytest.mark.slow
def test_an_encoded_wire_trains_within_its_quantisation_error() -> None:
    model = seeded(Net).float()
    turns = 30

    def target(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.sum(1), x[:, 0] - x[:, 1]], 1)

    def train(mine: nn.Module, rank: int, ranks: int) -> list[float]:
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-2)
        losses = []
        for turn in range(turns):
            optimizer.zero_grad()
            x = inputs(turn, rank) if ranks > 1 else torch.cat([inputs(turn, each) for each in range(2)])
            loss = (mine(x) - target(x)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        return losses

    exact = train(copy.deepcopy(model), 0, 1)
    ranks = on_ranks(
        2,
        lambda rank, world: train(
            sharded_copy(model, rank, world, precision=Int8Wire(), policy=units_of(Block)), rank, 2
        ),
    )
    mean = [sum(losses) / 2 for losses in zip(*ranks, strict=True)]
    assert exact[-1] < 0.5 * exact[0]
    # 8 bits: each weight is off by at most 1/254 of its shard's largest; a loss that follows the exact one to 5 %.
    assert mean != exact
    torch.testing.assert_close(mean, exact, rtol=0.05, atol=0.02)


def test_an_encoded_wire_moves_a_quarter_of_the_bytes() -> None:
    moved = {}
    for name, precision in (("fp32", "none"), ("int8", Int8Wire())):
        collectives = fake()
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        polyshard.shard(
            model,
            polyshard.ShardConfig(collectives=collectives, precision=precision, policy=units_of(nn.Linear)),
        )
        model(torch.randn(2, 64)).sum().backward()
        moved[name] = [call.numel * call.dtype.itemsize for call in collectives.calls if call.operation == "all_gather"]
    # A unit's 64 * 64 and 64 parameters over 4 ranks: 1024 and 16 elements a rank, in fp32, or in int8 behind 16 bytes.
    assert moved["fp32"] == [4 * 1024 * 4, 4 * 16 * 4] * 4
    assert moved["int8"] == [4 * (1024 + 16 + 16)] * 4


def test_ranks_that_part_in_the_first_step_are_told_what_would_travel() -> None:
    class TwoWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 64)])

        def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
            return self.ways[way](x).sum()

    model = TwoWays()

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        mine = sharded_copy(model, rank, world, precision=Int8Wire(), policy=units_of(nn.Linear))
        with pytest.raises(RankMismatchError) as caught:
            mine(torch.ones(2, 16), rank)
        return str(caught.value)

    for text in on_ranks(2, on_rank):
        # Half of 16 * 16 + 16 and of 16 * 64 + 64 parameters, padded to 16 bytes, behind a header of 16 bytes.
        assert "rank 0: all_gather of ways.0 (320 elements of torch.uint8)" in text
        assert "rank 1: all_gather of ways.1 (1120 elements of torch.uint8)" in text
