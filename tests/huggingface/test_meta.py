"""Models on the meta device on their way to a checkpoint: what they hold until then, and what no file has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polyshard
import polyshard_huggingface
import pytest
import torch
from parity import local, seed_all
from polyshard import ShardConfig
from polyshard.errors import ConfigError, ParameterError, RankMismatchError
from polyshard_backends.threaded import ThreadedWorld
from safetensors.torch import save_file
from torch import nn


class Rotary(nn.Module):
    """A buffer that no file has, computed by ``reset_parameters``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        buffer = self.get_buffer("frequencies")
        buffer.copy_(10000 ** (-torch.arange(len(buffer), device=buffer.device) / len(buffer)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary(4)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.score = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.score(self.norm(self.first(x * self.rotary.frequencies)))
        return score


def shard(model: nn.Module, fresh: tuple[str, ...] = (), rank: int = 0) -> nn.Module:
    config = ShardConfig(collectives={"name": "fake", "world_size": 2, "rank": rank}, device="cpu")
    return polyshard.shard(model, config, initializer=polyshard_huggingface.to_be_loaded(model, fresh=fresh))


def on_meta(kind: type[nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return kind()


def test_parameters_are_nan_until_they_are_read_and_buffers_are_computed(tmp_path: Path) -> None:
    expected = Net()
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    drawn = torch.get_rng_state()
    model = shard(on_meta())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
    assert torch.equal(model.get_buffer("rotary.frequencies"), expected.rotary.frequencies)
    polyshard_huggingface.load(model, tmp_path)
    assert not any(bool(parameter.isnan().any()) for parameter in model.parameters())
    assert torch.equal(model.get_buffer("norm.running_var"), torch.ones(6))


def test_fresh_parameters_are_initialised_as_the_model_says(tmp_path: Path) -> None:
    content = {name: value for name, value in Net().state_dict().items() if not name.startswith("score")}
    save_file(content, tmp_path / "model.safetensors")
    seed_all(3)
    model = shard(on_meta(), fresh=("score.*",), rank=1)
    polyshard_huggingface.load(model, tmp_path, missing=["score.*"])
    seed_all(3)
    layer = nn.Linear(6, 3)
    # Of 3 rows the second rank has the last one.
    assert torch.equal(local(model.get_parameter("score.weight").detach()), layer.weight.detach()[2:])


@pytest.mark.parametrize("reads", ["all", "first"])
def test_what_may_be_missing_must_have_values(reads: Any, tmp_path: Path) -> None:
    content = {name: value for name, value in Net().state_dict().items() if not name.startswith("score")}
    save_file(content, tmp_path / "model.safetensors")

    def read(rank: int, world: ThreadedWorld) -> bool:
        with world.lock:
            model = on_meta()
        config = ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}, device="cpu")
        polyshard.shard(model, config, initializer=polyshard_huggingface.to_be_loaded(model))
        # One rank alone has elements of one of them.
        with pytest.raises(
            (ConfigError, RankMismatchError), match=r"lacks 'score.weight'.* to_be_loaded\(model, fresh=...\)"
        ):
            polyshard_huggingface.load(model, tmp_path, missing=["score.weight", "score.bias"], ranks=reads)
        return all(bool(parameter.isnan().all()) for parameter in model.parameters())

    assert all(ThreadedWorld(2).run(read))


class Forgetful(nn.Module):
    """A buffer that its module computes in the constructor alone, where there were no values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)


class HalfSet(Forgetful):
    def reset_parameters(self) -> None:
        self.get_buffer("mask")[:2] = True


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.slopes = [torch.ones(4)]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


@pytest.mark.parametrize("kind", [Forgetful, HalfSet])
def test_a_buffer_that_nothing_computes_is_refused_by_name(kind: type[nn.Module]) -> None:
    model = on_meta(kind)
    with pytest.raises(ParameterError, match=rf"do not hold the buffers 'mask' \({kind.__name__}\)"):
        shard(model)
    # As it was: it may be sharded in another way.
    assert all(parameter.is_meta for parameter in model.parameters())
    polyshard.shard(kind(), ShardConfig(collectives={"name": "fake", "world_size": 2}, device="cpu"))


def test_tensors_outside_of_buffers_are_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="keep 'slopes' as plain attributes"):
        shard(on_meta(Attribute))


def test_fresh_parameters_that_nothing_initialises_are_refused_by_name() -> None:
    with pytest.raises(ParameterError, match=r"'weight' \(Custom\) should be initialised afresh"):
        shard(on_meta(Custom), fresh=("weight",))
    # It needs no initialisation to be read.
    shard(on_meta(Custom))


def test_buffers_that_had_values_keep_them() -> None:
    model = on_meta()
    model.get_submodule("norm")._buffers["running_mean"] = torch.full((6,), 3.0)
    shard(model)
    assert torch.equal(model.get_buffer("norm.running_mean"), torch.full((6,), 3.0))


class Scaled(Net):
    """A scalar, which is left out of sharding here."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))


def test_what_was_left_on_the_meta_device_is_refused_by_name(tmp_path: Path) -> None:
    save_file(Scaled().state_dict(), tmp_path / "model.safetensors")
    config = ShardConfig(collectives={"name": "fake", "world_size": 2}, device="cpu")
    for with_memory in (False, True):
        model = on_meta(Scaled)
        if with_memory:
            model.scale = nn.Parameter(torch.empty(()))
        scale = model.get_parameter("scale")
        initializer = polyshard_huggingface.to_be_loaded(model)
        polyshard.shard(model, config, initializer=initializer, ignored_parameters=[scale])
        if with_memory:
            polyshard_huggingface.load(model, tmp_path)
            assert scale.item() == 2
        else:
            with pytest.raises(ConfigError, match="'scale' are on the meta device"):
                polyshard_huggingface.load(model, tmp_path)
