"""Every unit of a model has a name of its own, which says what sets it apart from others of the same module."""

from __future__ import annotations

import dataclasses
from typing import Any

import polyshard
import pytest
import torch
from encodings_of_gathers import Int8Encoding
from parity import Block, Net, adam, assert_parity, on_ranks, root_of, seeded, threaded, units_of
from polyshard import ShardConfig
from polyshard.errors import ParameterChangedError
from polyshard.interfaces import OffloadCapabilities, OffloadManager, PluginContext, UnitSpec
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from torch import nn


class ByName(OffloadManager):
    """Keeps each unit's master under the unit's name, as an author would, and reads it back from there."""

    def __init__(self) -> None:
        self.masters: dict[str, torch.Tensor] = {}

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(offloads=True)

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        self.masters[unit.name] = shard.clone()
        return self.masters[unit.name]

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(self.masters[unit.name])

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.clone() if into is None else into.add_(grad)


class Adapted(Block):
    """Trained and frozen parameters in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.shift = nn.Parameter(torch.tensor([0.25]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale + self.shift)


class Model(nn.Module):
    """The same in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapted(), Adapted()])
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.shift = nn.Parameter(torch.tensor([0.5]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.shift


def fake(**settings: Any) -> ShardConfig:
    return ShardConfig(collectives=FakeCollectives(PluginContext("fake", torch.device("cpu")), 1, 2), **settings)


def mixed() -> nn.Module:
    """Three units a block, since scales are narrower than the rest; two of the root."""
    model = Model().double()
    for module in (*model.blocks, model):
        module.scale.data = module.scale.data.float()
    return model


def test_units_of_one_module_are_told_apart() -> None:
    model = mixed()
    polyshard.shard(model, fake(policy=units_of(Adapted)))
    specs = [unit.spec for unit in root_of(model).units]
    assert [spec.name for spec in specs] == [
        "",
        "[float64, frozen]",
        "blocks.0",
        "blocks.0[float64]",
        "blocks.0[float64, frozen]",
        "blocks.1",
        "blocks.1[float64]",
        "blocks.1[float64, frozen]",
    ]
    assert [spec.module_name for spec in specs] == ["", "", *["blocks.0"] * 3, *["blocks.1"] * 3]
    assert [unit.name for unit in root_of(model).units][:3] == ["(root)", "(root)[float64, frozen]", "blocks.0"]


def test_names_stay_apart_when_the_model_becomes_part_of_a_larger_one() -> None:
    model = mixed()
    for block in model.blocks:
        polyshard.fully_shard(block, fake())
    polyshard.fully_shard(model, fake())
    outer = nn.ModuleDict({"encoder": model, "head": nn.Linear(2, 2)})
    polyshard.fully_shard(outer, fake())
    names = [unit.spec.name for unit in root_of(outer).units]
    assert names == [
        "",
        "encoder",
        "encoder[float64, frozen]",
        *(f"encoder.blocks.{index}{suffix}" for index in (0, 1) for suffix in ("", "[float64]", "[float64, frozen]")),
    ]
    parameters = [name for unit in root_of(outer).units for name in unit.spec.parameter_names]
    assert sorted(parameters) == sorted(name for name, _ in outer.named_parameters())


def test_a_manager_that_keeps_masters_by_name_trains_right() -> None:
    model = seeded(Model)

    def step(module: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = module(torch.full((2, 5), float(turn + rank), dtype=torch.float64)).square().mean()
        loss.backward()
        return [loss.detach()]

    def wrap(module: nn.Module, config: ShardConfig) -> nn.Module:
        return polyshard.shard(module, dataclasses.replace(config, offload=ByName()))

    assert_parity(model, step, 2, optimizer=adam, settings={"policy": units_of(Adapted)}, wrap=wrap)


def test_settings_by_pattern_hold_for_every_unit_of_a_module() -> None:
    model = mixed()
    precision = {"name": "mixed", "param": "fp32", "overrides": {"blocks.1": {"param": "fp64"}, "": {"param": "fp64"}}}
    polyshard.shard(model, fake(policy=units_of(Adapted), precision=precision))
    computes = {unit.spec.name: unit.dtypes.compute for unit in root_of(model).units}
    wide = {name for name, dtype in computes.items() if dtype is torch.float64}
    assert wide == {"", "[float64, frozen]", "blocks.1", "blocks.1[float64]", "blocks.1[float64, frozen]"}


@pytest.mark.slow
def test_a_part_that_was_given_back_keeps_its_name_in_a_larger_model() -> None:
    class Peeks(nn.Module):
        """Computes with the head's weight outside of the head's forward."""

        def __init__(self) -> None:
            super().__init__()
            self.block = Block(64, 8)
            self.head = nn.Linear(64, 32768, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.block(x), self.head.weight)

    def on_rank(rank: int, world: ThreadedWorld) -> list[str]:
        with world.lock:
            model = seeded(Peeks)
        config = threaded(world, rank)
        polyshard.fully_shard(model.block, config)
        polyshard.fully_shard(model, config)
        model(torch.ones(1, 64, dtype=torch.float64)).sum().backward()
        outer = nn.ModuleDict({"lm": model, "extra": seeded(Net)})
        polyshard.fully_shard(outer, config)
        return [unit.spec.name for unit in root_of(outer).units]

    assert on_ranks(2, on_rank) == [["", "lm.head", "lm.block"]] * 2


def test_parameters_have_the_names_that_the_larger_model_gives_them() -> None:
    class Outer(nn.Module):
        """Reaches a block of the inner model by a path of its own, before the inner model itself."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first = inner.get_submodule("blocks.1")
            self.encoder = inner
            self.head = nn.Linear(2, 2)

    inner: Any = Net()
    for block in inner.blocks:
        polyshard.fully_shard(block, fake())
    polyshard.fully_shard(inner, fake())
    outer = Outer(inner)
    polyshard.fully_shard(outer, fake())
    assert [unit.spec.name for unit in root_of(outer).units] == [
        "",
        "first",
        "encoder",
        "encoder.blocks.0",
        "encoder.blocks.2",
    ]
    names = {name for unit in root_of(outer).units for name in unit.spec.parameter_names}
    assert names == {name for name, _ in outer.named_parameters()}
    aliases = {name for unit in root_of(outer).units for each in unit.parameters for name in each.names}
    assert aliases == {name for name, _ in outer.named_parameters(remove_duplicate=False)}


class NotingNames(Int8Encoding):
    """Tells by which names it is asked for each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[str] = []
        self.decoded: list[str] = []

    def encode(self, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
        self.encoded.append(unit.name)
        super().encode(unit, message, shard)

    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        self.decoded.append(unit.name)
        super().decode(unit, message, out)


@pytest.mark.parametrize("together", [0, "16 MiB"])
def test_a_precision_plugin_is_asked_by_the_names_of_the_larger_model(together: int | str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            inner: Any = seeded(Net).float()
        plugin = NotingNames()
        config = threaded(world, rank, precision=plugin, batch_nbytes=together, split_root=False)
        for block in inner.blocks:
            polyshard.fully_shard(block, config)
        outer = nn.Sequential(seeded(lambda: nn.Linear(3, 3)).float(), inner)
        polyshard.fully_shard(outer, config)
        names = {unit.spec.name for unit in root_of(outer).units}
        assert names == {"", "1.blocks.0", "1.blocks.1", "1.blocks.2"}
        plugin.encoded.clear()
        plugin.decoded.clear()
        outer(torch.ones(4, 3)).sum().backward()
        assert set(plugin.prepared[-1]) == names
        assert set(plugin.encoded) == names
        assert set(plugin.decoded) == names

    on_ranks(2, on_rank)


def test_errors_name_parameters_as_the_larger_model_does() -> None:
    """Whatever was made while the inner model was the outermost one, and had run."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.encoder = inner
            self.head = nn.Linear(2, 2)
            self.peeks = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.encoder(x))
            return y * self.encoder.get_submodule("blocks.1.up").weight.sum() if self.peeks else y

    inner: Any = Net()
    for block in inner.blocks:
        polyshard.fully_shard(block, fake())
    polyshard.fully_shard(inner, fake())
    inner(torch.ones(4, 3)).sum().backward()
    outer = Outer(inner)
    polyshard.fully_shard(outer, fake())
    outer.peeks = True
    # Outside of its forward it is a DTensor, and torch says so.
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        outer(torch.ones(4, 3))
    outer.peeks = False
    inner.blocks[1].up.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ParameterChangedError, match=r"'encoder\.blocks\.1\.up\.weight'"):
        outer(torch.ones(4, 3))
