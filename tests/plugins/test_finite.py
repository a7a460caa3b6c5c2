"""The listener ``finite``: the first unit whose output is not finite is named at the next step's begin."""

from __future__ import annotations

import math
import warnings
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded, threaded, units_of
from polyshard.errors import NonFiniteError
from polyshard.interfaces import PluginContext
from polyshard_backends.threaded import ThreadedWorld
from polyshard_plugins.finite import Finite
from torch import nn

CPU = torch.device("cpu")


def listener(rank: int = 0, **options: Any) -> Finite:
    return Finite(PluginContext("finite", CPU, rank=rank), **options)


def watched(model: nn.Module, rank: int, world: ThreadedWorld, watch: Finite, **settings: Any) -> nn.Module:
    return polyshard.shard(model, threaded(world, rank, policy=units_of(Block), listeners=[watch], **settings))


def step(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


def spoil(module: nn.Module, value: float) -> Any:
    """From now on ``module`` returns ``value`` somewhere."""

    def change(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(output)
        mask.view(-1)[0] = value
        return output + mask

    return module.register_forward_hook(change)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_first_unit_is_named_with_step_and_rank(bad: float) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str | None:
        watch = listener(rank)
        model = seeded(Net)
        # Inside of the unit: what its own module returns is then what others get.
        inner = model.blocks[1].down
        model = watched(model, rank, world, watch)
        for number in range(2):
            step(model, draw(4, 3, rank=rank + number))
        changed = spoil(inner, bad) if rank == 1 else None
        step(model, draw(4, 3, rank=rank))
        if changed is None:
            watch.check(model)
            return None
        with pytest.raises(NonFiniteError) as caught:
            model(draw(4, 3, rank=rank))
        changed.remove()
        return str(caught.value)

    none, message = on_ranks(2, on_rank)
    assert none is None
    assert message is not None
    assert message.startswith("The output of unit 'blocks.1' was not finite in step 3 (rank 1), and 2 more after it.")


def test_a_warning_lets_training_go_on() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        watch = listener(rank, action="warn")
        model = watched(seeded(Net), rank, world, watch)
        step(model, torch.full_like(draw(4, 3), math.inf))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                step(model, draw(4, 3, rank=rank))
            watch.check(model)
        told = [str(each.message) for each in caught if "not finite" in str(each.message)]
        assert len(told) == 1
        assert "unit 'blocks.0' was not finite in step 1 (rank 0), and 3 more" in told[0]

    _alone(on_rank)


def _alone(function: Any) -> None:
    # Warnings are caught for the whole process: one rank.
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD`"):
        on_ranks(1, function)


class Named(nn.Module):
    """Returns a dictionary with integers and nothing beside the result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"none": None, "count": torch.arange(3), "empty": x.new_empty(0), "values": [(y * 0).log(), y]}


def test_containers_are_looked_into_and_the_whole_model_is_the_root() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        watch = listener(rank)
        model = watched(seeded(Named), rank, world, watch, strategy="no_shard")
        model(torch.zeros_like(draw(4, 3)))["values"][1].sum().backward()
        with pytest.raises(NonFiniteError, match=r"unit '\(root\)' was not finite in step 1 \(rank [01]\)\. "):
            watch.check(model)
        watch.check(model)

    on_ranks(2, on_rank)


def test_units_made_one_by_one_are_watched_by_one_object() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        watch = listener(rank)
        model = seeded(Net)
        for module in [*model.blocks, model]:
            polyshard.fully_shard(module, threaded(world, rank, listeners=[watch]))
        step(model, torch.full_like(draw(4, 3), math.inf))
        with pytest.raises(NonFiniteError, match=r"unit 'blocks.0' was not finite in step 1 .*, and 3 more"):
            watch.check(model)

    on_ranks(2, on_rank)
