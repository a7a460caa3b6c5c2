"""Averages of gradients that travel in eight bits."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, on_ranks, seeded, units_of
from polyshard import ShardConfig, errors
from polyshard.interfaces import Collectives, Group, PluginContext, ReduceOp, Work
from polyshard.registry import Resolved, construct
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_plugins.compressed import Compressed
from torch import nn

CPU = torch.device("cpu")


class Counting(ThreadedCollectives):
    """Counts bytes that leave the rank in exchanges."""

    nbytes = 0

    def __init__(self, world: ThreadedWorld, rank: int) -> None:
        super().__init__(PluginContext("counting", CPU), world, rank)

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        self.nbytes += sum(in_splits) - in_splits[self.rank]
        return super().all_to_all(out, out_splits, input, in_splits)


def compressed(inner: Any, **options: Any) -> Compressed:
    options = {"inner": inner, "min_numel": 1, "block": 64, **options}
    plugin = Resolved(Group.COLLECTIVES, "compressed", "tests:Compressed", "tests", "1", Compressed, options)
    made = construct(plugin, PluginContext("compressed", CPU)).instance
    assert isinstance(made, Compressed)
    return made


def gradients(rank: int, numel: int) -> torch.Tensor:
    # Blocks of very different sizes, as layers have them.
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator) * torch.logspace(-6, 2, numel)


def half_steps(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Half a step of int8 for each element of ``rows`` (``[ranks, n]``): its block's largest magnitude over 254."""
    padded = nn.functional.pad(rows.abs(), (0, -rows.size(1) % block)).unflatten(1, (-1, block))
    largest = padded.amax(2, keepdim=True).expand_as(padded).flatten(1)[:, : rows.size(1)]
    return largest / 254 * (1 + 1e-5)


@pytest.mark.parametrize("numel", [1, 63, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_slice_is_the_mean_within_half_a_step_of_each_rank(numel: int, dtype: torch.dtype) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, int]:
        inner = Counting(world, rank)
        out = torch.empty(numel, dtype=dtype)
        compressed(inner).reduce_scatter(out, gradients(rank, 3 * numel).to(dtype), op=ReduceOp.MEAN).wait()
        return out, inner.nbytes

    everyone = torch.stack([gradients(rank, 3 * numel) for rank in range(3)])
    for rank, (out, nbytes) in enumerate(on_ranks(3, on_rank)):
        slices = everyone[:, rank * numel : (rank + 1) * numel]
        bound = half_steps(slices, 64).mean(0)
        assert ((out.float() - slices.mean(0)).abs() <= bound + 1e-6 * slices.abs().amax(0)).all()
        # Two slices leave the rank: a byte an element, and four for each 64, each padded to 16.
        padded = -(-numel // 16) * 16 + -(-4 * -(-numel // 64) // 16) * 16
        assert nbytes == 2 * padded


def test_replicas_get_the_same_mean_bit_for_bit() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        tensor = gradients(rank, 1001)
        compressed(Counting(world, rank)).all_reduce(tensor.view(7, 143), op=ReduceOp.MEAN).wait()
        return tensor

    everyone = torch.stack([gradients(rank, 1001) for rank in range(3)])
    mean = everyone.mean(0)
    found = on_ranks(3, on_rank)
    assert all(torch.equal(found[0], other) for other in found[1:])
    # Slices of 334 elements begin blocks of their own.
    for start in range(0, 1001, 334):
        part = slice(start, start + 334)
        sent = half_steps(everyone[:, part], 64).mean(0)
        again = half_steps(mean[None, part].abs() + sent, 64)[0]
        assert ((found[0][part] - mean[part]).abs() <= sent + again + 1e-6 * mean[part].abs()).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_lost(bad: float) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        full, out = torch.ones(256), torch.empty(128)
        full[130] = bad if rank else 1.0
        compressed(Counting(world, rank)).reduce_scatter(out, full, op=ReduceOp.MEAN).wait()
        return out

    first, second = on_ranks(2, on_rank)
    assert torch.equal(first, torch.ones(128))
    # Its whole block of 64.
    assert second[:64].isnan().all()
    assert torch.equal(second[64:], torch.ones(64))


def of_sums(collectives: Collectives, rank: int) -> torch.Tensor:
    tensor = torch.arange(200.0) * 1.001 + rank
    collectives.all_reduce(tensor, op=ReduceOp.SUM).wait()
    return tensor


def of_integers(collectives: Collectives, rank: int) -> torch.Tensor:
    tensor = torch.arange(200) + rank * 2
    collectives.all_reduce(tensor, op=ReduceOp.MAX).wait()
    return tensor


def of_few(collectives: Collectives, rank: int) -> torch.Tensor:
    tensor = torch.tensor([0.1, 100.0]) + rank
    collectives.all_reduce(tensor, op=ReduceOp.MEAN).wait()
    return tensor


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (of_sums, torch.arange(200.0) * 1.001 * 2 + 1),
        (of_integers, torch.arange(200) + 2),
        (of_few, torch.tensor([0.6, 100.5])),
    ],
)
def test_what_must_be_exact_travels_as_it_is(ask: Callable[..., torch.Tensor], expected: torch.Tensor) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, int]:
        inner = Counting(world, rank)
        return ask(compressed(inner, min_numel=100), rank), inner.nbytes

    for found, nbytes in on_ranks(2, on_rank):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
        assert nbytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "options", "encoded"),
    [
        ({}, {}, True),
        ({}, {"number": "fp8"}, True),
        ({}, {"slices": False}, False),
        ({"strategy": "no_shard"}, {}, True),
        ({"strategy": "hybrid_shard", "shard_size": 2}, {"slices": False}, True),
    ],
)
def test_training_follows_the_whole_model_closely(
    settings: dict[str, Any], options: dict[str, Any], encoded: bool
) -> None:
    def train(model: nn.Module, step: Callable[[int, torch.Tensor], None]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for turn in range(10):
            generator = torch.Generator().manual_seed(turn)
            step(turn, torch.randn(8, 3, generator=generator))
            optimizer.step()
            optimizer.zero_grad()

    whole = seeded(Net).float()
    begun = copy.deepcopy(whole)

    def whole_step(turn: int, x: torch.Tensor) -> None:
        whole(x).square().mean().backward()

    train(whole, whole_step)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[torch.Tensor], int]:
        with world.lock:
            model = copy.deepcopy(begun)
        inner = Counting(world, rank)
        collectives = compressed(inner, **options)
        polyshard.shard(model, ShardConfig(collectives=collectives, policy=units_of(Block), **settings))

        def step(turn: int, x: torch.Tensor) -> None:
            model(x.view(4, 2, 3)[rank]).square().mean().backward()

        train(model, step)
        with polyshard.unsharded(model):
            return [parameter.detach().clone() for parameter in model.parameters()], inner.nbytes

    for parameters, nbytes in on_ranks(4, on_rank):
        moved = off = 0.0
        for mine, wanted, start in zip(parameters, whole.parameters(), begun.parameters(), strict=True):
            moved += float((wanted - start).detach().square().sum())
            off += float((mine - wanted).detach().square().sum())
        # Of what training moved the parameters by, one part in thirty at most; without encoding, next to nothing.
        assert off**0.5 <= (0.03 if encoded else 1e-5) * moved**0.5
        assert (off > 1e-12 * moved) is encoded
        if settings.get("strategy") != "hybrid_shard":
            assert (nbytes > 0) is encoded


class Silent(Counting):
    """Exchanges nothing."""

    capabilities = property(  # type: ignore[assignment]
        lambda self: dataclasses.replace(super().capabilities, exchanges=False)
    )


def test_inner_collectives_without_exchanges_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match=r"Silent\) do not exchange blocks"):
        compressed(Silent(ThreadedWorld(1), 0))
