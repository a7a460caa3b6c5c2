"""Training that is saved, resumed, saved and resumed again is the training that never stopped, bit for bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Block, Net, draw, local, on_ranks, seeded, sharded_copy, train_reference, units_of, whole
from polyshard import checkpoint
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

Make = Callable[[Any], torch.optim.Optimizer]
Values = dict[str, torch.Tensor]

TURNS = 4
STOPS = (1, 3)


class Counter(torch.optim.SGD):
    """Keeps a number that is no tensor, of each parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        return super().step(closure)


#: The optimizers of torch.optim that have what they need for DTensors, and settings that give more state or another
#: kernel.
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "a number that is no tensor": lambda p: Counter(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, lambd=0.1, t0=5.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
RANKS = {
    # Of six ranks some have no element of a parameter.
    "full_shard": ("2", "3", "6"),
    "shard_grad_op": ("2", "3"),
    "no_shard": ("2", "3"),
    "hybrid_shard": ("2 x 2",),
    "hybrid_shard_zero2": ("2 x 2",),
}


def sharding_of(strategy: str, ranks: str) -> tuple[int, dict[str, Any]]:
    sizes = [int(size) for size in ranks.split(" x ")]
    return math.prod(sizes), {"strategy": strategy} | ({"shard_size": sizes[1]} if sizes[1:] else {})


SHARDINGS = {f"{strategy} {each}": sharding_of(strategy, each) for strategy, ranks in RANKS.items() for each in ranks}
CUTTING = [strategy for strategy in RANKS if strategy != "no_shard"]


def net(seed: int = 0) -> nn.Module:
    return seeded(lambda: Net(blocks=2), seed)


def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    loss = model(draw(4, 3, turn=turn, rank=rank)).square().mean()
    loss.backward()
    return [loss.detach()]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Values:
    """This rank's part of the state of each parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        f"{names.get(id(parameter), f'flat {index}')}.{key}": local(torch.as_tensor(value)).clone()
        for index, parameter in enumerate(held)
        for key, value in optimizer.state[parameter].items()
    }


def run(
    rank: int, world: ThreadedWorld, folder: Path | None, make: Make, settings: dict[str, Any]
) -> tuple[Values, Values]:
    """Train ``TURNS`` steps; with a ``folder`` all is thrown away at ``STOPS``, and taken up from there."""
    model = sharded_copy(net(), rank, world, policy=units_of(Block), **settings)
    optimizer = make(model.parameters())
    for turn in range(TURNS):
        if folder is not None and turn in STOPS:
            directory = checkpoint.save(folder, turn, model, optimizer)
            model = sharded_copy(net(seed=turn), rank, world, policy=units_of(Block), **settings)
            optimizer = make(model.parameters())
            checkpoint.load(directory, model, optimizer)
        step(model, turn, rank)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model), state_of(model, optimizer)


@functools.cache
def unsharded_values(name: str, ranks: int) -> Values:
    """What training without shards ends with, which several strategies are compared with."""
    return train_reference(net(), step, ranks, TURNS, lambda model: OPTIMIZERS[name](model.parameters())).parameters


def differing(one: Values, other: Values) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _cases() -> Iterator[Any]:
    """AdamW under every strategy, each other optimizer under one that cuts."""
    for number, name in enumerate(OPTIMIZERS):
        strategies = list(RANKS) if name == "AdamW" else [CUTTING[number % len(CUTTING)]]
        # It looks at whole matrices, which torch does not over parts of them.
        for strategy in strategies if name != "Adafactor" else ["no_shard"]:
            sharding = f"{strategy} {RANKS[strategy][number % len(RANKS[strategy])]}"
            yield pytest.param(name, sharding, marks=() if name == "AdamW" else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sharding"), [*_cases()])
def test_resuming_twice_is_not_stopping(tmp_path: Path, name: str, sharding: str) -> None:
    ranks, settings = SHARDINGS[sharding]
    straight = on_ranks(ranks, lambda rank, world: run(rank, world, None, OPTIMIZERS[name], settings))
    resumed = on_ranks(ranks, lambda rank, world: run(rank, world, tmp_path, OPTIMIZERS[name], settings))
    for (values, state), (expected, expected_state) in zip(resumed, straight, strict=True):
        assert differing(state, expected_state) == []
        assert differing(values, expected) == []
    torch.testing.assert_close(resumed[0][0], unsharded_values(name, ranks), rtol=1e-8, atol=1e-8)


def test_numbers_of_steps_may_differ_between_parameters_of_a_unit(tmp_path: Path) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, float]:
        model = sharded_copy(net(), rank, world, policy=units_of(Block))
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        for turn in range(2):
            step(model, turn, rank)
            optimizer.step()
        # As of a parameter that was frozen for a while.
        optimizer.state[model.blocks[0].up.bias]["step"].fill_(1.0)
        directory = checkpoint.save(tmp_path, 2, model, optimizer)
        fresh = OPTIMIZERS["AdamW"](model.parameters())
        checkpoint.load(directory, model, fresh)
        return {name: float(fresh.state[each]["step"]) for name, each in model.named_parameters()}

    for found in on_ranks(2, on_rank):
        assert all(step == (1.0 if name == "blocks.0.up.bias" else 2.0) for name, step in found.items())
