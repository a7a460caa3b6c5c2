"""torchao's ``Float8Linear`` over sharded weights, beside the unsharded model that torchao converted."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from parity import draw, on_ranks, sharded_copy, units_of, whole
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.nn import functional


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48, bias=False)
        self.down = nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fed: torch.Tensor = self.down(functional.silu(self.up(x)))
        return x + fed


@pytest.fixture
def float8() -> Any:
    with warnings.catch_warnings():
        # It warns of extensions for CUDA that it does not find.
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao.float8")


def converted(float8: Any, recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Feed(), Feed())
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    # Without CUDA: the same codes, multiplied in full precision.
    object.__setattr__(config, "emulate", True)
    changed: nn.Module = float8.convert_to_float8_training(model, config=config)
    return changed


def loss_of(model: nn.Module, turn: int, rank: int) -> torch.Tensor:
    x = draw(16, 32, turn=turn, rank=rank).float()
    return (model(x) - x.cumsum(1)).square().mean()


@pytest.mark.parametrize(("ranks", "recipe"), [(2, "rowwise"), (3, "tensorwise"), (3, "rowwise_with_gw_hp")])
def test_it_trains_as_the_unsharded_model_does(float8: Any, ranks: int, recipe: str) -> None:
    model = converted(float8, recipe)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = []
    for turn in range(3):
        losses = [loss_of(reference, turn, rank) for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append([loss.item() for loss in losses])

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], dict[str, torch.Tensor]]:
        mine = sharded_copy(model, rank, world, policy=units_of(Feed))
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        losses = []
        for turn in range(3):
            loss = loss_of(mine, turn, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, whole(mine)

    wanted, start = dict(reference.named_parameters()), dict(model.named_parameters())
    for rank, (losses, parameters) in enumerate(on_ranks(ranks, on_rank)):
        assert losses == pytest.approx([each[rank] for each in expected], rel=1e-3)
        for name, parameter in parameters.items():
            # Sums in another order give a few values of the next step another code.
            change = (wanted[name] - start[name]).abs().max()
            assert (parameter - wanted[name]).abs().max() <= 0.02 * change, name
