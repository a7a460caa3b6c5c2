"""Plugins as others wrote them against version 1 of each contract still load, train and pass today's suites.

The files in ``api1`` are frozen: see the README there.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from fake_distribution import install
from parity import Net, adam, on_ranks, seeded, sgd, square_step, train_reference
from polyshard import ShardConfig
from polyshard.catalog import PluginState, installed, resolve
from polyshard.interfaces import Collectives, Group, PluginContext
from polyshard.testing import (
    CollectivesSuite,
    LayoutSuite,
    ListenerSuite,
    OffloadSuite,
    PolicySuite,
    PrecisionSuite,
)
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

PACKAGE = "api1_plugins"
FOLDER = Path(__file__).parents[1] / "api1" / PACKAGE
PLUGINS = {
    Group.COLLECTIVES: {"loopback": "collectives:Loopback", "mail": "mail:Mail"},
    Group.PRECISION: {"int8_gather": "precision:Int8Gather"},
    Group.OFFLOAD: {"disk": "offload:DiskOffload"},
    Group.POLICIES: {"keep_last": "policies:KeepLast"},
    Group.LAYOUTS: {"whole_heads": "layouts:WholeHeads"},
    Group.PLUGINS: {"traffic": "listeners:Traffic"},
}
CONTEXT = PluginContext(name="test", device=torch.device("cpu"))
STEPS, RANKS = 5, 2


def _importable() -> None:
    """Make the folder a package that can be imported, without a place on the path that others would see."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


_importable()


def plugin(group: Group, name: str) -> Any:
    """The class behind ``name``."""
    module, _, attribute = PLUGINS[group][name].partition(":")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), attribute)


@pytest.fixture(autouse=True)
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, installed."""
    site = tmp_path / "site"
    offers = [(group.value, name, f"{PACKAGE}.{at}") for group, names in PLUGINS.items() for name, at in names.items()]
    install(site, "api1-plugins", "1.0", offers)
    monkeypatch.syspath_prepend(site)


def test_there_is_one_of_every_kind_and_all_are_ready() -> None:
    for group in Group:
        found = {each.name: each for each in installed(group) if each.distribution == "api1-plugins"}
        assert set(found) == set(PLUGINS[group]) != set()
        for name, each in found.items():
            assert (each.state, each.error) == (PluginState.READY, ""), name
            resolved = resolve(group, name)
            assert (resolved.distribution, resolved.version) == ("api1-plugins", "1.0")
            assert resolved.factory.api_version == 1


def trained(
    settings: dict[str, Any], box: str, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam
) -> list[dict[str, torch.Tensor]]:
    """Whole parameters on each rank, trained with the package's own collectives."""
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(model)
        own = {key: value(rank) if callable(value) else value for key, value in settings.items()}
        collectives = {"name": "mail", "box": box, "rank": rank, "size": RANKS}
        polyshard.shard(mine, ShardConfig(collectives=collectives, timeout_s=10.0, **own))
        optimizer = make_optimizer(mine)
        for turn in range(STEPS):
            square_step(mine, turn, rank)
            optimizer.step()
            optimizer.zero_grad()
        with polyshard.unsharded(mine):
            return {name: parameter.detach().clone() for name, parameter in mine.named_parameters()}

    return on_ranks(RANKS, on_rank)


@pytest.mark.parametrize(
    "settings",
    [
        lambda folder: {},
        lambda folder: {"strategy": "hybrid_shard", "shard_size": 1},
        lambda folder: {"offload": lambda rank: {"name": "disk", "folder": str(folder)}},
        lambda folder: {"policy": {"name": "keep_last", "attribute": "blocks"}},
        lambda folder: {"layout": {"name": "whole_heads", "rows": 3}},
    ],
    ids=["collectives", "collectives, in parts", "offload", "policy", "layout"],
)
def test_it_trains_as_an_unsharded_model_does(
    settings: Callable[[Path], dict[str, Any]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = train_reference(seeded(Net), square_step, RANKS, STEPS, adam).parameters
    for whole in trained(settings(tmp_path), request.node.name):
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def test_pretended_ranks_that_hold_the_whole_train_as_an_unsharded_model_does() -> None:
    expected = train_reference(seeded(Net), square_step, 1, STEPS, adam).parameters
    model = seeded(Net)
    config = ShardConfig(collectives={"name": "loopback", "world_size": 4}, strategy="no_shard", policy="keep_last")
    polyshard.shard(model, config)
    optimizer = adam(model)
    for turn in range(STEPS):
        square_step(model, turn, 0)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().view_as(expected[name]), expected[name], rtol=1e-12, atol=1e-12)


def test_a_wire_in_int8_trains_as_near_as_its_rounding_allows() -> None:
    before = {name: parameter.detach() for name, parameter in seeded(Net).named_parameters()}
    expected = train_reference(seeded(Net), square_step, RANKS, STEPS, sgd).parameters
    first, second = trained({"precision": "int8_gather"}, "int8", sgd)
    for name, value in expected.items():
        assert torch.equal(first[name], second[name])
        # What is shown was rounded to half a step of 1/127 of the largest element; what was learnt saw such values.
        rounding = value.abs().max() / 254
        learnt = (value - before[name]).norm()
        assert (first[name] - value).norm() < 0.05 * learnt + rounding * value.numel() ** 0.5, name
        assert not torch.equal(first[name], value)


def test_its_listener_counts_what_the_engine_does(tmp_path: Path) -> None:
    def listeners(rank: int) -> list[dict[str, Any]]:
        return [{"name": "traffic", "file": str(tmp_path / f"traffic{rank}")}]

    trained({"listeners": listeners, "policy": {"name": "keep_last", "attribute": "blocks"}}, "listener")
    for rank in range(RANKS):
        # Three blocks and the root are gathered; for the backward, the last block and the root are there still.
        assert (tmp_path / f"traffic{rank}").read_text() == "6 gathers, 4 reductions\n" * STEPS


class TestLoopback(CollectivesSuite):
    def run_ranks(self, world_size: int, fn: Callable[[Collectives], Any]) -> list[Any]:
        make = plugin(Group.COLLECTIVES, "loopback")
        return [fn(make(CONTEXT, world_size=world_size, rank=rank)) for rank in range(world_size)]


class TestInt8Gather(PrecisionSuite):
    wire_tolerance = 0.01  # half a step of 1/127, and what bf16 masters round

    def make(self) -> Any:
        return plugin(Group.PRECISION, "int8_gather")(CONTEXT)


class TestDiskOffload(OffloadSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self._folder = str(tmp_path)

    def make(self) -> Any:
        return plugin(Group.OFFLOAD, "disk")(CONTEXT, folder=self._folder)


class TestKeepLast(PolicySuite):
    def make(self) -> Any:
        return plugin(Group.POLICIES, "keep_last")(CONTEXT)


class TestWholeHeads(LayoutSuite):
    def make(self) -> Any:
        return plugin(Group.LAYOUTS, "whole_heads")(CONTEXT, rows=4)


class TestTraffic(ListenerSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self._file = str(tmp_path / "traffic")

    def make(self) -> Any:
        return plugin(Group.PLUGINS, "traffic")(CONTEXT, file=self._file)


def test_a_bare_module_takes_the_listener_without_a_rank(tmp_path: Path) -> None:
    """Version 1 gave listeners no rank; one that does not ask for it is served as before."""
    file = tmp_path / "alone"
    listener = {"name": "traffic", "file": str(file)}
    model = polyshard.shard(
        nn.Linear(4, 4).double(), ShardConfig(collectives={"name": "loopback", "world_size": 2}, listeners=[listener])
    )
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert file.read_text() == "1 gathers, 1 reductions\n"
