"""Collectives around collectives, named in the configuration."""

from __future__ import annotations

import copy
import dataclasses
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import polyshard
import pytest
import torch
from fake_distribution import install
from parity import Block, Net, adam, assert_parity, seeded, square_step, units_of
from polyshard import ShardConfig
from polyshard.errors import PluginContractError
from polyshard.interfaces import Collectives, CollectivesDecorator, Group, PluginContext, ReduceOp, Work
from polyshard_testing import CollectivesSuite, Rank, plugin_context
from torch import nn

SOURCE = """
import copy
from polyshard.interfaces import CollectivesDecorator, Group


class Counting(CollectivesDecorator):
    api_version = 1

    def __init__(self, context, inner):
        super().__init__(context.construct(Group.COLLECTIVES, inner))
        self.counts = {"gather": 0, "reduce": 0, "parts": 0}

    def around(self, inner):
        part = copy.copy(self)
        part.inner = inner
        self.counts["parts"] += 1
        return part

    def all_gather(self, out, shard):
        self.counts["gather"] += 1
        return super().all_gather(out, shard)

    def reduce_scatter(self, out, full, *, op, scratch=None):
        self.counts["reduce"] += 1
        return super().reduce_scatter(out, full, op=op, scratch=scratch)


class Forgetful(Counting):
    api_version = 1

    def all_gather(self, out, shard):
        super().all_gather(out, shard)
"""


class Plain(CollectivesDecorator):
    """Changes nothing."""

    api_version = 1

    def __init__(self, context: PluginContext, inner: Any = "auto") -> None:
        super().__init__(context.construct(Group.COLLECTIVES, inner))

    def around(self, inner: Collectives) -> Collectives:
        part = copy.copy(self)
        part.inner = inner
        return part


class OneByOne(Plain):
    """Asks the inner collectives once for each operation, as whatever overrides these two does."""

    api_version = 1

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return super().all_gather(out, shard)

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        return super().reduce_scatter(out, full, op=op, scratch=scratch)


class TestPlain(CollectivesSuite):
    decorator: ClassVar[type[Plain]] = Plain

    def make(self, rank: Rank) -> Collectives:  # type: ignore[override]
        return self.decorator(plugin_context(), rank.collectives)

    def make_impatient(self, rank: Rank, timeout: timedelta) -> Collectives:
        return self.decorator(dataclasses.replace(plugin_context(), timeout=timeout), rank.collectives)


@pytest.mark.nightly
class TestOneByOne(TestPlain):
    decorator = OneByOne
    world_sizes = (2,)


@pytest.fixture(autouse=True)
def _acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [("polyshard.collectives", name.lower(), f"acme_counts:{name}") for name in ("Counting", "Forgetful")]
    install(tmp_path, "acme-counts", "1.0", offers)
    (tmp_path / "acme_counts.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_counts", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "parts"), [({}, 0), ({"strategy": "hybrid_shard", "shard_size": 2}, 2), ({"strategy": "no_shard"}, 0)]
)
def test_a_decorated_backend_trains_as_the_whole_model_does(settings: dict[str, Any], parts: int) -> None:
    found: list[Any] = []

    def wrap(model: nn.Module, config: ShardConfig) -> nn.Module:
        collectives = {"name": "counting", "inner": config.collectives}
        polyshard.shard(model, dataclasses.replace(config, collectives=collectives))
        [used] = [each for each in polyshard.plugins(model) if each.group is Group.COLLECTIVES]
        assert [each.name for each in used.inner] == ["threaded"]
        found.append(used.instance)
        return model

    assert_parity(
        seeded(Net), square_step, 4, optimizer=adam, settings={"policy": units_of(Block), **settings}, wrap=wrap
    )
    assert len(found) == 4
    for decorator in found:
        assert decorator.counts["parts"] == parts
        # Of units that go together, each is asked for by itself: the inner many would go past the decorator.
        gathers = "no_shard" not in settings.values()
        assert (decorator.counts["gather"] > 0) is gathers
        assert (decorator.counts["reduce"] > 0) is gathers


def test_a_batch_through_an_operation_without_work_is_refused_by_plugin_and_package() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    collectives = {"name": "forgetful", "inner": {"name": "fake", "world_size": 2}}
    polyshard.shard(model, ShardConfig(collectives=collectives, policy="always"))
    words = r"all_gather of acme_counts:Forgetful \('forgetful', from acme-counts 1\.0\) returned None .* Return a Work"
    with pytest.raises(PluginContractError, match=words):
        model(torch.ones(1, 4))


def test_everything_else_goes_on_to_the_inner_collectives() -> None:
    missing = [
        name
        for name in vars(Collectives)
        if not name.startswith("_") and name not in vars(CollectivesDecorator) and name != "api_version"
    ]
    assert missing == []
