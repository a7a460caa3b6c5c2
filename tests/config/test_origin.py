"""Where each setting of a configuration came from."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
from polyshard import ShardConfig
from polyshard.cli import main
from polyshard.config import Origin
from polyshard.errors import ConfigError

FILE = """
[shard]
precision = "none"
strategy = "hybrid_shard"
shard_size = 8
collectives = { name = "fake", world_size = 16, rank = 3 }
policy = { name = "size", min_num_params = 1000 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def origins(config: ShardConfig, *keys: str) -> list[tuple[Origin, str]]:
    """Of settings, and of options written as ``"setting.option"``."""
    found = [config.source_of(*key.split(".")) for key in keys]
    return [(source.origin, source.where) for source in found]


def test_a_file_says_what_stands_in_it(file: Path) -> None:
    config = ShardConfig.from_toml(file, environ={})
    where = (Origin.FILE, f"[shard] of {file}")
    # Also where the file says what is the default anyway.
    assert origins(config, "precision", "strategy", "collectives", "collectives.world_size") == [where] * 4
    assert origins(config, "offload", "timeout_s", "mesh") == [(Origin.DEFAULT, "")] * 3


def test_the_environment_is_told_apart_option_by_option(file: Path) -> None:
    environ = {
        "POLYSHARD_SHARD_SIZE": "4",
        "POLYSHARD_COLLECTIVES__WORLD_SIZE": "32",
        "POLYSHARD_POLICY": "{name = 'size', force_leaf = []}",
        "POLYSHARD_LAYOUT__ROWS": "2",
        "POLYSHARD_OFFLOAD": "cpu",
    }
    config = ShardConfig.from_toml(file, environ=environ)
    in_file = (Origin.FILE, f"[shard] of {file}")
    assert origins(config, "shard_size", "collectives.world_size", "policy.force_leaf", "layout.rows", "offload") == [
        (Origin.ENVIRONMENT, "POLYSHARD_SHARD_SIZE"),
        (Origin.ENVIRONMENT, "POLYSHARD_COLLECTIVES__WORLD_SIZE"),
        (Origin.ENVIRONMENT, "POLYSHARD_POLICY"),
        (Origin.ENVIRONMENT, "POLYSHARD_LAYOUT__ROWS"),
        (Origin.ENVIRONMENT, "POLYSHARD_OFFLOAD"),
    ]
    assert origins(config, "collectives", "collectives.rank", "strategy") == [in_file] * 3
    # The layout's name is nobody's, although a variable set an option of it.
    assert origins(config, "layout") == [(Origin.DEFAULT, "")]


def test_the_same_plugin_named_again_keeps_the_files_options(file: Path) -> None:
    config = ShardConfig.from_toml(file, environ={"POLYSHARD_COLLECTIVES": "fake"})
    assert origins(config, "collectives", "collectives.rank") == [
        (Origin.ENVIRONMENT, "POLYSHARD_COLLECTIVES"),
        (Origin.FILE, f"[shard] of {file}"),
    ]


def test_code_is_what_differs_from_the_defaults() -> None:
    config = ShardConfig(precision="bf16", policy={"name": "size", "min_num_params": 10}, listeners=["trace"])
    assert origins(config, "precision", "policy.min_num_params", "listeners") == [(Origin.CODE, "")] * 3
    assert origins(config, "offload", "strategy") == [(Origin.DEFAULT, "")] * 2
    changed = config.with_environment({"POLYSHARD_PRECISION": "fp32"})
    assert origins(changed, "precision", "policy", "offload") == [
        (Origin.ENVIRONMENT, "POLYSHARD_PRECISION"),
        (Origin.CODE, ""),
        (Origin.DEFAULT, ""),
    ]
    named = ShardConfig.from_mapping({"precision": "fp16"}, source="the command line")
    assert origins(named, "precision", "offload") == [(Origin.CODE, "the command line"), (Origin.DEFAULT, "")]


def test_what_is_known_takes_no_part_in_comparisons_and_travels_with_copies(file: Path) -> None:
    config = ShardConfig.from_toml(file, environ={})
    same = ShardConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    assert config == same
    assert repr(config) == repr(same)
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied.source_of("strategy").origin is Origin.FILE
    # A changed copy is the program's.
    assert dataclasses.replace(config, offload="cpu").source_of("strategy").origin is Origin.CODE


def test_a_setting_that_does_not_exist_has_no_source() -> None:
    with pytest.raises(ConfigError, match=r"there is no setting 'offlod'\. Did you mean 'offload'"):
        ShardConfig().source_of("offlod")


def test_the_command_shows_the_column(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYSHARD_COLLECTIVES__WORLD_SIZE", "32")
    monkeypatch.setenv("POLYSHARD_BATCH_NBYTES", "0")
    assert main(["config", str(file)]) == 0
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    where = f"[shard] of {file}"
    assert rows["setting"] == "value set by found in"
    assert rows["strategy"] == f"hybrid_shard {where}"
    assert rows["batch_nbytes"] == "0 POLYSHARD_BATCH_NBYTES"
    assert rows["timeout_s"] == "600.0 default"
    assert rows["collectives"].startswith(
        f"fake (world_size=32, rank=3) {where}; world_size: POLYSHARD_COLLECTIVES__WORLD_SIZE polyshard_backends"
    )
