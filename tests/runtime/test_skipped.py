"""Wrong uses of ``agree_on_use`` and ``skip``, by name; of right ones what is seldom drawn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, assert_parity, draw, is_sharded, on_ranks, seeded, sharded_copy, units_of
from polyshard.errors import ConfigError, RankMismatchError, StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.utils.checkpoint import checkpoint


class Tower(nn.Module):
    """Parameters of its own around two units."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, 5)
        self.blocks = nn.ModuleList([Block(5, 6), Block(5, 6)])
        self.norm = nn.LayerNorm(5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class VisionLanguage(nn.Module):
    """Text, and an image with it on some ranks. The tower stands behind the text: that is not the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Block(5, 7) for _ in range(3))
        self.vision = Tower()
        self.head = nn.Linear(5, 2)

    def forward(self, text: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
        x = self.blocks[0](self.embed(text))
        if images is not None:
            x = x + self.vision(images)
        else:
            polyshard.skip(self.vision)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


def forward_of(model: nn.Module, turn: int, rank: int, having: set[int]) -> torch.Tensor:
    if is_sharded(model):
        polyshard.agree_on_use(model, {model.vision: rank in having})
    images = draw(2, 4, rank=rank + 10 * turn) if rank in having else None
    return model(draw(2, 3, rank=rank + 10 * turn), images)


class Recomputes(VisionLanguage):
    """Re-entrant checkpoints inside of one; the first of these passes the tower by."""

    #: Whether it goes on without what the second computes.
    drops = False

    def forward(self, text: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
        def look(x: torch.Tensor) -> torch.Tensor:
            polyshard.skip(self.vision)
            return x * 1.0

        def run(x: torch.Tensor) -> torch.Tensor:
            for each in (look, *self.blocks):
                y = checkpoint(each, x, use_reentrant=True)
                x = x if self.drops and each is self.blocks[0] else y
            return x

        return self.head(checkpoint(run, self.embed(text), use_reentrant=True))


# The inner ones are called without gradients first.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_tower_that_nobody_uses_is_passed_by_under_nested_checkpoints() -> None:
    def step(model: Any, turn: int, rank: int) -> list[torch.Tensor]:
        model.drops = rank == 0
        loss = forward_of(model, turn, rank, set()).square().mean()
        loss.backward()
        return [loss.detach()]

    assert_parity(seeded(Recomputes), step, settings={"policy": units_of(Block)})


class CutShort(VisionLanguage):
    """Its backward does not reach the checkpoint of the first block where it is cut."""

    cut = False

    def forward(self, text: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
        x = checkpoint(self.blocks[0], self.embed(text), use_reentrant=True)
        x = x.detach() if self.cut else x
        if images is not None:
            x = x + self.vision(images)
        else:
            polyshard.skip(self.vision)
        return self.head(self.blocks[2](self.blocks[1](x)))


def test_an_agreement_behind_a_backward_that_ended_early_on_one_rank() -> None:
    """A gather that this backward issued is waited for by that rank alone in the next forward, where all compare."""
    start, ranks = seeded(CutShort), 3

    def losses(model: Any, rank: int, turn: int) -> Iterator[torch.Tensor]:
        # All with images; then two microbatches: nobody, and one rank.
        for microbatch, having in enumerate(({0, 1, 2},) if not turn else (set[int](), {1})):
            model.cut = turn > 0 and rank == 0 and microbatch == 0
            yield forward_of(model, 2 * turn + microbatch, rank, having).square().mean()

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        settings = {"policy": units_of(Block), "strategy": "zero1", "offload": "optimizer"}
        model = sharded_copy(start, rank, world, **settings)
        optimizer = torch.optim.SGD(polyshard.flat_parameters(model), lr=0.1)
        for turn in range(2):
            for microbatch, loss in enumerate(losses(model, rank, turn)):
                with polyshard.no_sync(model) if microbatch < turn else nullcontext():
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with polyshard.unsharded(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    reference: Any = copy.deepcopy(start)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for turn in range(2):
        for rank in range(ranks):
            for loss in losses(reference, rank, turn):
                (loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for whole in on_ranks(ranks, on_rank):
        torch.testing.assert_close(whole, dict(reference.named_parameters()), rtol=1e-12, atol=1e-12)


def told_of(rank: int, world: ThreadedWorld, wrong: Callable[[nn.Module, int], Any], make: Any = VisionLanguage) -> str:
    """Wrong use behind a step in which all ranks had images."""
    mine = sharded_copy(seeded(make), rank, world, policy=units_of(Block))
    forward_of(mine, 0, rank, {0, 1}).sum().backward()
    with pytest.raises((StateError, RankMismatchError, ConfigError)) as caught:
        wrong(mine, rank)
    return f"{type(caught.value).__name__}: {caught.value}"


def without_agreement(model: nn.Module, rank: int) -> None:
    polyshard.agree_on_use(model, {})
    model(draw(2, 3), None)


def against_what_was_said(model: nn.Module, rank: int) -> None:
    polyshard.agree_on_use(model, {model.vision: True})
    model(draw(2, 3), None)


def with_other_modules(model: nn.Module, rank: int) -> None:
    polyshard.agree_on_use(model, {model.vision: True} if rank else {model.vision: True, model.head: True})


def with_a_stranger(model: nn.Module, rank: int) -> None:
    polyshard.agree_on_use(model, {nn.Linear(1, 1): True})


def inside_a_forward(model: nn.Module, rank: int) -> None:
    model.blocks[2].register_forward_hook(lambda *_: polyshard.agree_on_use(model, {model.vision: True}))
    model(draw(2, 3), draw(2, 4))


def outside_of_a_forward(model: nn.Module, rank: int) -> None:
    polyshard.agree_on_use(model, {model.vision: bool(rank)})
    polyshard.skip(model.vision.blocks[0] if rank else model.vision)


@pytest.mark.parametrize(
    ("wrong", "texts"),
    [
        (without_agreement, ["StateError: skip() of the Tower around", "without an agreement"]),
        (against_what_was_said, ["StateError: skip('vision') came where agree_on_use() was told"]),
        (with_other_modules, ["RankMismatchError: agree_on_use() got", "['vision', 'head']"]),
        (with_a_stranger, ["ConfigError: agree_on_use() got a Linear that is not inside of the VisionLanguage"]),
        (inside_a_forward, ["StateError: agree_on_use() was called inside a forward"]),
        (outside_of_a_forward, ["StateError: skip(", "outside of a forward"]),
    ],
)
def test_wrong_uses_are_named(wrong: Callable[[nn.Module, int], Any], texts: list[str]) -> None:
    for told in on_ranks(2, lambda rank, world: told_of(rank, world, wrong)):
        assert all(text in told for text in texts)


class Reversed(VisionLanguage):
    def __init__(self) -> None:
        super().__init__()
        self.vision.blocks = nn.ModuleList(reversed(self.vision.blocks))
        self.vision.forward = self.reverse  # type: ignore[method-assign]

    def reverse(self, images: torch.Tensor) -> torch.Tensor:
        tower = self.vision
        return tower.norm(tower.blocks[0](tower.blocks[1](tower.patch(images))))


def images_on_one_rank(model: nn.Module, rank: int) -> None:
    forward_of(model, 1, rank, {1}).sum().backward()


class Silent(VisionLanguage):
    """Passes nothing by."""

    def forward(self, text: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
        x = self.blocks[0](self.embed(text))
        return self.head(x if images is None else x + self.vision(images))


@pytest.mark.parametrize("make", [Reversed, Silent])
def test_ranks_that_issue_other_collectives_are_told(make: type[VisionLanguage]) -> None:
    for told in on_ranks(2, lambda rank, world: told_of(rank, world, images_on_one_rank, make)):
        assert told.startswith("RankMismatchError: ")
        assert "'vision.blocks.0'" in told or "of vision.blocks.0" in told
