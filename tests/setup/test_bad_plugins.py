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


CASTER = """
from polyshard.interfaces import PrecisionPlugin

class Odd(PrecisionPlugin):
    api_version = {}

    def __init__(self, context):
        1 / 0
"""
MAKE = "def Odd(context):\n    {}\nOdd.api_version = 1\n"

#: A setting, the source of the plugin that it names, and the error.
PACKAGES: dict[str, tuple[str, str, type[Exception], tuple[str, ...]]] = {
    "not_imported": ("precision", "import acme_gone", errors.PluginLoadError, ("No module named 'acme_gone'",)),
    "not_there": ("policy", "x = 1", errors.PluginLoadError, ("'Odd'",)),
    "not_made": ("offload", MAKE.format("raise OSError(28, 'full')"), errors.PluginLoadError, ("OSError", "full")),
    "other": (
        "precision",
        MAKE.format("return {}"),
        errors.PluginContractError,
        ("must construct a polyshard.interfaces.PrecisionPlugin", "builtins:dict"),
    ),
    "nothing": ("listeners", MAKE.format("return None"), errors.PluginContractError, ("returned None",)),
    "number": ("policy", "Odd = 7", errors.PluginContractError, ("instance of builtins:int, which cannot be called",)),
    "newer": (
        "precision",
        CASTER.format("2"),
        errors.PluginVersionError,
        ("implements version 2 of the contract", "serves 1. Update polyshard."),
    ),
    "older": (
        "precision",
        CASTER.format("0"),
        errors.PluginVersionError,
        ("implements version 0 of the contract", "serves 1. Update the plugin's package."),
    ),
    "text": (
        "precision",
        CASTER.format("'1'"),
        errors.PluginVersionError,
        ("integer attribute 'api_version', but has '1'",),
    ),
    "unstated": (
        "policy",
        "def Odd(context): ...",
        errors.PluginVersionError,
        ("has none. Add 'api_version = 1' to the class, or set",),
    ),
}


@pytest.mark.parametrize(
    ("case", "setting", "source", "error", "words"), [(key, *row) for key, row in PACKAGES.items()]
)
def test_a_package_whose_plugin_cannot_be_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    setting: str,
    source: str,
    error: type[Exception],
    words: tuple[str, ...],
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    group = {"policy": "polyshard.policies", "listeners": "polyshard.plugins"}.get(setting, f"polyshard.{setting}")
    install(tmp_path, "acme-odd", "2.1", [(group, case, f"acme_odd_{case}:Odd")], {f"acme_odd_{case}": source})
    asked = silent(**{setting: [case] if setting == "listeners" else case})
    refused(Tower(), asked, error, f"plugin '{case}' of {group}", "acme-odd 2.1", *words, twin=Tower())
    if case == "not_imported":
        with pytest.raises(error) as caught:
            polyshard.shard(Tower(), asked())
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("setting", ["collectives", "precision", "offload", "policy"])
def test_an_object_of_the_wrong_contract(setting: str) -> None:
    wrong = Silent() if setting == "policy" else nn.Linear(2, 2)
    settings: dict[str, Any] = {"collectives": Silent(), setting: wrong}
    group = {"policy": "policies"}.get(setting, setting)
    words = (type(wrong).__name__, f"polyshard.{group}")
    refused(Tower(), lambda: ShardConfig(**settings), errors.PluginContractError, *words, twin=Tower())


def test_an_option_that_a_plugin_does_not_have() -> None:
    collectives = {"name": "fake", "rank": 0, "worldsize": 2}
    words = ("'fake'", "'worldsize'", "Did you mean 'world_size'?")
    refused(Tower(), lambda: ShardConfig(collectives=collectives), errors.ConfigError, *words, twin=Tower())
    words = ("'bf16'", "'reduction'", "cast_inputs")
    refused(Tower(), silent(precision={"name": "bf16", "reduction": "fp32"}), errors.ConfigError, *words, twin=Tower())
