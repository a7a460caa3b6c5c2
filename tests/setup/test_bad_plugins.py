"""Plugins and settings that cannot be used: the right error, before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polyshard
import pytest
from fake_distribution import install
from polyshard import ShardConfig, errors
from refusal import Silent, Tower, refused, silent
from torch import nn


@pytest.mark.parametrize(
    ("setting", "wrong", "near"),
    [("precision", "bf61", "bf16"), ("offload", "CUP", "cpu"), ("policy", "transfomer", "transformer")],
)
def test_an_unknown_plugin(setting: str, wrong: str, near: str) -> None:
    group = {"policy": "policies"}.get(setting, setting)
    words = (repr(wrong), f"polyshard.{group}", f"Did you mean {near!r}?", f"{near}  (from polyshard ")
    refused(Tower(), silent(**{setting: wrong}), errors.PluginNotFoundError, *words, twin=Tower())


def test_unknown_collectives() -> None:
    words = ("'ncll'", "polyshard.collectives", "Did you mean 'nccl'?")
    refused(Tower(), lambda: ShardConfig(collectives="ncll"), errors.PluginNotFoundError, *words, twin=Tower())


def test_an_unknown_listener() -> None:
    words = ("'metrics'", "polyshard.plugins")
    refused(Tower(), silent(listeners=["metrics"]), errors.PluginNotFoundError, *words, twin=Tower())


def test_a_plugin_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    points = [("polyshard.precision", "int4", "acme_int4_broken:Int4")]
    install(tmp_path, "acme-int4", "2.1", points, {"acme_int4_broken": "import acme_kernels_not_there"})
    words = ("'int4'", "acme-int4 2.1", "acme_int4_broken:Int4", "No module named 'acme_kernels_not_there'")
    refused(Tower(), silent(precision="int4"), errors.PluginLoadError, *words, twin=Tower())
    with pytest.raises(errors.PluginLoadError) as caught:
        polyshard.shard(Tower(), silent(precision="int4")())
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_plugin_without_what_its_entry_point_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    points = [("polyshard.policies", "nowhere", "acme_nowhere:Policy")]
    install(tmp_path, "acme-nowhere", "1.0", points, {"acme_nowhere": "x = 1"})
    words = ("'nowhere'", "acme-nowhere 1.0", "'Policy'")
    refused(Tower(), silent(policy="nowhere"), errors.PluginLoadError, *words, twin=Tower())


def test_a_plugin_that_fails_when_it_is_constructed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    points = [("polyshard.offload", "disk", "acme_disk:make")]
    source = "def make(context):\n    raise OSError(28, 'full')\nmake.api_version = 1\n"
    install(tmp_path, "acme-disk", "0.3", points, {"acme_disk": source})
    words = ("'disk'", "acme-disk 0.3", "OSError", "full")
    refused(Tower(), silent(offload="disk"), errors.PluginLoadError, *words, twin=Tower())


@pytest.mark.parametrize("version", ["2", "0", "'1'", "None"])
def test_a_plugin_of_another_contract_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = f"acme_version_{version.strip(chr(39))}"
    source = (
        "from polyshard.interfaces import PrecisionCaster\n"
        f"class Caster(PrecisionCaster):\n    api_version = {version}\n"
        "    def __init__(self, context):\n        1 / 0\n"
    )
    install(tmp_path, "acme-next", "9.0", [("polyshard.precision", "next", f"{module}:Caster")], {module: source})
    words = ("'next'", "acme-next 9.0", "contract")
    refused(Tower(), silent(precision="next"), errors.PluginVersionError, *words, twin=Tower())


@pytest.mark.parametrize("setting", ["collectives", "precision", "offload", "policy"])
def test_an_object_of_the_wrong_contract(setting: str) -> None:
    wrong = Silent() if setting == "policy" else nn.Linear(2, 2)
    settings: dict[str, Any] = {"collectives": Silent(), setting: wrong}
    group = {"policy": "policies"}.get(setting, setting)
    words = (type(wrong).__name__, f"polyshard.{group}")
    refused(Tower(), lambda: ShardConfig(**settings), errors.PluginContractError, *words, twin=Tower())


def test_a_plugin_that_constructs_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "def make(context):\n    return {}\nmake.api_version = 1\n"
    install(tmp_path, "acme-dict", "1.0", [("polyshard.precision", "dict", "acme_dict:make")], {"acme_dict": source})
    words = ("'dict'", "acme-dict 1.0", "PrecisionCaster", "dict")
    refused(Tower(), silent(precision="dict"), errors.PluginContractError, *words, twin=Tower())


def test_an_option_that_a_plugin_does_not_have() -> None:
    collectives = {"name": "fake", "rank": 0, "worldsize": 2}
    words = ("'fake'", "'worldsize'", "Did you mean 'world_size'?")
    refused(Tower(), lambda: ShardConfig(collectives=collectives), errors.ConfigError, *words, twin=Tower())
    words = ("'bf16'", "'reduction'", "cast_inputs")
    refused(Tower(), silent(precision={"name": "bf16", "reduction": "fp32"}), errors.ConfigError, *words, twin=Tower())
