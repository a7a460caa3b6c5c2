"""Optimizers that cannot be right on pieces are refused at their first step, on all ranks, with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, adam, assert_parity, draw, on_ranks, seeded, sharded_copy, square_step, units_of
from polyshard.errors import ConfigError, UnsupportedError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
Groups = list[dict[str, Any]]


def by_dims(model: nn.Module, dims: Callable[[torch.Tensor], int]) -> Groups:
    """As nanoGPT does, with ``dims`` for what it asks each parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if dims(p) >= 2], "weight_decay": 0.5},
        {"params": [p for p in parameters if dims(p) < 2], "weight_decay": 0.0},
    ]


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(by_dims(model, lambda p: len(polyshard.placement(p).shape)), lr=1e-2)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_groups_by_the_whole_shape_decay_as_the_unsharded_models_do(strategy: str) -> None:
    assert_parity(seeded(Net), world_size=3, optimizer=decaying, settings={"strategy": strategy, **BLOCKS})


def test_groups_made_before_sharding_do_too() -> None:
    before: dict[int, torch.optim.Optimizer] = {}

    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        optimizer = torch.optim.AdamW(by_dims(model, torch.Tensor.dim), lr=1e-2)
        before[id(polyshard.shard(model, config))] = optimizer
        return model

    def made(model: nn.Module) -> torch.optim.Optimizer:
        return before.get(id(model)) or decaying(model)

    assert_parity(seeded(Net), world_size=2, optimizer=made, settings=BLOCKS, wrap=wrap)


def stepped(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], rank: int) -> str:
    """The error of the first step, after which nothing may have changed."""
    square_step(model, 0, rank)
    optimizer = make(model)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises((ConfigError, UnsupportedError)) as caught:
            optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(p.detach(), was) for p, was in zip(model.parameters(), before, strict=True))
    # The model is as good as before.
    other = adam(model)
    other.step()
    other.zero_grad()
    square_step(model, 1, rank)
    return f"{type(caught.value).__name__}: {caught.value}"


def with_outside(model: nn.Module) -> torch.optim.Optimizer:
    """The group that decays is not empty: it holds a matrix that is not sharded."""
    groups = by_dims(model, torch.Tensor.dim)
    groups[0]["params"].append(nn.Parameter(torch.ones(2, 2)))
    return torch.optim.AdamW(groups)


def by_rate(model: nn.Module) -> torch.optim.Optimizer:
    first, second = by_dims(model, torch.Tensor.dim)
    return torch.optim.SGD([{"params": first["params"], "lr": 1.0}, {"params": second["params"], "lr": 0.1}])


def of_matrices_alone(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if len(polyshard.placement(p).shape) == 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.0}, {"params": [], "weight_decay": 0.1}])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda model: torch.optim.AdamW(by_dims(model, torch.Tensor.dim)),
            ["ConfigError: ", "group 0 is empty", "'first.weight', of shape (5, 3), is in group 1"],
        ),
        (with_outside, ["ConfigError: ", "group 0 decays and holds no sharded matrix", "'first.weight'"]),
        (by_rate, ["ConfigError: The parameter groups of SGD", "group 0 is empty"]),
        (of_matrices_alone, ["ConfigError: ", "group 1 is empty", "is in group 0"]),
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            ["UnsupportedError: torch.optim.LBFGS", "inner products"],
        ),
        (
            lambda model: torch.optim.Adafactor(model.parameters()),
            ["UnsupportedError: torch.optim.Adafactor", "'first.weight'"],
        ),
    ],
)
@pytest.mark.parametrize(
    ("world_size", "settings"), [(2, {}), (5, {}), (4, {"strategy": "hybrid_shard", "shard_size": 2})]
)
def test_what_is_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer], words: list[str], world_size: int, settings: dict[str, Any]
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        return stepped(sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings), make, rank)

    for rank, message in enumerate(on_ranks(world_size, on_rank)):
        assert f"rank {rank}" in message
        for word in words:
            assert word in message


def test_muon_made_before_sharding_is_refused() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = seeded(lambda: nn.Linear(3, 4, bias=False))
        muon = torch.optim.Muon(model.parameters())
        polyshard.shard(model, polyshard.ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}))
        return stepped(model, lambda _: muon, rank)

    for message in on_ranks(2, on_rank):
        assert "UnsupportedError: torch.optim.Muon orthogonalises whole matrices" in message
        assert "Use polyshard.optim.Muon, strategy='no_shard'" in message


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


def flats(model: nn.Module) -> Groups:
    flat = polyshard.flat_parameters(model)
    return [{"params": [], "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]


def apart(model: nn.Module) -> Groups:
    """A user who means it: nothing sharded decays, and matrices have a group of their own."""
    matrices, vectors = by_dims(model, lambda p: len(polyshard.placement(p).shape))
    outside = {"params": [nn.Parameter(torch.ones(2, 2))], "weight_decay": 0.1}
    return [outside, {**matrices, "weight_decay": 0.0}, vectors]


def without_vectors(model: nn.Module) -> Groups:
    matrices, _ = by_dims(model, lambda p: len(polyshard.placement(p).shape))
    return [matrices, {"params": [], "weight_decay": 0.0}]


@pytest.mark.parametrize("groups", [flats, apart, without_vectors])
def test_what_is_let_through(groups: Callable[[nn.Module], Groups]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer = torch.optim.AdamW(groups(model))
        square_step(model, 0, rank)
        optimizer.step()

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
    torch.optim.AdamW(by_dims(model, torch.Tensor.dim)).step()
    torch.optim.AdamW([{"params": []}, {"params": list(model.parameters())}]).step()


def test_an_optimizer_that_has_stepped_already_is_looked_at_once_its_parameters_are_sharded() -> None:
    model = seeded(Net)
    optimizer = torch.optim.Adafactor(model.parameters())
    polyshard.shard(seeded(Net), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    optimizer.step()
    polyshard.shard(model, polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    with pytest.raises(UnsupportedError, match="Adafactor"):
        optimizer.step()


def test_a_parameter_group_that_comes_later_is_looked_at() -> None:
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    optimizer.step()
    optimizer.add_param_group({"params": [], "weight_decay": 0.1})
    with pytest.raises(ConfigError, match="group 1 is empty"):
        optimizer.step()


def by_names_as_trainers_do(model: nn.Module) -> torch.optim.Optimizer:
    """What has no bias or norm that is to be trained leaves the group that does not decay empty."""
    return torch.optim.AdamW(
        [{"params": list(model.parameters()), "weight_decay": 0.5}, {"params": [], "weight_decay": 0.0}], lr=1e-2
    )


def test_an_empty_group_that_no_matrix_was_meant_for_trains_as_the_unsharded_model() -> None:
    assert_parity(seeded(Net), world_size=2, optimizer=by_names_as_trainers_do, settings=BLOCKS)
