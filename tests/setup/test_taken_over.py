"""Optimizers that were made before ``shard``: taken over with their state, or refused with the model as it was."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, adam, draw, local, on_ranks, seeded, sgd, threaded, units_of
from polyshard import ShardConfig
from polyshard.errors import ConfigError, ConfigTypeError, RankMismatchError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.tensor import DTensor


def step(model: nn.Module, optimizer: torch.optim.Optimizer, turn: int) -> None:
    model(draw(4, 3, turn=turn)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def lamb(parameter: nn.Parameter) -> torch.optim.Optimizer:
    """An optimizer that keeps one number a row of its matrix, which nobody knows how to cut."""
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"row": torch.ones(parameter.shape[0])}
    return optimizer


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_an_optimizer_that_has_stepped_goes_on_as_that_of_the_unsharded_model(strategy: str) -> None:
    # Two optimizers, one with a group of its own; the last steps before as the reference does.
    reference = seeded(Net)
    models = [copy.deepcopy(reference) for _ in range(3)]

    def optimizers_of(model: Any) -> list[torch.optim.Optimizer]:
        biases = [each for name, each in model.blocks.named_parameters() if "bias" in name]
        matrices = [each for name, each in model.blocks.named_parameters() if "bias" not in name]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": matrices, "lr": 0.05}]
        ends = [*model.first.parameters(), *model.last.parameters()]
        return [torch.optim.AdamW(groups, lr=1e-2), torch.optim.SGD(ends, lr=0.1, momentum=0.9)]

    made = [optimizers_of(each) for each in (reference, *models)]
    for model, optimizers in zip((reference, *models), made, strict=True):
        model(draw(4, 3)).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    def train(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model, optimizers = models[rank], made[rank + 1]
        config = threaded(world, rank, policy=units_of(Block), strategy=strategy)
        polyshard.shard(model, config, optimizers=optimizers)
        held = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        assert held == set(model.parameters())
        for optimizer in optimizers:
            assert optimizer.state.keys() <= held
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if name == "step":
                        assert not isinstance(value, DTensor)
                        continue
                    assert isinstance(value, DTensor)
                    assert value.placements == parameter.placements
                    assert local(value).shape == local(parameter).shape
                    # Nothing of the whole stays alive behind it.
                    assert local(value).untyped_storage().nbytes() == local(value).nbytes
        for turn in range(1, 4):
            model(draw(4, 3, turn=turn)).square().mean().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        return {name: each.full_tensor() for name, each in model.named_parameters()}

    for turn in range(1, 4):
        reference(draw(4, 3, turn=turn)).square().mean().backward()
        for each in made[0]:
            each.step()
            each.zero_grad()
    expected = {name: each.detach() for name, each in reference.named_parameters()}
    for found in on_ranks(3, train):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_fully_shard_takes_over_what_each_call_replaces() -> None:
    reference = seeded(Net)
    models = [copy.deepcopy(reference) for _ in range(2)]
    plain = sgd(reference)
    for turn in range(2):
        step(reference, plain, turn)

    def train(rank: int, world: ThreadedWorld) -> None:
        model: Any = models[rank]
        optimizer = sgd(model)
        for block in model.blocks:
            polyshard.fully_shard(block, threaded(world, rank), optimizers=[optimizer])
        polyshard.fully_shard(model, threaded(world, rank), optimizers=[optimizer])
        for turn in range(2):
            step(model, optimizer, turn)
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.full_tensor(), expected.detach(), rtol=1e-12, atol=1e-12)

    on_ranks(2, train)


def test_what_cannot_be_taken_over_is_refused_with_the_model_as_it_was() -> None:
    models = [seeded(Net) for _ in range(2)]
    stranger = copy.deepcopy(models[0])

    def refuse(rank: int, world: ThreadedWorld) -> None:
        model: Any = models[rank]
        config = threaded(world, rank)
        with pytest.raises(ConfigError, match=r"AdamW holds no parameter of this Net .*after anything that copies"):
            polyshard.shard(model, config, optimizers=[adam(stranger)])
        # Of one rank: the others are told.
        odd = lamb(model.first.weight) if rank else sgd(model)
        words = r"SGD has 'row' of 'first\.weight', Tensor \(5,\), and it is not known what of it each rank needs"
        with pytest.raises(ConfigError if rank else RankMismatchError, match=words):
            polyshard.shard(model, config, optimizers=[odd])
        optimizer = sgd(model)
        step(model, optimizer, 0)
        polyshard.shard(model, config, optimizers=[optimizer])
        step(model, optimizer, 1)

    on_ranks(2, refuse)
    alone = ShardConfig(collectives={"name": "fake", "world_size": 2})
    model = seeded(Net)
    with pytest.raises(ConfigTypeError, match=r"optimizers is a SGD, no collection\. Write optimizers=\[\.\.\.\]"):
        polyshard.shard(model, alone, optimizers=sgd(model))  # type: ignore[arg-type]
    with pytest.raises(ConfigTypeError, match=r"which is no Optimizer\. Give what was made over model\.parameters"):
        polyshard.shard(model, alone, optimizers=list(model.parameters()))  # type: ignore[arg-type]
    left = sgd(model)
    polyshard.shard(model, dataclasses.replace(alone, policy=units_of(Block)))
    model(draw(4, 3)).sum().backward()
    with pytest.raises(ConfigError, match=r"SGD holds 'first\.weight'.*or give it to that: shard\(\.\.\., optimizers="):
        left.step()
