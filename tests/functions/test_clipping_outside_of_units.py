"""Norms of gradients of a model that has trained parameters outside of its units: one for all ranks, or an error."""

from __future__ import annotations

import math
from typing import Any

import polyshard
import pytest
import torch
from parity import WAYS, averaged, backward, chain, local, on_ranks, one_by_one, root_of, seeded, threaded
from polyshard.errors import ConfigError, RankMismatchError
from polyshard.interfaces import ReduceOp
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

#: What is ignored here is trained, and its gradients are averaged by hand or not at all.
pytestmark = pytest.mark.filterwarnings("ignore:Nothing averages the gradients of")


def experts() -> Any:
    """A dense layer, and one that the user looks after."""
    return chain(dense=nn.Linear(3, 5), tanh=nn.Tanh(), expert=nn.Linear(5, 2))


def sharded(rank: int, world: ThreadedWorld, **settings: Any) -> nn.Module:
    model = seeded(experts)
    polyshard.shard(model, threaded(world, rank, **settings), ignored_modules=[model.expert])  # type: ignore[list-item]
    backward(model, rank)
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's rows of each, or the whole of what is in no unit."""
    return [local(p.grad).clone() for p in model.parameters() if p.grad is not None]


@one_by_one("world_size, settings", WAYS, "order", [2.0, 1.0, math.inf])
def test_what_the_user_averaged_counts_once(world_size: int, settings: dict[str, Any], order: float) -> None:
    wanted = averaged(world_size, experts)
    flat = torch.cat([p.grad.flatten() for p in wanted.parameters() if p.grad is not None]).abs()
    norm = flat.max() if math.isinf(order) else flat.pow(order).sum().pow(1 / order)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, torch.Tensor]:
        model = sharded(rank, world, **settings)
        for mine, same in zip(model.expert.parameters(), wanted.expert.parameters(), strict=True):  # type: ignore[union-attr]
            mine.grad = same.grad.clone()  # type: ignore[union-attr]
        got = polyshard.clip_grad_norm_(model, 0.01, order)
        return got, model.expert.weight.grad.clone()  # type: ignore[union-attr,operator]

    for got, gradient in on_ranks(world_size, on_rank):
        torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, wanted.expert.weight.grad * (0.01 / (norm + 1e-6)), rtol=1e-12, atol=0)  # type: ignore[union-attr,operator]


@one_by_one("world_size, settings", WAYS, "order", [2.0, math.inf])
def test_what_nobody_averaged_is_refused_by_name_on_all_ranks(
    world_size: int, settings: dict[str, Any], order: float
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded(rank, world, **settings)
        before = gradients(model)
        with pytest.raises(RankMismatchError) as caught:
            polyshard.clip_grad_norm_(model, 0.01, order)
        for now, then in zip(gradients(model), before, strict=True):
            assert torch.equal(now, then)
        return str(caught.value)

    for rank, message in enumerate(on_ranks(world_size, on_rank)):
        assert "'expert.weight' (and of 1 more), which nothing averages" in message
        assert f"(rank {rank})" in message


@pytest.mark.parametrize(("world_size", "settings"), WAYS)
def test_ranks_that_do_not_compare_scale_alike(world_size: int, settings: dict[str, Any]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[float]:
        model = sharded(rank, world, check_ranks=False, **settings)
        if rank == 1:
            model.expert.weight.grad[0, 0] = math.nan  # type: ignore[union-attr,index]
        bad = polyshard.clip_grad_norm_(model, 0.01, 2.0)
        for parameter in model.parameters():
            if parameter.grad is not None:
                local(parameter.grad).fill_(1.0)
        model.expert.weight.grad.add_(rank)  # type: ignore[union-attr,operator]
        return [float(bad.isnan()), polyshard.clip_grad_norm_(model, 0.01, 2.0).item()]

    results = on_ranks(world_size, on_rank)
    assert all(result == results[0] for result in results)
    assert results[0][0] == 1.0


def test_a_rank_without_a_gradient_is_told_apart() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded(rank, world)
        if rank == 1:
            model.expert.zero_grad()  # type: ignore[union-attr,operator]
        with pytest.raises(RankMismatchError) as caught:
            polyshard.clip_grad_norm_(model, 0.01)
        return str(caught.value)

    for message in on_ranks(2, on_rank):
        assert "none on rank 1" in message


def test_frozen_parameters_outside_of_units_are_no_business_of_the_norm() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = seeded(experts)
        model.expert.requires_grad_(False)  # type: ignore[union-attr,operator]
        if rank == 1:
            # A rank may have another one.
            model.expert = nn.Linear(5, 2, bias=False).double().requires_grad_(False)
        polyshard.shard(model, threaded(world, rank), ignored_modules=[model.expert])  # type: ignore[list-item]
        backward(model, rank)
        return polyshard.clip_grad_norm_(model, 0.01)

    first, second = on_ranks(2, on_rank)
    assert torch.equal(first, second)


def test_one_scale_serves_an_optimizer_of_what_is_outside_of_units() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[float, bool]:
        model = sharded(rank, world)
        expert: Any = model.expert
        scaler = polyshard.GradScaler("cpu", init_scale=4.0)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model.dense, expert)]  # type: ignore[union-attr]
        scaler.scale(torch.zeros(()))
        if rank == 1:
            expert.weight.grad[0, 0] = math.inf
        before = expert.bias.detach().clone()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), torch.equal(before, expert.bias)

    assert on_ranks(2, on_rank) == [(2.0, True), (2.0, True)]


@pytest.mark.filterwarnings("error")
def test_the_hook_that_the_documentation_gives_averages() -> None:
    wanted = averaged(3, experts)
    norm = torch.cat([p.grad.flatten() for p in wanted.parameters() if p.grad is not None]).norm()

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model: Any = seeded(experts)

        def average(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            root_of(model).collectives.all_reduce(parameter.grad, op=ReduceOp.MEAN).wait()

        for parameter in model.expert.parameters():
            parameter.register_post_accumulate_grad_hook(average)
        polyshard.shard(model, threaded(world, rank), ignored_modules=[model.expert])
        backward(model, rank)
        return polyshard.clip_grad_norm_(model, 0.01)

    for got in on_ranks(3, on_rank):
        torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("error")
@one_by_one("world_size, settings", WAYS, "order", [2.0, math.inf])
def test_what_each_rank_owns_counts_for_all(world_size: int, settings: dict[str, Any], order: float) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model: Any = seeded(experts)
        own = dict.fromkeys(model.expert.parameters(), "local")
        polyshard.shard(model, threaded(world, rank, **settings), ignored_parameters=own)
        backward(model, rank)
        held = gradients(model.expert)
        return polyshard.clip_grad_norm_(model, math.inf, order), held

    results = on_ranks(world_size, on_rank)
    dense = averaged(world_size, experts).dense
    assert isinstance(dense, nn.Module)
    every = [*gradients(dense), *(each for _, held in results for each in held)]
    norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in every]), order)
    for got, _ in results:
        torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)


def test_another_word_about_what_is_ignored_is_refused() -> None:
    model = seeded(experts)
    with pytest.raises(ConfigError, match=r"ignored_parameters says 'mine' of a parameter of shape \(5, 3\)"):
        polyshard.shard(
            model, polyshard.ShardConfig(collectives="fake"), ignored_parameters={next(model.parameters()): "mine"}
        )
