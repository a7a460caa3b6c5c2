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
    adam,
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


def by_dims(model: nn.Module, dims: Callable[[torch.Tensor], int]) -> Groups:
    """As nanoGPT does, with ``dims`` for what it asks each parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if dims(p) >= 2], "weight_decay": 0.5},
        {"params": [p for p in parameters if dims(p) < 2], "weight_decay": 0.0},
    ]


def helped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decay_groups(model, 0.5, leave_out=[model.last]), lr=1e-2)  # type: ignore[list-item]


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.5},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def by_shape(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(by_dims(model, lambda p: len(polyshard.placement(p).shape)), lr=1e-2)


def all_in_the_first(model: nn.Module) -> torch.optim.Optimizer:
    """What has no bias or norm that is to be trained leaves the group that does not decay empty."""
    return torch.optim.AdamW(
        [{"params": list(model.parameters()), "weight_decay": 0.5}, {"params": [], "weight_decay": 0.0}], lr=1e-2
    )


@pytest.mark.parametrize("make", [helped, by_name, by_shape, all_in_the_first])
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


def test_groups_made_before_sharding_do_too() -> None:
    before: dict[int, torch.optim.Optimizer] = {}

    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        optimizer = torch.optim.AdamW(by_dims(model, torch.Tensor.dim), lr=1e-2)
        before[id(polyshard.shard(model, config))] = optimizer
        return model

    def made(model: nn.Module) -> torch.optim.Optimizer:
        return before.get(id(model)) or by_shape(model)

    assert_parity(seeded(Net), world_size=2, optimizer=made, settings=BLOCKS, wrap=wrap)


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
    return [group for group in by_dims(model, torch.Tensor.dim) if group["params"]]


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


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (none_at_all, "flat"),
        (split, "flat"),
        (lambda model: torch.optim.SGD(without_empty(model), lr=0.1), "flat"),
        (lambda model: torch.optim.AdamW(without_empty(model)), "rows"),
        (lambda model: torch.optim.AdamW(model.parameters()), "flat"),
        (lambda model: torch.optim.AdamW(flats(model)), "flat"),
        (lambda model: torch.optim.AdamW(apart(model)), "flat"),
        (lambda model: torch.optim.AdamW(without_vectors(model)), "flat"),
    ],
)
def test_groups_that_mean_it_are_let_through_without_a_word(
    make: Callable[[nn.Module], torch.optim.Optimizer], layout: str
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, layout=layout, **BLOCKS)
        optimizer = make(model)
        square_step(model, 0, rank)
        optimizer.step()

    on_ranks(2, on_rank)


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


def trained_in_groups(model: Any) -> nn.Module:
    """The first block at a rate of its own, which is frozen: its group is empty."""
    model.blocks[0].requires_grad_(False)
    parts = (model.blocks[0], 0.01), (model, 0.1)
    trained = [{"params": [p for p in part.parameters() if p.requires_grad], "lr": rate} for part, rate in parts]
    optimizer = torch.optim.SGD(trained, momentum=0.9)
    for step in range(2):
        square_step(model, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_an_empty_group_at_another_rate_is_warned_about_and_steps() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        return whole(trained_in_groups(sharded_copy(seeded(Net), rank, world, **BLOCKS)))

    with pytest.warns(UserWarning, match="SGD look as if .* group 0 is empty, .* meant so, leave an empty group out"):
        found = on_ranks(2, on_rank)
    assert_all_close(found, dict(trained_in_groups(seeded(Net)).named_parameters()))


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
