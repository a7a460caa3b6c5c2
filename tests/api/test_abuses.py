"""What is done wrong to sharding, on one of two processes or on both: the right error on each in time, and a model that
still trains, or says that it cannot."""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import polyshard
import pytest
import torch
import torch.distributed as dist
from fake_distribution import install
from polyshard import ShardConfig, errors
from processes import RankPool
from refusal import description
from torch import nn

POLICIES, PRECISION, OFFLOAD = "polyshard.policies", "polyshard.precision", "polyshard.offload"
SOURCE = """
import time
import torch
from polyshard.interfaces import (
    OffloadCapabilities, OffloadManager, PrecisionCaster, UnitDtypes, WrapPolicy
)


class Blocks(WrapPolicy):
    api_version = 1

    def __init__(self, context, depth=1):
        pass

    def plan(self, root, context):
        return {root[0]: {}}


class Elsewhere(Blocks):
    api_version = 1

    def plan(self, root, context):
        return {torch.nn.Linear(2, 2): {}}


class Newer(Blocks):
    api_version = 2


class Inherits(Blocks):
    pass


def without_context():
    return Blocks(None)


without_context.api_version = 1


class Sleeps(Blocks):
    api_version = 1

    def plan(self, root, context):
        time.sleep(5.0)
        raise RuntimeError("woke up too late")


class Dtype(PrecisionCaster):
    api_version = 1

    def __init__(self, context, dtype="float32"):
        self.dtype = getattr(torch, dtype)

    def dtypes(self, unit):
        return UnitDtypes(self.dtype, self.dtype, self.dtype, self.dtype)


class Integers(Dtype):
    api_version = 1

    def dtypes(self, unit):
        return UnitDtypes(torch.int32, torch.int32, torch.int32, torch.int32)


class Shelf(OffloadManager):
    api_version = 1
    capabilities = OffloadCapabilities(parks=True)
    local_options = frozenset({"park"})

    def __init__(self, context, park="clone"):
        self.park = park

    def place(self, unit, shard):
        if self.park == "strided":
            return torch.stack([shard, shard], 1)[:, 0]
        if self.park == "shape":
            return shard[:-1]
        if self.park == "zeros":
            return torch.zeros_like(shard)
        if self.park == "raise" and unit.name:
            raise OSError("no room")
        return shard.clone()

    def fetch(self, unit, master, own_slice):
        own_slice.copy_(master)

    def store_grad(self, unit, grad, into):
        return grad.clone() if into is None else into.add_(grad)
"""
NAMES = [
    (POLICIES, "blocks", "acme_abused:Blocks"),
    (POLICIES, "shared", "acme_abused:Blocks"),
    (POLICIES, "elsewhere", "acme_abused:Elsewhere"),
    (POLICIES, "newer", "acme_abused:Newer"),
    (POLICIES, "inherits", "acme_abused:Inherits"),
    (POLICIES, "no_context", "acme_abused:without_context"),
    (POLICIES, "sleeps", "acme_abused:Sleeps"),
    (POLICIES, "broken", "acme_broken:Blocks"),
    (POLICIES, "exits", "acme_exits:Blocks"),
    (PRECISION, "dtype", "acme_abused:Dtype"),
    (PRECISION, "integers", "acme_abused:Integers"),
    (OFFLOAD, "shelf", "acme_abused:Shelf"),
]


class Abuse(NamedTuple):
    """What is wrong, and the words of the error on the rank that did it."""

    settings: dict[str, Any]
    error: type[errors.PolyshardError]
    words: tuple[str, ...]


#: Done on both ranks, or on rank 1 alone: the other one then hears of it.
ABUSES: dict[str, Abuse] = {
    "two packages, one name": Abuse({"policy": "shared"}, errors.PluginConflictError, ("acme-abused", "acme-other")),
    "an import that fails": Abuse({"policy": "broken"}, errors.PluginLoadError, ("acme_broken", "ZeroDivisionError")),
    "an import that exits": Abuse({"policy": "exits"}, errors.PluginLoadError, ("acme_exits", "SystemExit")),
    "a newer contract": Abuse({"policy": "newer"}, errors.PluginVersionError, ("version 2", "Update polyshard")),
    "no contract of its own": Abuse({"policy": "inherits"}, errors.PluginVersionError, ("api_version", "inherits")),
    "no context": Abuse({"policy": "no_context"}, errors.PluginContractError, ("PluginContext", "signature ()")),
    "a name that is not there": Abuse({"policy": "blokcs"}, errors.PluginNotFoundError, ("Did you mean 'blocks'",)),
    "a misspelt option": Abuse(
        {"policy": {"name": "blocks", "dept": 2}}, errors.ConfigError, ("'dept'", "Did you mean 'depth'")
    ),
    "a module of another model": Abuse({"policy": "elsewhere"}, errors.PluginContractError, ("Linear", "not in")),
    "a dtype that cannot compute": Abuse({"precision": "integers"}, errors.PluginContractError, ("torch.int32",)),
    "strides": Abuse({"offload": {"name": "shelf", "park": "strided"}}, errors.PluginContractError, ("strides (2,)",)),
    "a shape": Abuse({"offload": {"name": "shelf", "park": "shape"}}, errors.PluginContractError, ("a tensor (",)),
    "values that are lost": Abuse(
        {"offload": {"name": "shelf", "park": "zeros"}}, errors.PluginContractError, ("other values", "unit '")
    ),
}
#: What rank 1 says where rank 0 says nothing of it, and words that both are told.
DIFFERENT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an option": ({"policy": {"name": "blocks", "depth": 2}}, ("depth", "'1'", "'2'")),
    "a dtype": ({"precision": {"name": "dtype", "dtype": "float64"}}, ("float64",)),
    "a setting": ({"batch_nbytes": 64}, ("batch_nbytes", "64")),
    "collectives that pretend": ({"collectives": {"name": "fake", "world_size": 2}}, ("'fake'", "'gloo'")),
}
#: Raised in ``place`` of the second unit, when the first is parked already.
LATE = Abuse({"offload": {"name": "shelf", "park": "raise"}}, OSError, ("no room",))  # type: ignore[arg-type]
TIMEOUT_S = 3.0


class Outcome(NamedTuple):
    kind: str
    text: str
    seconds: float
    kept: bool
    trains: bool


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trains(mine: nn.Module, rank: int) -> bool:
    """Whether a step of ``mine`` on two ranks is that of the whole model on both ranks' inputs."""
    whole = model()
    inputs = torch.arange(12.0).view(2, 2, 3) / 10
    polyshard.shard(mine, ShardConfig(collectives="gloo", policy="blocks", timeout_s=30.0))
    for each, own in ((whole, inputs), (mine, inputs[rank])):
        each(own).square().mean().backward()
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    with polyshard.unsharded(mine):
        found = [parameter.detach().clone() for parameter in mine.parameters()]
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, whole.parameters(), strict=True))


def attempt(rank: int, settings: dict[str, Any], *, then_trains: bool = True) -> Outcome:
    mine = model()
    before = description(mine)
    base: dict[str, Any] = {"collectives": "gloo", "policy": {"name": "blocks", "depth": 1}, "timeout_s": TIMEOUT_S}
    dist.barrier()
    started = time.monotonic()
    try:
        polyshard.shard(mine, ShardConfig(**{**base, **settings}))
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    else:
        kind = text = ""
    seconds = time.monotonic() - started
    kept = description(mine) == before
    dist.barrier()
    return Outcome(kind, text, seconds, kept, kept and (not then_trains or trains(mine, rank)))


def run_all(rank: int, folder: str) -> dict[tuple[str, str], Outcome]:
    sys.path.insert(0, folder)
    found = {}
    for name, abuse in {**ABUSES, "half way": LATE}.items():
        # What trains after a failure on one rank alone trains after one on both.
        found[name, "both"] = attempt(rank, abuse.settings, then_trains=False)
        # The same plugin, where it may be told another thing on each rank.
        sound = {"offload": "shelf"} if "offload" in abuse.settings else {}
        found[name, "one"] = attempt(rank, abuse.settings if rank else sound)
    for name, (settings, _) in DIFFERENT.items():
        found[name, "one"] = attempt(rank, settings if rank else {})
    found["a hang", "one"] = attempt(rank, {"policy": "sleeps"} if rank else {})
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Outcome]]:
    site = tmp_path_factory.mktemp("site")
    modules = {"acme_abused": SOURCE, "acme_broken": "1 / 0\n", "acme_exits": "raise SystemExit(3)\n"}
    install(site, "acme-abused", "1.0", NAMES, modules)
    install(site, "acme-other", "1.0", [(POLICIES, "shared", "acme_abused:Blocks")])
    with RankPool(2, "gloo") as pool:
        return pool.run(run_all, str(site), timeout=100.0)


def assert_kept(outcome: Outcome, limit_s: float) -> None:
    assert outcome.kept, outcome
    assert outcome.trains, outcome
    assert outcome.seconds < limit_s, outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ABUSES, "half way"])
def test_on_both_ranks(outcomes: list[dict[tuple[str, str], Outcome]], name: str) -> None:
    abuse = ABUSES.get(name, LATE)
    for rank in outcomes:
        outcome = rank[name, "both"]
        assert outcome.kind == abuse.error.__name__, outcome
        assert all(word in outcome.text for word in abuse.words), outcome
        assert_kept(outcome, TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ABUSES, "half way"])
def test_on_one_rank(outcomes: list[dict[tuple[str, str], Outcome]], name: str) -> None:
    abuse = ABUSES.get(name, LATE)
    first, second = (rank[name, "one"] for rank in outcomes)
    assert second.kind == abuse.error.__name__, second
    assert first.kind == "RankMismatchError", first
    assert "rank 1: " in first.text
    # The reason is told to the rank that did nothing wrong.
    for outcome in (first, second):
        assert all(word in outcome.text for word in abuse.words), outcome
        assert_kept(outcome, TIMEOUT_S)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ(outcomes: list[dict[tuple[str, str], Outcome]], name: str) -> None:
    for rank in outcomes:
        outcome = rank[name, "one"]
        assert outcome.kind == "RankMismatchError", outcome
        assert all(word in outcome.text for word in DIFFERENT[name][1]), outcome
        assert_kept(outcome, TIMEOUT_S)


def test_a_plugin_that_hangs(outcomes: list[dict[tuple[str, str], Outcome]]) -> None:
    first, second = (rank["a hang", "one"] for rank in outcomes)
    # The rank that waits is told after the time limit; the other one when it wakes up, by its own error.
    assert first.kind == "RankMismatchError", first
    assert "Ranks [1] did not come" in first.text
    assert TIMEOUT_S <= first.seconds < 2 * TIMEOUT_S
    assert second.kind == "RuntimeError", second
    for outcome in (first, second):
        assert outcome.kept
        assert outcome.trains
