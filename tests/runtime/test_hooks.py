"""Hooks of the user on modules and parameters."""

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
    on_ranks,
    one_by_one,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    train_reference,
    units_of,
    warns_for,
    whole,
    whole_of,
)
from polyshard.errors import RankMismatchError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}


def test_hooks_of_the_user_on_submodules_see_whole_parameters() -> None:
    model = seeded(Net)
    shapes = {name: tuple(p.shape) for name, p in model.blocks[1].named_parameters()}

    def on_rank(rank: int, world: ThreadedWorld) -> list[str]:
        seen: list[str] = []
        with world.lock:
            mine = seeded(Net)
        block = mine.blocks[1]

        def look(when: str) -> Callable[..., None]:
            def hook(module: nn.Module, *_: Any) -> None:
                assert {name: tuple(p.shape) for name, p in block.named_parameters()} == shapes, when
                torch.testing.assert_close(block.up.weight.detach(), model.blocks[1].up.weight.detach())
                seen.append(when)

            return hook

        block.register_forward_pre_hook(look("before the unit, from before sharding"))
        block.up.register_forward_hook(look("inside"))
        block.up.register_full_backward_hook(lambda *_: seen.append("backward"))
        polyshard.shard(mine, threaded(world, rank, **BLOCKS))
        block.register_forward_pre_hook(look("before the unit, from after sharding"))
        block.down.register_forward_pre_hook(look("inside, from after sharding"))
        square_step(mine, 0, rank)
        return seen

    for seen in on_ranks(2, on_rank):
        assert seen == [
            "before the unit, from before sharding",
            "before the unit, from after sharding",
            "inside",
            "inside, from after sharding",
            "backward",
        ]


@one_by_one("strategy", ["full_shard", "no_shard"], "world_size", [2, 1], "registered", ["before", "after"])
def test_post_accumulate_hooks_fire_once_a_backward_with_the_reduced_gradient(
    registered: str, world_size: int, strategy: str
) -> None:
    model = seeded(Net)
    settings = {**BLOCKS, "strategy": strategy}

    def on_rank(rank: int, world: ThreadedWorld) -> list[dict[str, list[torch.Tensor]]]:

        seen: dict[str, list[torch.Tensor]] = {}

        def register() -> None:
            for name, parameter in mine.named_parameters():
                seen[name] = []
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: seen[name].append(p.grad.detach().clone())
                )

        with world.lock:
            mine = seeded(Net)
        if registered == "before":
            register()
        polyshard.shard(mine, threaded(world, rank, **settings))
        if registered == "after":
            register()
        turns = []
        for turn in range(2):
            square_step(mine, turn, rank)
            turns.append({name: list(values) for name, values in seen.items()})
            for values in seen.values():
                values.clear()
            mine.zero_grad()
        return turns

    reference = train_reference(
        model, square_step, world_size, turns=2, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0)
    )
    with warns_for(world_size, settings):
        ranks = on_ranks(world_size, on_rank)
    originals = dict(model.named_parameters())
    for turn in range(2):
        for name, original in originals.items():
            fired = [rank[turn][name] for rank in ranks]
            assert [len(values) for values in fired] == [1] * world_size
            got = whole_of(original, [values[0] for values in fired])
            torch.testing.assert_close(got, reference.gradients[turn][name], rtol=1e-12, atol=1e-12)


def test_a_post_accumulate_hook_may_step_and_drop_the_gradient() -> None:
    """The optimizer in the backward: gradients are gone when the backward ends."""

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(seeded(Net), rank, world, **BLOCKS)

        def update(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None

        for parameter in mine.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for turn in range(3):
            square_step(mine, turn, rank)
            assert all(parameter.grad is None for parameter in mine.parameters())
        return whole(mine)

    reference = train_reference(seeded(Net), square_step, 2, turns=3)
    assert_all_close(on_ranks(2, on_rank), reference.parameters)


def recorder(log: list[torch.Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        log.extend(each.detach().clone() for each in (*inputs, *outputs) if each is not None)

    return hook


@pytest.mark.parametrize("before", [True, False])
def test_full_backward_hooks_on_units_and_root_see_the_right_gradients(before: bool) -> None:
    logs: dict[nn.Module, list[torch.Tensor]] = {}

    def register(model: nn.Module) -> None:
        log = logs.setdefault(model, [])
        for module in (model, model.blocks[0], model.blocks[1].up, model.blocks[2]):
            module.register_full_backward_hook(recorder(log))

    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        if before:
            register(model)
        polyshard.shard(model, config)
        if not before:
            register(model)
        return model

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        if model not in logs:
            register(model)
        logs[model].clear()
        return [*square_step(model, turn, rank), *logs[model]]

    assert_parity(seeded(Net), step, world_size=2, wrap=wrap, settings=BLOCKS)


class Words(nn.Module):
    """An embedding in front of blocks; ``penalty`` is what a hook adds to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.penalty: torch.Tensor | float = 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(self.embedding(tokens))
        return y.square().mean() + self.penalty


def words_step(model: Words, turn: int, rank: int) -> None:
    tokens = torch.arange(8).reshape(2, 4) * (turn + rank + 1) % 11
    model(tokens).backward()


def observe(model: Words) -> None:
    """Behind the forward, as PEFT and those that collect activations do."""
    model.embedding.register_forward_hook(lambda module, args, output: None)


def penalise_before(model: Words) -> None:
    """Its backward needs the weight that the forward saw."""

    def hook(module: nn.Embedding, args: Any) -> None:
        model.penalty = module.weight.pow(3).sum()

    model.embedding.register_forward_pre_hook(hook)


def penalise_behind(model: Words) -> None:
    def hook(module: nn.Embedding, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * module.weight.pow(2).sum()

    model.embedding.register_forward_hook(hook, prepend=True)


def replace_forward(model: Words) -> None:
    embedding = model.embedding
    embedding.forward = lambda tokens: nn.functional.embedding(tokens, embedding.weight.pow(2))  # type: ignore


@one_by_one(
    "strategy", ["full_shard", "shard_grad_op"], "change", [observe, penalise_before, penalise_behind, replace_forward]
)
def test_a_hook_that_one_rank_adds_later_to_an_embedding_is_right_and_changes_no_collective(
    change: Callable[[Words], None], strategy: str
) -> None:
    model = seeded(Words)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(
            model, rank, world, policy=units_of(Block, nn.Embedding), strategy=strategy, check_ranks="always"
        )
        assert isinstance(mine, Words)
        words_step(mine, 0, rank)
        mine.zero_grad()
        if rank == 0:
            change(mine)
        # One graph beside another, and one backward behind another.
        words_step(mine, 1, rank)
        losses = [mine(torch.tensor([[1, 2, 3, 1]]) + rank) for _ in range(2)]
        (losses[0] + losses[1]).backward()
        with polyshard.unsharded(mine):
            pass
        words_step(mine, 2, rank)
        return whole_gradients(mine)

    wanted: dict[str, torch.Tensor] = {}
    for rank in range(2):
        plain = seeded(Words)
        assert isinstance(plain, Words)
        if rank == 0:
            change(plain)
        words_step(plain, 1, rank)
        for _ in range(2):
            plain(torch.tensor([[1, 2, 3, 1]]) + rank).backward()
        words_step(plain, 2, rank)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            wanted[name] = wanted.get(name, 0.0) + parameter.grad / 2
    for found in on_ranks(2, on_rank):
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12)


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients: Any = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: gradient.full_tensor() for name, gradient in gradients}


def test_a_hook_that_one_rank_had_before_sharding_is_refused_where_it_decides_what_is_gathered() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            mine = seeded(Words)
        if rank == 0:
            mine.embedding.register_forward_hook(lambda *_: None)
        before = {name: (p.data_ptr(), tuple(p.shape)) for name, p in mine.named_parameters()}
        with pytest.raises(RankMismatchError) as caught:
            polyshard.shard(mine, threaded(world, rank, policy=units_of(Block, nn.Embedding)))
        assert {name: (p.data_ptr(), tuple(p.shape)) for name, p in mine.named_parameters()} == before
        return str(caught.value)

    for text in on_ranks(2, on_rank):
        assert "'embedding'" in text
        assert "not gathered in backward" in text
