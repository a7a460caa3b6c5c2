"""Plugins made of other plugins, and what is known of a model's plugins afterwards."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from fake_distribution import install
from parity import on_ranks, threaded
from polyshard import ShardConfig, errors
from polyshard.interfaces import Group, PluginContext
from polyshard_backends.threaded import ThreadedWorld
from processes import run_processes
from refusal import description
from torch import nn

GROUPS = [
    ("polyshard.precision", "twice", "acme_made_of:Twice"),
    ("polyshard.precision", "says", "acme_made_of:Says"),
    ("polyshard.policies", "late", "acme_made_of:Late"),
    ("polyshard.plugins", "ranked", "acme_made_of:Ranked"),
]
SOURCE = """
from polyshard import hookimpl
from polyshard.interfaces import Group, Listener, PrecisionPlugin, WrapPolicy


class Twice(PrecisionPlugin):
    api_version = 1

    def __init__(self, context, inner):
        self.inner = context.construct(Group.PRECISION, inner)

    def dtypes(self, unit):
        return self.inner.dtypes(unit)


class Says(PrecisionPlugin):
    api_version = 1
    local_options = frozenset({"text"})

    def __init__(self, context, text):
        self.text = text

    def dtypes(self, unit):
        from polyshard.interfaces import UnitDtypes
        dtype = unit.master_dtype
        return UnitDtypes(dtype, dtype, dtype, dtype)

    def fingerprint(self):
        return self.text


class Late(WrapPolicy):
    api_version = 1

    def __init__(self, context):
        self.context = context

    def plan(self, root, context):
        return self.context.construct(Group.POLICIES, "always").plan(root, context)


class Ranked(Listener):
    api_version = 1

    def __init__(self, context):
        self.where = context.rank, context.world_size

    @hookimpl
    def step_begin(self):
        pass
"""


@pytest.fixture(autouse=True)
def _acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "acme-made-of", "2.0", GROUPS, {"acme_made_of": SOURCE})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_made_of", raising=False)


def fake(**settings: Any) -> ShardConfig:
    return ShardConfig(collectives={"name": "fake", "world_size": 2}, **settings)


def test_a_factory_constructs_another_plugin_by_name() -> None:
    inner = {"name": "mixed", "param": "bf16"}
    model = polyshard.shard(nn.Linear(4, 4), fake(precision={"name": "twice", "inner": inner}))
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.ones(1, 4, dtype=torch.bfloat16))
    assert seen == [torch.bfloat16]
    [plugin] = [plugin for plugin in polyshard.plugins(model) if plugin.group is Group.PRECISION]
    assert (plugin.name, plugin.distribution, plugin.version) == ("twice", "acme-made-of", "2.0")
    assert Path(plugin.file).name == "acme_made_of.py"
    assert plugin.options == {"inner": inner}
    [mixed] = plugin.inner
    assert (mixed.name, mixed.value) == ("mixed", "polyshard_plugins.precision:Mixed")
    assert mixed.options == {"param": "bf16"}
    assert mixed.instance is plugin.instance.inner  # type: ignore[attr-defined]


def test_the_plugins_of_units_are_told_with_their_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    polyshard.fully_shard(model[0], fake(precision="bf16"))
    polyshard.fully_shard(model, fake())
    found = [(plugin.module, plugin.name) for plugin in polyshard.plugins(model) if plugin.group is Group.PRECISION]
    assert found == [("", "none"), ("0", "bf16")]
    with pytest.raises(errors.StateError, match="outermost"):
        polyshard.plugins(model[0])


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"precision": {"name": "twice", "inner": "bf61"}}, errors.PluginNotFoundError, "bf61.*Did you mean 'bf16'"),
        ({"precision": {"name": "twice", "inner": {"name": "mixed", "parm": 1}}}, errors.ConfigError, "'parm'"),
        ({"precision": {"name": "twice", "inner": 3}}, errors.PluginContractError, "instance of builtins:int"),
        ({"policy": "late"}, errors.StateError, "plugin 'late'.*asked for 'always'.*in the factory"),
    ],
)
def test_wrong_inner_plugins_are_named_and_leave_the_model(
    settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = nn.Linear(4, 4)
    before = description(model)
    with pytest.raises(error, match=words):
        polyshard.shard(model, fake(**settings))
    assert description(model) == before
    polyshard.shard(model, fake())


def test_a_context_that_polyshard_did_not_make_constructs_nothing() -> None:
    context = PluginContext("mine", torch.device("cpu"))
    with pytest.raises(errors.StateError, match=r"'mine'.*'bf16'.*plugin_context"):
        context.construct(Group.PRECISION, "bf16")


def refusals(*settings: dict[str, Any]) -> list[str]:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        before = description(model)
        with pytest.raises(errors.RankMismatchError) as caught:
            polyshard.shard(model, threaded(world, rank, **settings[rank]))
        assert description(model) == before
        return str(caught.value)

    return on_ranks(len(settings), on_rank)


def test_ranks_compare_inner_plugins() -> None:
    first, second = refusals(
        {"precision": {"name": "twice", "inner": {"name": "mixed", "overrides": {"0": {"param": "fp32"}}}}},
        {"precision": {"name": "twice", "inner": {"name": "mixed", "overrides": {"1": {"param": "fp32"}}}}},
    )
    for text in (first, second):
        # The option that holds it is not told again.
        assert "twice" not in text
    assert "rank 1: plugin 'mixed'" in first
    assert "rank 0: plugin 'mixed'" in second


def test_ranks_compare_what_a_plugin_says_of_itself() -> None:
    texts = refusals({"precision": {"name": "says", "text": "red"}}, {"precision": {"name": "says", "text": "green"}})
    for text in texts:
        assert "['fingerprint', 'red']" in text
        assert "['fingerprint', 'green']" in text


def test_a_fingerprint_that_is_no_text() -> None:
    with pytest.raises(errors.PluginContractError, match=r"fingerprint\(\) of plugin 'says'.*answered 3"):
        polyshard.shard(nn.Linear(4, 4), fake(precision={"name": "says", "text": 3}))


def test_all_differences_of_all_ranks_are_told_at_once() -> None:
    texts = refusals(
        {},
        {"precision": "bf16", "batch_nbytes": 64, "split_root": False},
        {"backward_prefetch": 3},
    )
    here = texts[0]
    assert "Ranks [1] are about to shard differently" in here
    assert "Ranks [2] are about to shard differently" in here
    for words in (
        "rank 1: plugin 'bf16' of polyshard.precision",
        "rank 1: ['batch_nbytes', 64]",
        "rank 1: ['split_root', False]",
        "rank 2: ['backward_prefetch', 3]",
    ):
        assert words in here


def shard_from(rank: int, folder: str) -> tuple[str, bool]:
    sys.path.insert(0, f"{folder}/{rank}")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    before = description(model)
    try:
        polyshard.shard(model, ShardConfig(collectives="gloo", precision={"name": "says", "text": ""}, timeout_s=30.0))
    except errors.RankMismatchError as error:
        return str(error), description(model) == before
    return "sharded", False


@pytest.mark.slow
def test_ranks_compare_the_code_of_plugins(tmp_path: Path) -> None:
    # One version on both ranks, as in editable installs of which one was not brought up to date.
    for rank, source in enumerate((SOURCE, SOURCE + "\n\nNEWER = True\n")):
        install(tmp_path / str(rank), "acme-made-of", "2.0", GROUPS, {"acme_made_of": source})
    for text, kept in run_processes(2, shard_from, str(tmp_path)):
        assert "plugin 'says' of polyshard.precision (acme_made_of:Says, from acme-made-of 2.0): ['code', " in text
        assert kept


def test_listeners_alone_know_their_rank() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> Any:
        with world.lock:
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
        polyshard.shard(model, threaded(world, rank, listeners=["ranked"]))
        [listener] = [plugin.instance for plugin in polyshard.plugins(model) if plugin.group is Group.PLUGINS]
        return listener.where  # type: ignore[attr-defined]

    assert on_ranks(2, on_rank) == [(0, 2), (1, 2)]


def test_choices_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "polyshard"):
        polyshard.shard(nn.Linear(4, 4), fake(precision={"name": "twice", "inner": "bf16"}))
    [record] = caplog.records
    version = polyshard.__version__
    text = record.getMessage()
    assert text.startswith(f"rank 0 of 2 shards Linear with polyshard.collectives fake (polyshard {version}), ")
    assert f"polyshard.precision twice (acme-made-of 2.0; of bf16 (polyshard {version}))" in text
