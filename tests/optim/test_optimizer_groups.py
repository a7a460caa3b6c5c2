"""Optimizers of torch, their groups and hooks: as on the unsharded model, or told at an optimizer's first step.

Groups are drawn (``runtime/test_random_programs.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from matrices import FormulaMuon, distance
from parity import Block, Net, adam, draw, local, on_ranks, seeded, sharded_copy, square_step, threaded, units_of, whole
from polyshard.errors import ConfigError, UnsupportedError
from polyshard_backends.threaded import ThreadedWorld
from processes import KeptRanks
from torch import nn

BLOCKS = {"policy": units_of(Block)}

RANKS = KeptRanks()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_hook_that_never_fires_is_refused_at_the_optimizers_first_step(strategy: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(seeded(Net), rank, world, strategy=strategy, **BLOCKS)
        seen: list[torch.Tensor] = []
        handle = model.blocks[1].down.weight.register_hook(seen.append)
        square_step(model, 0, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UnsupportedError, match=rf"'blocks\.1\.down\.weight' has a hook.*rank {rank}.*accumulate"):
            optimizer.step()
        assert not seen
        handle.remove()
        model.blocks[1].down.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
        optimizer.step()
        optimizer.zero_grad()
        square_step(model, 1, rank)
        optimizer.step()
        assert len(seen) == 1

    on_ranks(2, on_rank)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> str:
    """The error of the first step, after which nothing may have changed."""
    square_step(model, 0, rank)
    before = [local(p.detach()).clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises((ConfigError, UnsupportedError)) as caught:
            optimizer.step()
    assert all(torch.equal(local(p.detach()), was) for p, was in zip(model.parameters(), before, strict=True))
    # The model is as good as before.
    other = adam(model)
    other.step()
    other.zero_grad()
    square_step(model, 1, rank)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("kind", "steps"), [(torch.optim.Muon, 0), (torch.optim.Adam, 1)], ids=["that never stepped", "that stepped"]
)
def test_an_optimizer_made_before_sharding_is_refused(kind: type[torch.optim.Optimizer], steps: int) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = seeded(lambda: nn.Linear(3, 4, bias=False))
        optimizer = kind(model.parameters())  # type: ignore[call-arg]
        for _ in range(steps):
            square_step(model, 0, 0)
            optimizer.step()
            optimizer.zero_grad()
        polyshard.shard(model, threaded(world, rank))
        return stepped(model, optimizer, rank)

    for rank, message in enumerate(on_ranks(2, on_rank)):
        assert f"ConfigError: {kind.__name__} holds 'weight', which a DTensor" in message
        assert f"(rank {rank})" in message
        assert "Make the optimizer from model.parameters() behind the sharding" in message


@pytest.mark.parametrize(
    ("world_size", "settings"), [(2, {}), (5, {}), (4, {"strategy": "hybrid_shard", "shard_size": 2})]
)
def test_adafactor_of_torch_is_refused(world_size: int, settings: dict[str, Any]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        optimizer = torch.optim.Adafactor(model.parameters())
        told = stepped(model, optimizer, rank)
        assert not optimizer.state
        return told

    for rank, message in enumerate(on_ranks(world_size, on_rank)):
        assert f"torch.optim.Adafactor cannot step the DTensor 'first.weight' (rank {rank})" in message
        assert "polyshard.optim.WholeTensorOptimizer" in message


def whole_ones(model: nn.Module, kind: str) -> None:
    """Four steps of an optimizer that computes with all elements of parameters, or of matrices."""
    parameters = [p for p in model.parameters() if kind == "LBFGS" or p.dim() == 2]
    optimizer: Any = getattr(torch.optim, kind)(parameters, lr=0.05)

    def closure(turn: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(draw(4, 4, turn=turn)).square().mean()
        loss.backward()
        return loss

    for turn in range(4):
        optimizer.step(partial(closure, turn))


def whole_ones_of(rank: int, kind: str) -> dict[str, torch.Tensor]:
    model = polyshard.shard(Even().double(), polyshard.ShardConfig(policy=units_of(nn.Sequential)))
    whole_ones(model, kind)
    return whole(model)


class Even(nn.Sequential):
    """Two ranks have as many rows of each parameter, which LBFGS of torch asks for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tolerance"), [("LBFGS", 1e-12), ("Muon", None)])
def test_optimizers_of_torch_that_compute_with_whole_parameters(kind: str, tolerance: float | None) -> None:
    plain = Even().double()
    whole_ones(plain, kind)
    wanted = dict(plain.named_parameters())
    if tolerance is None:
        # Its matrices are orthogonalised in bf16. What rounding makes is torch's own distance from the formula in fp64.
        exact = Even().double()
        formula = FormulaMuon([p for p in exact.parameters() if p.dim() == 2], lr=0.05)
        for turn in range(4):
            formula.zero_grad()
            exact(draw(4, 4, turn=turn)).square().mean().backward()
            formula.step()
        rounding = distance(dict(exact.named_parameters()), wanted)
        assert 0 < rounding < 0.2 * distance(dict(Even().double().named_parameters()), wanted)
        tolerance = 1.5 * rounding
    for found in RANKS.run(2, whole_ones_of, kind):
        assert distance(found, wanted) < tolerance


def test_an_optimizer_over_parameters_whose_gradients_go_elsewhere_is_refused() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        flat = polyshard.flat_parameters(model)
        square_step(model, 0, rank)
        with pytest.raises(ConfigError, match=rf"'first\.weight'.*'\(root\)' \(rank {rank}\).*flat_parameters"):
            adam(model).step()
        with pytest.raises(UnsupportedError, match=r"'blocks\.0'"):
            torch.optim.Adafactor(flat[1:]).step()
        torch.optim.AdamW(flat).step()

    on_ranks(2, on_rank)


@pytest.mark.parametrize("strategy", ["no_shard", None])
def test_whole_parameters_may_be_given_to_any_optimizer(strategy: str | None) -> None:
    model = seeded(Net)
    if strategy is not None:
        polyshard.shard(
            model, polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}, strategy=strategy, **BLOCKS)
        )
    model(draw(4, 3)).sum().backward()
    torch.optim.Adafactor(model.parameters()).step()
    torch.optim.AdamW([{"params": []}, {"params": list(model.parameters())}]).step()


def test_a_parameter_group_that_comes_later_is_looked_at() -> None:
    model: Any = polyshard.shard(seeded(Net), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    optimizer = torch.optim.AdamW(model.first.parameters())
    optimizer.step()
    model.last.weight.register_hook(lambda gradient: None)
    optimizer.add_param_group({"params": model.last.parameters()})
    with pytest.raises(UnsupportedError, match=r"'last\.weight' has a hook"):
        optimizer.step()
