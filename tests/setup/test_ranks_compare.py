"""Ranks that would do different things are told so when they shard, and those that may differ are let be."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from fake_distribution import install
from parity import Block, Net, on_ranks, seeded, square_step, threaded, units_of
from polyshard import ShardConfig, errors
from polyshard.interfaces import (
    GatherEncoding,
    PolicyContext,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    UnitPlan,
    UnitSpec,
    WrapPolicy,
)
from polyshard_backends.threaded import ThreadedWorld
from processes import run_processes
from refusal import description
from torch import nn

#: A stranger's plugins, whose options differ between ranks, lawfully and not.
SOURCE = '''
import torch
from polyshard import hookimpl
from polyshard.interfaces import (
    Listener, OffloadCapabilities, OffloadManager, PrecisionCapabilities, PrecisionPlugin, UnitDtypes, GatherEncoding,
)


class Int8(PrecisionPlugin):
    """One scale for each block of elements."""

    api_version = 1
    capabilities = PrecisionCapabilities(encodes=True)

    def __init__(self, context, block=64, extra=None):
        self._block = block

    def dtypes(self, unit):
        dtype = unit.master_dtype
        return UnitDtypes(dtype, dtype, dtype, dtype)

    def encoding(self, unit):
        return GatherEncoding(-(-unit.shard_numel // 1024) * 2048)


class Folder(OffloadManager):
    """Each rank has a folder of its own."""

    api_version = 1
    local_options = frozenset({"folder"})
    capabilities = OffloadCapabilities(offloads=False)

    def __init__(self, context, folder, depth=1):
        pass

    def place(self, unit, shard):
        return shard

    def fetch(self, unit, master, own_slice):
        own_slice.copy_(master)

    def store_grad(self, unit, grad, into):
        return grad


class Misspelt(Folder):
    """Names its local option as one word."""

    api_version = 1
    local_options = "folder"


class Metrics(Listener):
    """Counts."""

    api_version = 1

    def __init__(self, context, every=1):
        pass

    @hookimpl
    def step_end(self):
        pass
'''


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        ("polyshard.precision", "eight", "acme_compared:Int8"),
        ("polyshard.offload", "folder", "acme_compared:Folder"),
        ("polyshard.offload", "misspelt", "acme_compared:Misspelt"),
        ("polyshard.plugins", "metrics", "acme_compared:Metrics"),
    ]
    install(tmp_path, "acme-compared", "1.0", points, {"acme_compared": SOURCE})
    monkeypatch.syspath_prepend(tmp_path)


class Overrides(WrapPolicy):
    """Every block, with settings of its own."""

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self._overrides = overrides

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        return {module: self._overrides for module in root.modules() if isinstance(module, Block)}


@dataclass
class Dtypes(PrecisionPlugin):
    """Answers one dtype for everything but the optimizer's gradients."""

    compute: torch.dtype

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        return UnitDtypes(self.compute, self.compute, self.compute, unit.master_dtype)


class Answers(PrecisionPlugin):
    """The same from an object that says nothing about itself."""

    capabilities = PrecisionCapabilities(encodes=True)

    def __init__(self, compute: torch.dtype = torch.float64, nbytes: int | None = None) -> None:
        self._compute, self._nbytes = compute, nbytes

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        return UnitDtypes(self._compute, self._compute, self._compute, unit.master_dtype)

    def encoding(self, unit: UnitSpec) -> GatherEncoding | None:
        return None if self._nbytes is None else GatherEncoding(self._nbytes)


#: What rank 0 has, what rank 1 has, and words of the message.
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "an option": (
        {"precision": {"name": "eight", "block": 1000}},
        {"precision": {"name": "eight", "block": 1040}},
        ("'eight'", "['block', '1000']", "['block', '1040']"),
    ),
    "an option inside another": (
        {"precision": {"name": "mixed", "overrides": {"blocks.*": {"param": "fp32"}}}},
        {"precision": {"name": "mixed", "overrides": {"blocks.*": {"param": "bf16"}}}},
        ("blocks.*", "fp32", "bf16"),
    ),
    "a function among options": (
        {"precision": {"name": "eight", "extra": torch.tanh}},
        {"precision": {"name": "eight", "extra": torch.sin}},
        ("tanh", "sin"),
    ),
    "a field of an object": (
        {"precision": Dtypes(torch.float32)},
        {"precision": Dtypes(torch.float64)},
        ("'Dtypes'", "torch.float32", "torch.float64"),
    ),
    "what an object answers": (
        {"precision": Answers(torch.float32)},
        {"precision": Answers(torch.float64)},
        ("'(root)'", "dtypes", "torch.float32", "torch.float64"),
    ),
    "what travels": (
        {"precision": Answers(nbytes=512)},
        {"precision": Answers(nbytes=1024)},
        ("'(root)'", "bytes of a gather", "512", "1024"),
    ),
    "a plugin of the policy's overrides": (
        {"policy": Overrides({"precision": "none"})},
        {"policy": Overrides({"precision": "fp32"})},
        ("'blocks.0'", "'none'", "'fp32'"),
    ),
    "reshard_after_forward of a unit": (
        {"policy": Overrides({})},
        {"policy": Overrides({"reshard_after_forward": False})},
        ("'blocks.0'", "reshard_after_forward", "False"),
    ),
    "strategy": (
        {"strategy": "full_shard"},
        {"strategy": "no_shard"},
        ("['strategy', 'full_shard', [[0, 1]], ", "['strategy', 'no_shard', [[0], [1]], "),
    ),
    "batch_nbytes": ({"batch_nbytes": 0}, {"batch_nbytes": "1 MiB"}, ("batch_nbytes", "0", "1048576")),
    "forward_prefetch": ({"forward_prefetch": 1}, {"forward_prefetch": 2}, ("forward_prefetch", "1", "2")),
    "split_root": ({"split_root": True}, {"split_root": False}, ("split_root", "True", "False")),
    "an option of a listener": (
        {"listeners": [{"name": "metrics", "every": 1}]},
        {"listeners": [{"name": "metrics", "every": 2}]},
        ("'metrics'", "['every', '1']", "['every', '2']", "local_options"),
    ),
    "an option that is not local": (
        {"offload": {"name": "folder", "folder": "/a", "depth": 1}},
        {"offload": {"name": "folder", "folder": "/b", "depth": 2}},
        ("['depth', '1']", "['depth', '2']"),
    ),
}


def refusal_of(
    model: nn.Module, rank: int, world: ThreadedWorld, settings: Mapping[str, Any], change: Callable[[nn.Module], None]
) -> str:
    with world.lock:
        mine = copy.deepcopy(model)
    if rank == 1:
        change(mine)
    before = description(mine)
    with pytest.raises(errors.RankMismatchError) as caught:
        polyshard.shard(mine, threaded(world, rank, **{"policy": units_of(Block), **settings}))
    assert description(mine) == before
    return str(caught.value)


def unchanged(model: nn.Module) -> None:
    """Nothing."""


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(("first", "second", "words"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_settings_that_differ_between_ranks(
    first: dict[str, Any], second: dict[str, Any], words: tuple[str, ...]
) -> None:
    model = seeded(Net)
    texts = on_ranks(2, lambda rank, world: refusal_of(model, rank, world, (first, second)[rank], unchanged))
    for word in ("shard differently", *words):
        assert all(word in text for text in texts), texts
    # Rows are paired by their titles: none reads as if the other rank lacked it.
    if "strategy" in first:
        assert not any("nothing" in text for text in texts), texts


def freeze(model: nn.Module) -> None:
    model.get_submodule("blocks.1").requires_grad_(False)


def transpose(model: nn.Module) -> None:
    weight = model.get_parameter("blocks.1.up.weight")
    weight.data = weight.data.T.contiguous().T


def tie(model: nn.Module) -> None:
    model.get_submodule("blocks.2").up.weight = model.get_submodule("blocks.1").up.weight


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (freeze, ("blocks.1", "'trained'", "'frozen'")),
        (transpose, ("unit 'blocks.1'", "'up.weight'", "[5, 1]", "[1, 7]")),
        (tie, ("blocks.1.up.weight", "blocks.2.up.weight")),
    ],
)
def test_models_whose_units_would_lie_otherwise(change: Callable[[nn.Module], None], words: tuple[str, ...]) -> None:
    model = seeded(Net)
    texts = on_ranks(2, lambda rank, world: refusal_of(model, rank, world, {}, change))
    for word in words:
        assert all(word.strip("'") in text for text in texts), texts


@pytest.mark.usefixtures("acme")
def test_what_may_differ_between_ranks_does_not_matter(tmp_path: Path) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        with world.lock:
            model = seeded(Net)
        trace = {"name": "trace", "folder": tmp_path / str(rank), "rank": rank, "picture": "none"}
        precision = {"name": "mixed", "leave_alone": [nn.LayerNorm]}
        config = threaded(
            world,
            rank,
            offload={"name": "folder", "folder": f"/scratch/{rank}"},
            precision=precision,
            listeners=[trace],
            timeout_s=10.0 + rank,
        )
        polyshard.shard(model, config)
        return square_step(model, 0, 0)

    first, second = on_ranks(2, on_rank)
    assert torch.equal(first[0], second[0])


@pytest.mark.usefixtures("acme")
def test_local_options_that_are_not_names() -> None:
    config = ShardConfig(collectives={"name": "fake", "world_size": 2}, offload={"name": "misspelt", "folder": "/a"})
    with pytest.raises(errors.PluginContractError, match=r"local_options of plugin 'misspelt'.*'folder'.*frozenset"):
        polyshard.shard(nn.Linear(2, 2), config)


def gloo_beside_fake(rank: int) -> tuple[str, float]:
    started = time.monotonic()
    config = ShardConfig(collectives={"name": "fake", "rank": 1, "world_size": 2} if rank else "gloo", timeout_s=30.0)
    model = nn.Linear(4, 4)
    before = description(model)
    try:
        polyshard.shard(model, config)
    except errors.RankMismatchError as error:
        assert description(model) == before
        return str(error), time.monotonic() - started
    return "sharded", time.monotonic() - started


def all_pretend(rank: int) -> bool:
    model = polyshard.shard(
        nn.Linear(4, 4), ShardConfig(collectives={"name": "fake", "rank": rank, "world_size": 2}, timeout_s=30.0)
    )
    model(torch.ones(1, 4)).sum().backward()
    if rank == 0:
        # By itself, beside a rank that does something else.
        alone = ShardConfig(collectives={"name": "fake", "world_size": 64}, check_ranks=False)
        polyshard.shard(nn.Linear(4, 4), alone)
    torch.manual_seed(0)
    polyshard.shard(nn.Linear(4, 4), ShardConfig(collectives="gloo", timeout_s=30.0))
    return True


@pytest.mark.slow
def test_a_rank_that_pretends_beside_one_that_communicates() -> None:
    for text, seconds in run_processes(2, gloo_beside_fake):
        assert "'gloo'" in text
        assert "'fake'" in text
        # At once, and not when a timeout of 30 s has passed.
        assert seconds < 15.0


@pytest.mark.slow
def test_ranks_that_all_pretend_go_on() -> None:
    assert run_processes(2, all_pretend) == [True, True]
