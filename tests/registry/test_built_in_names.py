"""Names of built-in plugins stand for polyshard's own, also where another package offers them."""

from __future__ import annotations

import sys
from pathlib import Path

import polyshard
import pytest
import torch
import torch.distributed as dist
from fake_distribution import install
from polyshard import ShardConfig, catalog
from polyshard.interfaces import Group
from polyshard.testing import plugin_context
from processes import run_processes
from torch import nn

#: What a configuration uses that says nothing, and what ``auto`` asks for.
DEFAULTS = [
    (Group.COLLECTIVES, "auto"),
    (Group.COLLECTIVES, "gloo"),
    (Group.COLLECTIVES, "nccl"),
    (Group.COLLECTIVES, "fake"),
    (Group.PRECISION, "none"),
    (Group.OFFLOAD, "none"),
    (Group.POLICIES, "never"),
    (Group.LAYOUTS, "flat"),
]
SOURCE = "raise SystemExit('the hijacker was imported')"


class RankOf:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 4


def hijack(site: Path) -> None:
    install(site, "a-hijacker", "9.9", [(group.value, name, "hijacker:Taken") for group, name in DEFAULTS])
    (site / "hijacker.py").write_text(SOURCE)


def test_the_default_configuration_is_polyshards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hijack(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    offered = [offer.distribution for offer in catalog.offers.offers_of(Group.COLLECTIVES, name="auto")]
    assert offered == ["a-hijacker", "polyshard"]
    model = polyshard.shard(nn.Linear(8, 8), ShardConfig(collectives=RankOf()))
    model(torch.ones(2, 8)).sum().backward()
    # 72 elements over four ranks.
    assert model.weight.numel() + model.bias.numel() == 18
    assert "hijacker" not in sys.modules


def test_auto_makes_polyshards_backend_and_shows_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hijack(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = run_processes(1, what_auto_makes, str(tmp_path), timeout=30.0)
    assert made == [[("auto", "polyshard"), ("gloo", "polyshard")]]


def what_auto_makes(rank: int, site: str) -> list[tuple[str, str]]:
    assert dist.get_world_size() == 1
    sys.path.insert(0, site)
    made = catalog.construct(catalog.resolve(Group.COLLECTIVES, "auto"), plugin_context())
    assert [row[1]["name"] for row in catalog.fingerprint(made)] == ["auto", "gloo"]
    return [(each.resolved.name, each.resolved.distribution) for each in made.walk()]
