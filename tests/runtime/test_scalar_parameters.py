"""Parameters of no dimension, such as CLIP's ``logit_scale``, are trained, clipped, saved and loaded as all others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import polyshard
import polyshard.checkpoint
import polyshard.optim
import polyshard.state
import polyshard_huggingface
import pytest
import torch
from parity import draw, on_ranks, seeded, sharded_copy, threaded, units_of, whole
from polyshard_backends.threaded import ThreadedWorld
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict as torch_state_dict

T = TypeVar("T")


class Scaled(nn.Module):
    """One scalar beside a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.layer(x)) * self.scale.exp()
        return y

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.7)


class Temperature(nn.Module):
    """A scalar alone, which is a unit by itself where its class is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value

    def reset_parameters(self) -> None:
        nn.init.constant_(self.value, 1.3)


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled()
        self.second = Scaled()
        self.temperature = Temperature()
        self.logit_scale = nn.Parameter(torch.tensor(-0.4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.temperature(self.second(self.first(x))) * self.logit_scale
        return y

    def reset_parameters(self) -> None:
        nn.init.constant_(self.logit_scale, -0.4)


UNITS = {"policy": units_of(Scaled, Temperature)}
WAYS: list[tuple[int, dict[str, Any]]] = [
    (1, {"strategy": "no_shard"}),
    (3, {}),
    (2, {"strategy": "shard_grad_op", "offload": "cpu"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2}),
]


def same(got: dict[str, torch.Tensor], plain: nn.Module) -> None:
    wanted = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, turns: range) -> None:
    for turn in turns:
        # Of all ranks the same, so that it does not matter how many they are.
        model(draw(4, 3, turn=turn)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_each(world_size: int, settings: dict[str, Any], function: Callable[[nn.Module, int], T]) -> list[T]:
    """``function(model, rank)`` on the ranks of a world, of a sharded ``Clip``."""
    return on_ranks(
        world_size, lambda rank, world: function(sharded_copy(seeded(Clip), rank, world, **{**UNITS, **settings}), rank)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "settings"), WAYS)
def test_states_are_those_of_the_unsharded_model(world_size: int, settings: dict[str, Any]) -> None:
    """Whole, taken up again by another optimizer, and by the unsharded model's."""
    plain = seeded(Clip)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train(plain, reference, range(2))
    wanted: Any = copy.deepcopy(torch_state_dict(plain, reference))

    def states(model: nn.Module, rank: int) -> tuple[Any, dict[str, torch.Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, range(2))
        full = polyshard.state.StateOptions(form=polyshard.state.StateForm.FULL)
        told = polyshard.state.get_state_dict(model, optimizer, full)
        again = torch.optim.AdamW(model.parameters(), lr=0.1)
        # Its own parts, then whole tensors: ours, and those of torch.
        for given in (polyshard.state.get_state_dict(model, optimizer), told, wanted):
            if given is wanted:
                again = torch.optim.AdamW(model.parameters(), lr=0.5)
            polyshard.state.set_state_dict(model, again, model_state_dict=given[0], optim_state_dict=given[1])
        train(model, again, range(2, 4))
        return told, whole(model)

    ranks = on_each(world_size, settings, states)
    train(plain, reference, range(2, 4))
    for (model_state, optimizer_state), after in ranks:
        torch.testing.assert_close(dict(model_state), dict(wanted[0]), rtol=1e-12, atol=1e-12)
        for name, state in wanted[1]["state"].items():
            torch.testing.assert_close(dict(optimizer_state["state"][name]), dict(state), rtol=1e-12, atol=1e-12)
        same(after, plain)


def test_it_is_made_from_the_meta_device() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock, torch.device("meta"):
            model = Clip()
        polyshard.shard(model, threaded(world, rank, device="cpu", **UNITS))
        return whole(model)

    for got in on_ranks(3, on_rank):
        scalars = {name: value.item() for name, value in got.items() if value.ndim == 0}
        assert scalars == pytest.approx(
            {"first.scale": 0.7, "second.scale": 0.7, "temperature.value": 1.3, "logit_scale": -0.4}
        )


def test_files_of_hugging_face(tmp_path: Path) -> None:
    plain = seeded(Clip)

    def save(model: nn.Module, rank: int) -> None:
        polyshard_huggingface.save(model, tmp_path)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock, torch.device("meta"):
            model = Clip().double()
        initializer = polyshard_huggingface.to_be_loaded(model)
        polyshard.shard(model, threaded(world, rank, device="cpu", **UNITS), initializer=initializer)
        polyshard_huggingface.load(model, tmp_path)
        return whole(model)

    on_each(2, {}, save)
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), dict(plain.state_dict()), rtol=0, atol=0)
    for got in on_ranks(3, on_rank):
        same(got, plain)
