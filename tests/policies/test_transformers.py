"""The policy ``transformers``, over modules that say of themselves what Transformers' models do."""

from __future__ import annotations

from copy import deepcopy

import polyshard
import pytest
import torch
from polyshard.errors import ConfigError, RankMismatchError
from polyshard.interfaces import PluginContext, PolicyContext, WrapPolicy
from polyshard_backends.threaded import ThreadedWorld
from polyshard_policies.module_class import NoSplitModules
from polyshard_testing import PolicySuite
from torch import nn
from torch.distributed.tensor import DTensor

CONTEXT = PluginContext(name="transformers", device=torch.device("cpu"))


class Layer(nn.Linear):
    pass


class TowerLayer(nn.Linear):
    pass


class Tower(nn.Module):
    _no_split_modules = ("TowerLayer",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TowerLayer(8, 8), TowerLayer(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Model(nn.Module):
    """A language model, and a tower that runs where there is an image."""

    _no_split_modules = ["Layer"]  # noqa: RUF012 - as Transformers' models have it

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.blocks = nn.ModuleList([Layer(8, 8), Layer(8, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        if image is not None:
            x = x + self.tower(image)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


class TestNoSplitModules(PolicySuite):
    def make(self) -> WrapPolicy:
        return NoSplitModules(CONTEXT)

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Model()


def chosen(root: nn.Module, policy: WrapPolicy, **ignored: object) -> list[str]:
    names = {module: name for name, module in root.named_modules()}
    return [names[module] for module in policy.plan(root, PolicyContext(**ignored))]


def test_chooses_what_the_model_and_models_inside_it_name() -> None:
    towers = ["tower.layers.0", "tower.layers.1"]
    assert chosen(Model(), NoSplitModules(CONTEXT)) == [*towers, "blocks.0", "blocks.1"]
    assert chosen(Model(), NoSplitModules(CONTEXT, leave_out=["TowerLayer"])) == ["blocks.0", "blocks.1"]
    wrapped = nn.Sequential(Model())
    assert chosen(wrapped, NoSplitModules(CONTEXT))[-1] == "0.blocks.1"
    model = Model()
    assert chosen(model, NoSplitModules(CONTEXT), ignored_modules={model.blocks}) == towers


def test_a_model_that_names_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no module in this Sequential names any\. Name the classes of its blocks"):
        chosen(nn.Sequential(nn.Linear(2, 2)), NoSplitModules(CONTEXT))
    lost = Model()
    lost.blocks, lost.tower = nn.ModuleList(), nn.Identity()
    with pytest.raises(ConfigError, match="Model has no module of the classes in its _no_split_modules, Layer"):
        chosen(lost, NoSplitModules(CONTEXT))
    with pytest.raises(ConfigError, match=r"names 'TowerLayr', which Model has not.*Did you mean 'TowerLayer'"):
        chosen(Model(), NoSplitModules(CONTEXT, leave_out="TowerLayr"))
    with pytest.raises(ConfigError, match="takes names of classes"):
        NoSplitModules(CONTEXT, leave_out=[3])  # type: ignore[list-item]


def test_a_tower_that_some_ranks_skip_trains_where_it_is_left_out() -> None:
    torch.manual_seed(0)
    inputs, image, unsharded = torch.randn(2, 4, 8), torch.randn(4, 8), Model()
    models = [deepcopy(unsharded), deepcopy(unsharded)]

    def train(policy: WrapPolicy, world: ThreadedWorld, rank: int) -> nn.Module:
        config = polyshard.ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}, policy=policy)
        model = polyshard.shard(models[rank], config)
        # The second rank's batch has no image.
        model(inputs[rank], None if rank else image).square().mean().backward()
        return model

    def compare(rank: int, world: ThreadedWorld) -> None:
        model = train(NoSplitModules(CONTEXT, leave_out="TowerLayer"), world, rank)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            rows = wanted[name].chunk(2)[rank]
            torch.testing.assert_close(parameter.grad.to_local(), rows, msg=name)

    for rank in range(2):
        (unsharded(inputs[rank], None if rank else image).square().mean() / 2).backward()
    wanted = {name: parameter.grad for name, parameter in unsharded.named_parameters()}
    ThreadedWorld(2).run(compare)
    models = [deepcopy(unsharded), deepcopy(unsharded)]
    for model in models:
        model.zero_grad()

    def differ(rank: int, world: ThreadedWorld) -> None:
        with pytest.raises(RankMismatchError, match=r"tower\.layers\.0(.|\n)*leave_out of 'transformers'"):
            train(NoSplitModules(CONTEXT), world, rank)

    ThreadedWorld(2).run(differ)
