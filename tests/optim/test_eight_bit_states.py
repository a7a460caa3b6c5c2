"""8-bit AdamW of other packages over ``blocks`` is, to the bit, what it is on the unsharded model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import polyshard
import pytest
import torch
from parity import draw, one_core, seed_all, units_of, whole
from polyshard_backends.threaded import ThreadedWorld
from processes import run_processes
from torch import nn

# Both packages warn when they are imported, and torch does of how torchao compiles its steps.
pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[[nn.Module], torch.optim.Optimizer]
BLOCKS = {"name": "blocks", "size": 256}
AT_LEAST_4096 = {"name": "blocks", "size": 4096}


class Net(nn.Module):
    """Weights of whole blocks of 256, of 4096 in all, and a last one of neither."""

    def __init__(self) -> None:
        super().__init__()
        seed_all(0)
        self.first = nn.Linear(64, 192)
        self.middle = nn.Sequential(nn.Linear(192, 256, bias=False), nn.Tanh(), nn.Linear(256, 160))
        self.last = nn.Linear(160, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@pytest.fixture
def bitsandbytes() -> Make:
    package = pytest.importorskip("bitsandbytes")
    return lambda model: bitsandbytes_adamw(package, model)


def bitsandbytes_adamw(package: ModuleType, model: nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = package.optim.AdamW8bit(model.parameters(), lr=1e-2)
    return made


@pytest.fixture
def torchao() -> Iterator[Make]:
    package = pytest.importorskip("torchao.optim")
    yield lambda model: package.AdamW8bit(model.parameters(), lr=1e-2)
    torch._dynamo.reset()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, turns: range = range(4), lock: Any = None) -> None:
    for turn in turns:
        # The same batch on every rank: the mean of two or four equal gradients is that gradient, to the bit.
        model(draw(16, 64, turn=turn).float()).square().mean().backward()
        if lock is None:
            optimizer.step()
        else:
            # One thread compiles.
            with lock:
                optimizer.step()
        optimizer.zero_grad()


def shard(model: nn.Module, collectives: Any, layout: Any, **settings: Any) -> nn.Module:
    config = polyshard.ShardConfig(
        collectives=collectives, layout=layout, policy=units_of(nn.Sequential), timeout_s=60.0, **settings
    )
    return polyshard.shard(model, config)


def off(make: Make, ranks: int, layout: Any, start: nn.Module | None = None, **settings: Any) -> dict[str, float]:
    """By parameter, the largest difference of any rank from the unsharded model after four steps."""
    start = start or Net()
    plain = copy.deepcopy(start)
    train(plain, make(plain))

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            model = copy.deepcopy(start)
        shard(model, {"name": "threaded", "world": world, "rank": rank}, layout, **settings)
        train(model, make(model), lock=world.lock)
        return whole(model)

    with one_core():
        found = ThreadedWorld(ranks, timeout=60.0).run(on_rank, timeout=100.0)
    wanted = dict(plain.named_parameters())
    return {name: max((each[name] - wanted[name]).abs().max().item() for each in found) for name in wanted}


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, BLOCKS), (2, AT_LEAST_4096), (4, AT_LEAST_4096)], ids=str)
def test_bitsandbytes_equals_itself_to_the_bit(
    bitsandbytes: Make, ranks: int, layout: dict[str, Any], strategy: str
) -> None:
    assert set(off(bitsandbytes, ranks, layout, strategy=strategy).values()) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchao_equals_itself_to_the_bit(torchao: Make, ranks: int) -> None:
    assert set(off(torchao, ranks, AT_LEAST_4096).values()) == {0.0}


def test_flat_cuts_through_blocks(bitsandbytes: Make) -> None:
    # What the layout is for: here every block of scales begins elsewhere.
    assert off(bitsandbytes, 2, "flat")["middle.0.weight"] > 1e-5


def test_pieces_below_4096_elements_are_not_in_eight_bits(bitsandbytes: Make) -> None:
    seed_all(0)
    small = nn.Linear(64, 128, bias=False)
    assert off(bitsandbytes, 4, BLOCKS, small)["weight"] > 1e-6
    # Blocks of that size leave no smaller piece of a parameter that they divide.
    assert off(bitsandbytes, 4, AT_LEAST_4096, small)["weight"] == 0.0


def warned(make: Make, layout: Any, *, flat: bool = False) -> list[str]:
    """What the first two steps of an optimizer warn of on all of two ranks."""

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model: nn.Module = Net()
        shard(model, {"name": "threaded", "world": world, "rank": rank}, layout)
        held: Any = model
        if flat:
            held = nn.ParameterList()
            held._parameters.update({str(n): p for n, p in enumerate(polyshard.flat_parameters(model))})
        optimizer = make(held)
        train(model, optimizer, range(2), world.lock)

    with warnings.catch_warnings(record=True) as caught, one_core():
        warnings.simplefilter("always")
        ThreadedWorld(2, timeout=60.0).run(on_rank, timeout=100.0)
    return [str(each.message) for each in caught if "blocks of" in str(each.message)]


def check_warnings(make: Make) -> None:
    assert warned(make, BLOCKS) == warned(make, AT_LEAST_4096) == []
    (message,) = warned(make, "flat")
    assert message.startswith("AdamW8bit ")
    assert "blocks of 256 elements" in message
    assert "'first.weight'" in message or "'middle.0.weight'" in message
    assert "(rank 0)" in message
    assert "blocks" in message
    # As is each unit's only parameter: all of its elements in a row, whatever the layout.
    (message,) = warned(make, BLOCKS, flat=True)
    assert "the flat parameter of unit" in message
    assert "model.parameters()" in message


def test_bitsandbytes_over_blocks_that_are_cut_is_told_once(bitsandbytes: Make) -> None:
    check_warnings(bitsandbytes)


@pytest.mark.slow
def test_torchao_over_blocks_that_are_cut_is_told_once(torchao: Make) -> None:
    check_warnings(torchao)


def on_process(rank: int) -> bool:
    with warnings.catch_warnings(action="ignore"):
        import bitsandbytes as package

    start = Net()
    plain = copy.deepcopy(start)
    train(plain, bitsandbytes_adamw(package, plain))
    model = shard(start, "gloo", BLOCKS)
    train(model, bitsandbytes_adamw(package, model))
    with polyshard.unsharded(model):
        equal = all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    polyshard.close(model)
    return equal


def test_ranks_that_are_processes(bitsandbytes: Make) -> None:
    assert run_processes(2, on_process) == [True, True]
