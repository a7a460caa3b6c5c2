"""That training with embedding and head apart from the root is that of the unsharded model, whatever a forward does."""

from __future__ import annotations

import polyshard
import pytest
import torch
from parity import (
    Block,
    adam,
    assert_all_close,
    assert_parity,
    chain,
    on_ranks,
    seeded,
    train,
    train_reference,
    units_of,
    whole,
)
from polyshard.planning import thresholds
from polyshard_backends.threaded import ThreadedWorld
from reference_models import USES, WIDTH, WORDS, Tailed, sharded_tailed, tailed_step, units_in
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Torch's word on a re-entrant checkpoint in a forward without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    # Embedding and head of these models, and not their norm.
    monkeypatch.setattr(thresholds, "SMALLEST_SPLIT", WIDTH * WORDS)


@pytest.mark.parametrize(
    "strategy",
    [
        "full_shard",
        pytest.param("shard_grad_op", marks=pytest.mark.nightly),
        pytest.param("no_shard", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("use", USES)
def test_training_equals_the_unsharded_model_however_the_head_is_used(use: str, strategy: str) -> None:
    settings = {"policy": units_of(Block), "strategy": strategy}
    assert_parity(seeded(lambda: Tailed(use)), tailed_step, 2, settings=settings)


def test_composing_from_the_inside_out_splits_what_is_left() -> None:
    def composed(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        for block in model.blocks:
            polyshard.fully_shard(block, config)
        polyshard.fully_shard(model, config)
        assert units_in(model) == ["(root)", "embedding", "blocks.0", "blocks.1", "head"]
        return model

    for use in ("called", "its weight"):
        assert_parity(seeded(lambda: Tailed(use)), tailed_step, 2, wrap=composed)  # noqa: B023


def test_a_part_inside_a_larger_model_goes_back_to_the_module_around_it() -> None:
    def composed(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        for block in model.inner.blocks:
            polyshard.fully_shard(block, config)
        polyshard.fully_shard(model.inner, config)
        polyshard.fully_shard(model, config)
        return model

    outer = seeded(lambda: chain(inner=Tailed("its weight"), last=nn.Linear(WORDS, 3)))
    assert_parity(outer, tailed_step, 2, wrap=composed)


@pytest.mark.parametrize("use", ["its weight by name in a function", "its weight"])
def test_a_head_that_is_trained_from_the_second_step_on(use: str) -> None:
    def thawing(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        model.use = "called" if turn == 0 else use
        model.head.requires_grad_(turn > 0)
        return tailed_step(model, turn, rank)

    assert_parity(seeded(Tailed), thawing, 2, settings={"policy": units_of(Block)})


def test_optimizers_see_the_same_parameters_before_and_after_a_part_goes_back() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_tailed(world, rank, seeded(lambda: Tailed("its weight")))
        before = polyshard.flat_parameters(mine)
        optimizer = torch.optim.AdamW(before, lr=1e-2)
        train(mine, optimizer, tailed_step, rank, 3)
        after = polyshard.flat_parameters(mine)
        assert all(one is other for one, other in zip(before, after, strict=True))
        return whole(mine)

    expected = train_reference(seeded(lambda: Tailed("its weight")), tailed_step, 2, 3, adam).parameters
    assert_all_close(on_ranks(2, on_rank), expected)


def test_a_block_that_computes_with_another_s_weight_where_nothing_is_sharded() -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(3, 4), Block(3, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(self.blocks[1](self.blocks[0](x)), self.blocks[0].up.weight)

    def borrowing(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * turn + rank)
        loss = model(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward()
        return [loss.detach()]

    settings = {"policy": units_of(Block), "strategy": "no_shard"}
    assert_parity(seeded(Borrows), borrowing, 2, settings=settings)


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "checkpointed as of old", "kept", "backward of a part"])
def test_an_embedding_trains_although_its_weight_is_not_gathered_for_backward(kind: str) -> None:
    class Words(Tailed):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if kind.startswith("checkpointed"):
                # An input that needs a gradient, without which an old checkpoint computes none.
                shift = torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
                body = lambda x: self.blocks[0](self.embedding(tokens) + x)  # noqa: E731
                x = checkpoint(body, shift, use_reentrant=kind.endswith("old"))
            else:
                x = self.blocks[0](self.embedding(tokens))
            return self.head(self.blocks[1](x))

    model = seeded(Words)
    settings = {"policy": units_of(Block), "strategy": "shard_grad_op" if kind == "kept" else "full_shard"}
    assert_parity(model, tailed_step, 2, settings=settings)
