"""Optimizers of torch, their groups, hooks and states: right over pieces, or told at an optimizer's first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_all_close,
    assert_parity,
    draw,
    on_ranks,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    units_of,
    whole,
)
from polyshard.errors import ConfigError, ConfigTypeError, StateError, UnsupportedError
from polyshard.optim import decay_groups
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
Groups = list[dict[str, Any]]


def helped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decay_groups(model, 0.5, leave_out=[model.last]), lr=1e-2)  # type: ignore[list-item]


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.5},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize("make", [helped, by_name])
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (3, {}),
        (2, {"layout": "rows"}),
        (2, {"strategy": "no_shard"}),
        (4, {"strategy": "hybrid_shard", "shard_size": 2}),
    ],
)
def test_groups_decay_as_those_of_the_unsharded_model(
    make: Callable[[nn.Module], torch.optim.Optimizer], world_size: int, settings: dict[str, Any]
) -> None:
    assert_parity(seeded(Net), world_size=world_size, optimizer=make, settings={**BLOCKS, **settings})


def test_decay_groups_are_those_of_the_whole_shapes() -> None:
    model = seeded(Net)
    model.blocks[0].requires_grad_(False)  # type: ignore[index]
    names = {parameter: name for name, parameter in model.named_parameters()}

    def seen() -> list[tuple[set[str], float]]:
        groups = decay_groups(model, 0.1, leave_out=[model.last])  # type: ignore[list-item]
        return [({names[p] for p in group["params"]}, group["weight_decay"]) for group in groups]

    expected = [
        ({"first.weight", *(f"blocks.{i}.{layer}.weight" for i in (1, 2) for layer in ("up", "down"))}, 0.1),
        ({"first.bias", "blocks.1.up.bias", "blocks.2.up.bias", "last.weight", "last.bias"}, 0.0),
    ]
    assert seen() == expected
    polyshard.shard(model, polyshard.ShardConfig(collectives={"name": "fake", "world_size": 3}, **BLOCKS))
    assert seen() == expected
    assert len(decay_groups(model.first, 0.1)) == 2  # type: ignore[arg-type]
    assert [group["weight_decay"] for group in decay_groups(nn.LayerNorm(3), 0.1)] == [0.0]


def test_decay_groups_refuse_what_they_cannot_know() -> None:
    model = seeded(Net)
    with pytest.raises(ConfigTypeError, match="decay_groups takes a model, not a list"):
        decay_groups(list(model.parameters()), 0.1)  # type: ignore[arg-type]
    with pytest.raises(ConfigTypeError, match="leave_out of decay_groups must be a list of modules"):
        decay_groups(model, 0.1, leave_out="last")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Linear that is not inside the model"):
        decay_groups(model, 0.1, leave_out=[nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match=r"must not be negative, but it is -0\.1"):
        decay_groups(model, -0.1)
    with pytest.raises(ConfigTypeError, match="weight_decay of decay_groups must be a number"):
        decay_groups(model, "0.1")  # type: ignore[arg-type]


def without_empty(model: nn.Module) -> Groups:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def one_by_one(model: nn.Module) -> Groups:
    return [{"params": [p], "weight_decay": 0.1 if p.ndim >= 2 else 0.0} for p in model.parameters()]


@pytest.mark.parametrize("groups", [without_empty, one_by_one])
def test_groups_by_the_dimensions_of_pieces_that_lost_their_decay_are_told(groups: Callable[..., Groups]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer = torch.optim.AdamW(groups(model))
        for turn in range(2):
            square_step(model, turn, rank)
            optimizer.step()

    with pytest.warns(
        UserWarning, match=r"No parameter group of AdamW decays, and 'first\.weight'.*decay_groups"
    ) as told:
        on_ranks(2, on_rank)
    # Once, by one rank.
    assert len(told) == 1


def none_at_all(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": list(model.parameters()), "weight_decay": 0.0}], weight_decay=0.0)


def split(model: nn.Module) -> torch.optim.Optimizer:
    """As a trainer does that was told not to decay."""
    return torch.optim.AdamW([{**group, "weight_decay": 0.0} for group in decay_groups(model, 0.1)])


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (none_at_all, "flat"),
        (split, "flat"),
        (lambda model: torch.optim.SGD(without_empty(model), lr=0.1), "flat"),
        (lambda model: torch.optim.AdamW(without_empty(model)), "rows"),
        (lambda model: torch.optim.AdamW(model.parameters()), "flat"),
    ],
)
def test_groups_that_mean_it_are_not_told_of(make: Callable[[nn.Module], torch.optim.Optimizer], layout: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, layout=layout, **BLOCKS)
        square_step(model, 0, rank)
        make(model).step()

    on_ranks(2, on_rank)


def training(name: str, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=1e-2, **settings)


@pytest.mark.parametrize(
    "make",
    [
        training("SGD", momentum=0.9, nesterov=True, fused=True),
        training("Adam", fused=True),
        training("AdamW", amsgrad=True, foreach=False),
        training("Adagrad", fused=True),
        training("Adamax", foreach=True),
        training("NAdam"),
        training("RAdam"),
        training("RMSprop", centered=True),
        training("Rprop"),
        training("Adadelta"),
        training("ASGD"),
    ],
)
def test_optimizers_of_torch_that_treat_elements_alike_are_right(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    assert_parity(seeded(Net), world_size=2, optimizer=make, settings=BLOCKS)


def test_a_group_that_is_added_later_trains() -> None:
    def train(model: nn.Module, ranks: list[int]) -> None:
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[:2], lr=1e-2, weight_decay=0.5)
        for turn in range(3):
            if turn == 1:
                optimizer.add_param_group({"params": parameters[2:], "weight_decay": 0.1})
            for rank in ranks:
                (model(draw(4, 3, turn=turn, rank=rank)).square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = seeded(Net)
    train(plain, [0, 1])

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        train(model, [rank])
        return whole(model)

    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    assert_all_close(on_ranks(2, on_rank), wanted)


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
        assert len(seen) == bool(model.blocks[1].down.weight.numel())

    on_ranks(2, on_rank)


def test_a_hook_of_what_a_single_rank_computes_with_fires_and_is_let_through() -> None:
    model: Any = polyshard.shard(
        seeded(Net), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 1}, strategy="no_shard")
    )
    seen: list[torch.Tensor] = []
    model.first.weight.register_hook(seen.append)
    model(draw(4, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert len(seen) == 1


def test_state_of_whole_parameters_is_refused_by_name() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = seeded(Net)
        optimizer = torch.optim.Adam(model.parameters())
        square_step(model, 0, 0)
        optimizer.step()
        optimizer.zero_grad()
        polyshard.shard(model, threaded(world, rank, **BLOCKS))
        square_step(model, 1, rank)
        with pytest.raises(
            StateError, match=rf"Adam has 'exp_avg' of the whole 'first\.weight', \(5, 3\).*rank {rank}"
        ):
            optimizer.step()
        again = torch.optim.Adam(model.parameters())
        again.step()
        again.load_state_dict(again.state_dict())
        again.step()

    on_ranks(2, on_rank)
