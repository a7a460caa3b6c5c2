"""Checkpoints of states in blocks of a few bits: resumed runs equal the unsharded model's to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard
import pytest
import torch
from parity import draw, one_core, seed_all, units_of
from polyshard import checkpoint
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

# Both packages warn when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[[Any], torch.optim.Optimizer]
BLOCKS = {"name": "blocks", "size": 4096}
SMALLER = {"name": "blocks", "size": 256}
#: Modules with the optimizers of each package.
_MODULES = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}
_KINDS = (
    "bitsandbytes.AdamW8bit",
    "bitsandbytes.Lion8bit",
    "torchao.AdamW8bit",
    "torchao.AdamW4bit",
    "torchao.AdamWFp8",
)


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its steps, which takes longer than all of them."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(params=_KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    package, _, name = request.param.partition(".")
    module: ModuleType = pytest.importorskip(_MODULES[package])
    return partial(getattr(module, name), lr=1e-2)


@pytest.fixture
def bitsandbytes() -> ModuleType:
    found: ModuleType = pytest.importorskip("bitsandbytes")
    return found


class Net(nn.Module):
    """Weights of whole blocks, of 2 x 4096 and 7.5 x 4096 elements, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        seed_all(0)
        self.first = nn.Linear(64, 128)
        self.middle = nn.Sequential(nn.Linear(128, 240, bias=False), nn.Tanh())
        self.last = nn.Linear(240, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, turns: range) -> None:
    for turn in turns:
        # The same batch on every rank: the mean of two or four equal gradients is that gradient, to the bit.
        model(draw(16, 64, turn=turn).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unsharded(make: Make, turns: range = range(4)) -> Mapping[str, torch.Tensor]:
    """The parameters of the unsharded model after ``turns``."""
    model = Net()
    train(model, make(model.parameters()), turns)
    return dict(model.named_parameters())


def on_ranks(number: int, layout: Any, task: Callable[[nn.Module], Any], **settings: Any) -> list[Any]:
    """What ``task`` returns of a sharded model on each of ``number`` ranks."""
    start = Net()

    def on_rank(rank: int, world: ThreadedWorld) -> Any:
        with world.lock:
            model = copy.deepcopy(start)
        collectives = {"name": "threaded", "world": world, "rank": rank}
        config = polyshard.ShardConfig(
            collectives=collectives, layout=layout, policy=units_of(nn.Sequential), timeout_s=60.0, **settings
        )
        return task(polyshard.shard(model, config))

    with one_core():
        return ThreadedWorld(number, timeout=60.0).run(on_rank, timeout=100.0)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with polyshard.unsharded(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def begun(folder: Path, make: Make, model: nn.Module) -> dict[str, torch.Tensor]:
    """Train two steps, save, and train two more."""
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    checkpoint.save(folder, 2, model, optimizer)
    train(model, optimizer, range(2, 4))
    return whole(model)


def resumed(folder: Path, make: Make, model: nn.Module) -> dict[str, torch.Tensor]:
    """Load the latest checkpoint, train a step, save, and train another."""
    optimizer = make(model.parameters())
    checkpoint.load(checkpoint.latest(folder), model, optimizer)
    train(model, optimizer, range(2, 3))
    checkpoint.save(folder, 3, model, optimizer)
    train(model, optimizer, range(3, 4))
    return whole(model)


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(
    ("before", "after", "layout"), [(2, 4, BLOCKS), (4, 1, BLOCKS), (1, 4, SMALLER)], ids=lambda value: str(value)
)
def test_another_number_of_ranks_goes_on_as_the_unsharded_model(
    make: Make, before: int, after: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    on_ranks(before, layout, partial(begun, tmp_path, make))
    wanted = unsharded(make)
    # Of one rank, pieces of 2048 elements have blocks that their optimizer would not have begun with.
    for found in on_ranks(after, layout, partial(resumed, tmp_path, make)):
        assert differing(found, wanted) == []
