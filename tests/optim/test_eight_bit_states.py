"""8-bit AdamW of other packages is, to the bit, what it is on the unsharded model, or told."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from parity import draw, seed_all, units_of, whole
from polyshard.errors import UnsupportedError
from polyshard_backends.threaded import ThreadedWorld
from processes import KeptRanks
from torch import nn

# Both packages warn when they are imported, and torch does of how torchao compiles its steps.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """Of the rows of two or four ranks each weight has whole blocks of 256, 4096 or more, but for the small last one.

    With ``odd`` rows in the middle, they have not.
    """

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        seed_all(0)
        width = 200 if odd else 192
        self.first = nn.Linear(256, width)
        self.middle = nn.Sequential(nn.Linear(width, 256, bias=False), nn.Tanh(), nn.Linear(256, 160))
        self.last = nn.Linear(160, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


RANKS = KeptRanks()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, turns: range = range(4)) -> None:
    for turn in turns:
        # The same batch on every rank: the mean of two or four equal gradients is that gradient, to the bit.
        model(draw(16, 256, turn=turn).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model: nn.Module, collectives: Any = "gloo", **settings: Any) -> nn.Module:
    policy = units_of(nn.Sequential)
    return polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, policy=policy, **settings))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    from torchao import optim

    # Torch finds a compiled step by the shape of the whole, and fails on ranks of a host that have fewer rows.
    torch.compiler.set_stance("force_eager")
    made: torch.optim.Optimizer = optim.AdamW8bit(parameters, lr=1e-2)
    return made


def off(rank: int, odd: bool = False, **settings: Any) -> tuple[dict[str, float], list[str]]:
    """By parameter, the largest difference from the unsharded model after four steps; and what the steps warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = Net(odd)
        train(plain, adamw(plain.parameters()))
        model = shard(Net(odd), **settings)
        train(model, adamw(model.parameters()))
    wanted, found = dict(plain.named_parameters()), whole(model)
    return (
        {name: (found[name] - wanted[name]).abs().max().item() for name in wanted},
        [str(each.message) for each in caught if "blocks of" in str(each.message)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_torchao_equals_itself_to_the_bit(strategy: str) -> None:
    pytest.importorskip("torchao.optim")
    for apart, told in RANKS.run(2, partial(off, strategy=strategy), timeout=300.0):
        assert set(apart.values()) == {0.0}
        assert told == []


@pytest.mark.slow
def test_rows_that_end_inside_of_blocks_share_other_scales_and_are_told_once() -> None:
    pytest.importorskip("torchao.optim")
    # Of 200 elements each, three ranks have 86, 86 and 84.
    found = RANKS.run(3, partial(off, odd=True), timeout=300.0)
    assert found[0][0]["middle.0.weight"] > 1e-5
    ((message,), *others) = (told for _, told in found)
    assert others == [[], []]
    assert "AdamW8bit keeps its state in blocks of 256 elements, and what ranks have of 'middle.0.weight'" in message
    assert "(rank 0)" in message
    assert "multiple of 256 elements, and 4096 or more" in message


def over_flat_parameters(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = shard(Net())
        train(model, adamw(polyshard.flat_parameters(model)), range(2))
    return [str(each.message) for each in caught if "blocks of" in str(each.message)]


@pytest.mark.slow
def test_torchao_over_flat_parameters_is_told_once() -> None:
    pytest.importorskip("torchao.optim")
    (message,), other = RANKS.run(2, over_flat_parameters, timeout=300.0)
    assert other == []
    assert "the flat parameter of unit" in message
    assert "Give the optimizer model.parameters()" in message


def test_bitsandbytes_is_refused_by_name() -> None:
    package = pytest.importorskip("bitsandbytes")

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model: nn.Module = Net()
        shard(model, {"name": "threaded", "world": world, "rank": rank})
        words = rf"of bitsandbytes cannot step the DTensor 'first\.weight' \(rank {rank}\).*Use torchao\.optim"
        for kind in (package.optim.AdamW8bit, package.optim.AdamW):
            with pytest.raises(UnsupportedError, match=words):
                train(model, kind(model.parameters()), range(1))
        train(model, torch.optim.AdamW(model.parameters()), range(1))

    ThreadedWorld(2, timeout=60.0).run(on_rank, timeout=100.0)
