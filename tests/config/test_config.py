"""Settings: from Python, files and the environment, what each refuses, and where each came from."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from polyshard.config import Origin, PluginSpec, ShardConfig, Strategy
from polyshard.errors import ConfigError, ConfigTypeError, PolyshardError
from torch import nn
from torch.distributed.fsdp import ShardingStrategy


class FakeMesh:
    def __init__(self, ndim: int, *names: str) -> None:
        self.ndim = ndim
        self.mesh_dim_names = names or None


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def test_defaults_shard_everything_without_extra_units() -> None:
    config = ShardConfig()
    assert (config.collectives, config.precision, config.offload, config.policy) == ("auto", "none", "none", "never")
    assert config.strategy is Strategy.FULL_SHARD
    assert (config.forward_prefetch, config.backward_prefetch, config.batch_nbytes) == (1, 1, 128 * 2**20)
    assert config.listeners == ()
    assert config.timeout_s == 600.0


@pytest.mark.parametrize("spelling", ["shard_grad_op", "SHARD_GRAD_OP", "zero2", Strategy.SHARD_GRAD_OP])
def test_strategy_reads_as_the_enum(spelling: str | Strategy) -> None:
    assert ShardConfig(strategy=spelling).strategy is Strategy.SHARD_GRAD_OP


def test_device_and_listeners_are_normalised() -> None:
    config = ShardConfig(device="cuda:1", listeners=["trace", {"name": "watch", "every": 5}])
    assert config.device == torch.device("cuda", 1)
    assert config.listeners == ("trace", {"name": "watch", "every": 5})


def test_replace_validates_and_normalises_again() -> None:
    config = ShardConfig(precision="bf16", strategy="no_shard")
    changed = dataclasses.replace(config, strategy="hybrid_shard", shard_size=4)
    assert (changed.strategy, changed.precision, changed.shard_size) == (Strategy.HYBRID_SHARD, "bf16", 4)
    assert config.strategy is Strategy.NO_SHARD
    with pytest.raises(ConfigError, match="shard_size=4 needs a strategy with groups"):
        dataclasses.replace(changed, strategy="full_shard")


def test_config_cannot_be_changed_in_place_and_survives_pickling() -> None:
    config = ShardConfig(strategy="no_shard", device="cpu", policy={"name": "size", "min_num_params": 10})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strategy = Strategy.FULL_SHARD  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert config != ShardConfig(strategy="full_shard", device="cpu")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "ful_shard"}, r"strategy 'ful_shard' does not exist\. Did you mean 'full_shard'\?"),
        ({"strategy": 3}, "strategy 3 does not exist"),
        ({"forward_prefetch": -1}, "forward_prefetch must be a number of units, 0 or more, not -1"),
        ({"backward_prefetch": 1.5}, "backward_prefetch must be .* not 1.5"),
        ({"forward_prefetch": True}, "forward_prefetch must be .* not True"),
        ({"shard_size": 2}, "needs a strategy with groups .hybrid_shard, .*, hfsdp, hpz.*'full_shard'"),
        ({"shard_size": 0, "strategy": "hybrid_shard"}, "shard_size must be a number of ranks, 1 or more, not 0"),
        ({"shard_size": 2, "strategy": "hybrid_shard", "mesh": FakeMesh(2)}, "mesh and shard_size both"),
        ({"mesh": FakeMesh(2)}, "'full_shard' needs a mesh of 1 dimension.*has 2"),
        ({"mesh": FakeMesh(1), "strategy": "hybrid_shard"}, "'hybrid_shard' needs a mesh of 2 dimension.*has 1"),
        ({"mesh": object()}, "mesh must be a torch.distributed DeviceMesh, not object"),
        (
            {"mesh": FakeMesh(3, "dp", "cp", "tp")},
            r"needs a mesh of 1 .* has 3 \(dp, cp, tp\)\. Name those to use in shard=, or slice",
        ),
        (
            {"mesh": FakeMesh(3), "strategy": "hybrid_shard"},
            r"'hybrid_shard' needs a mesh of 2 .* has 3\. Name those to use in shard= and replicate=, or slice",
        ),
        (
            {"mesh": FakeMesh(2, "dp", "tp"), "shard": "ddp"},
            r"shard names 'ddp', which is no dimension of the mesh\. Did you mean 'dp'\? It has: dp, tp",
        ),
        ({"mesh": FakeMesh(2), "shard": "dp"}, "'dp', but those of the mesh have no names.*mesh_dim_names="),
        ({"shard": "dp", "replicate": "rep"}, "replicate='rep' needs a strategy with .*but strategy is 'full_shard'"),
        (
            {"shard": ["a", "b"], "strategy": "hybrid_shard"},
            r"only shard=\['a', 'b'\] is given. Name those of replicate",
        ),
        ({"replicate": "a", "strategy": "hybrid_shard"}, "only replicate='a' is given. Name those of shard, too"),
        ({"shard": ("a", "b"), "replicate": "b", "strategy": "hybrid_shard"}, "dimension 'b' is in both shard and rep"),
        ({"shard": "a", "replicate": "b", "strategy": "hybrid_shard", "shard_size": 2}, "shard_size and names of dim"),
        *(
            ({"shard": wrong}, "dimensions of a mesh are a name or several different ones, not ")
            for wrong in ("", [], ["dp", "dp"], [1], 3, ["dp", ""], {"dp": 1})
        ),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward must be .* of ranks, 1 or more, not 'yes'"),
        ({"reshard_after_forward": 0}, "reshard_after_forward must be .* 1 or more, not 0"),
        (
            {"reshard_after_forward": "auto", "strategy": "shard_grad_op"},
            r"reshard_after_forward='auto' needs .*\(full_shard, .*\), but strategy is 'shard_grad_op'",
        ),
        ({"reshard_after_forward": True, "strategy": "zero1"}, "does not go with strategy 'zero1'.*Leave it out"),
        (
            {"reshard_after_forward": 2, "strategy": "hfsdp"},
            "=2 does not go with strategy 'hfsdp'.*True, False or auto",
        ),
        ({"shard_parameters": False, "strategy": "hfsdp"}, "shard_parameters=False does not go with strategy 'hfsdp'"),
        (
            {"shard": ("host", "gpu"), "shard_parameters": "gpus"},
            r"'gpus', which shard has not\. Did you mean 'gpu'\?.* at least what .*: shard=\['host', 'gpu'\]",
        ),
        ({"shard_parameters": "gpu"}, "shard_parameters names 'gpu', which shard has not.*shard=None"),
        ({"shard_gradients": 1}, "shard_gradients must be True or False, not 1"),
        ({"shard_size": 2, "strategy": "zero1"}, "needs a strategy with groups .*'zero1'"),
        ({"reshard_after_forward": "auto", "strategy": "no_shard"}, "but strategy is 'no_shard'"),
        ({"memory_budget": "1 GiB"}, "memory_budget=1073741824 needs reshard_after_forward='auto', but that is None"),
        ({"memory_budget": 5, "reshard_after_forward": True}, "memory_budget=5 needs .* but that is True"),
        *(
            ({"reshard_after_forward": "auto", "memory_budget": wrong}, r"memory_budget must be .*'70 GiB', not ")
            for wrong in (0, -1, True, 1.5, "", "0 GiB", "-3 GiB", "70 G", "70 i", "GiB", "1e9", "70 GiB or so", [1])
        ),
        *(
            ({"batch_nbytes": wrong}, r"batch_nbytes must be bytes, 0 or more, .*'16 MiB', not ")
            for wrong in (-1, True, None, 1.5, "", "-1 MiB", "16 M", "many")
        ),
        *(
            ({"check_ranks": wrong}, "check_ranks must be True, False or 'always', not ")
            for wrong in (1, None, "never")
        ),
        ({"timeout_s": 0}, "timeout_s must be a finite number of seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be a finite number"),
        *(
            ({"timeout_s": wrong}, r"timeout_s must be .* 0\.001 at least and 1e\+08 \(three years\) at most, not ")
            for wrong in (1e-4, 1.1e8, 1e10, 1e11, 1e26, 10**400)
        ),
        ({"timeout_s": "600"}, "timeout_s must be a number of seconds, not '600'"),
        ({"device": "gpu:zero"}, "device 'gpu:zero' is none that torch knows"),
        ({"device": 0}, "device must be a torch.device, a string or None, not 0"),
        ({"collectives": None}, "collectives must be a plugin's name"),
        ({"precision": ""}, "precision: '' does not name a plugin"),
        ({"offload": ":cpu"}, "offload: ':cpu' does not name a plugin"),
        ({"policy": {"min_num_params": 3}}, "policy: a plugin table needs a string under 'name'"),
        ({"policy": [torch.nn.Linear]}, "policy must be a plugin's name"),
        ({"listeners": "trace"}, r"listeners must be a list of plugins, not 'trace'\. Write \['trace'\]"),
        ({"listeners": ["trace", 7]}, r"listeners\[1\] must be a plugin's name"),
    ],
)
def test_wrong_values_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ShardConfig(**settings)


def test_a_keyword_that_is_no_setting_has_a_nearest_name() -> None:
    words = r"^ShardConfig: unknown setting 'precison'\. Did you mean 'precision'\? Settings: collectives, precision, "
    # Python's own error is a TypeError, and names none.
    with pytest.raises(ConfigTypeError, match=words):
        ShardConfig(precison="bf16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=words):
        dataclasses.replace(ShardConfig(), precison="bf16")  # type: ignore[call-arg]
    # What helps a caller to write it has the names still.
    assert list(inspect.signature(ShardConfig).parameters) == [each.name for each in dataclasses.fields(ShardConfig)]
    assert inspect.signature(ShardConfig).parameters["precision"].default == "none"


def test_torchs_own_strategies_have_a_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'shard_grad_op'\? There are: full_shard, "):
        ShardConfig(strategy=ShardingStrategy.SHARD_GRAD_OP)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ShardConfig.from_toml({"shard": {}}), r"Write ShardConfig\.from_mapping\({'shard': {}}\)\."),
        (lambda: ShardConfig.from_toml(None), r"reads a table of a file, not 'shard' of None\."),
        (lambda: ShardConfig.from_toml("run.toml", None), "reads a table of a file, not None of 'run.toml'"),
        (lambda: ShardConfig.from_mapping("run.toml"), r"no table of settings\. Write ShardConfig\.from_toml\('run"),
        (lambda: ShardConfig.from_mapping({"shard": {"precision": "bf16"}}), r"Give the settings in it alone\."),
        (lambda: ShardConfig(policy={nn.Linear}), r'Write {"name": "module_class", "classes": \[\.\.\.\]} for'),
    ],
)
def test_what_is_no_table_or_no_file_is_told_the_call_that_takes_it(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (7, 7),
        ("1024", 1024),
        ("1024 B", 1024),
        ("3 kB", 3000),
        ("512MiB", 2**29),
        (" 70 GiB ", 70 * 2**30),
        ("70gib", 70 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        (None, None),
    ],
)
def test_a_memory_budget_reads_as_bytes(text: int | str | None, nbytes: int | None) -> None:
    config = ShardConfig(reshard_after_forward="auto", memory_budget=text)
    assert config.memory_budget == nbytes
    assert dataclasses.replace(config) == config


def test_config_errors_are_value_errors_too() -> None:
    with pytest.raises(ValueError, match="0 or more") as caught:
        ShardConfig(backward_prefetch=-2)
    assert isinstance(caught.value, PolyshardError)


def test_meshes_of_the_right_shape_are_taken() -> None:
    one, two = FakeMesh(1), FakeMesh(2)
    assert ShardConfig(mesh=one).mesh is one  # type: ignore[arg-type]
    assert ShardConfig(mesh=two, strategy="hybrid_shard_zero2").mesh is two  # type: ignore[arg-type]


def test_dimensions_are_named_in_python_files_and_the_environment(tmp_path: Path) -> None:
    mesh: Any = FakeMesh(3, "dp_replicate", "dp_shard", "tp")
    text = '[shard]\nstrategy = "hybrid_shard"\nshard = ["dp_shard"]\nreplicate = "dp_replicate"\n'
    config = ShardConfig.from_toml(write(tmp_path, text), environ={}, mesh=mesh)
    assert (config.mesh, config.shard, config.replicate) == (mesh, ("dp_shard",), ("dp_replicate",))
    assert ShardConfig(mesh=mesh, shard="dp_shard", replicate="dp_replicate", strategy="hybrid_shard") == config
    # The mesh may come later, and is looked at then.
    later = ShardConfig(shard=("dp_shard", "cp"))
    with pytest.raises(ConfigError, match="shard names 'cp', which is no dimension of the mesh"):
        dataclasses.replace(later, mesh=mesh)
    environ = {"POLYSHARD_SHARD": "dp_shard, tp", "POLYSHARD_REPLICATE": "none", "POLYSHARD_STRATEGY": "full_shard"}
    changed = config.with_environment(environ)
    assert (changed.mesh, changed.shard, changed.replicate) == (mesh, ("dp_shard", "tp"), None)
    assert origins(changed, "shard", "strategy") == [
        (Origin.ENVIRONMENT, "POLYSHARD_SHARD"),
        (Origin.ENVIRONMENT, "POLYSHARD_STRATEGY"),
    ]
    assert config.with_environment({"POLYSHARD_SHARD": '["tp"]'}).shard == ("tp",)
    with pytest.raises(ConfigError, match=r"\[shard\] of .*: shard names 'dp_shard', which is no dim"):
        ShardConfig.from_toml(write(tmp_path, text), environ={}, mesh=FakeMesh(2, "dp", "tp"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("nccl", PluginSpec("nccl")),
        ("acme-oneccl:nccl", PluginSpec("nccl", "acme-oneccl")),
        ({"name": "fake", "world_size": 8}, PluginSpec("fake", None, {"world_size": 8})),
        ({"name": "acme:fake", "rank": 3}, PluginSpec("fake", "acme", {"rank": 3})),
    ],
)
def test_names_and_tables_are_read_as_specs(choice: Any, expected: PluginSpec) -> None:
    assert PluginSpec.parse(choice) == expected


def test_a_spec_does_not_follow_later_changes_of_its_table() -> None:
    table = {"name": "fake", "world_size": 8}
    spec = PluginSpec.parse(table)
    table["world_size"] = 9
    assert spec.options == {"world_size": 8}
    assert table == {"name": "fake", "world_size": 9}


def test_objects_stay_objects() -> None:
    policy = object()
    assert PluginSpec.parse(policy) is policy
    assert ShardConfig(policy=policy).policy is policy


_WORDS = st.text("abcdefghij-_.0123456789", min_size=1)


@given(name=_WORDS, distribution=st.none() | _WORDS)
def test_a_spec_is_read_back_from_its_label(name: str, distribution: str | None) -> None:
    spec = PluginSpec(name, distribution)
    assert PluginSpec.parse(spec.label) == spec


def test_a_setting_above_its_table_is_told(tmp_path: Path) -> None:
    file = write(tmp_path, 'precision = "bf16"\nseed = 1\n[shard]\nstrategy = "zero1"\n')
    with pytest.warns(UserWarning, match=r"'precision' stands above \[shard\] in .*Write it below \[shard\]") as told:
        assert ShardConfig.from_toml(file, environ={}).precision == "none"
    assert len(told) == 1


def test_toml_table_becomes_a_config(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [train]
        steps = 5
        [shard]
        collectives = "gloo"
        precision = "bf16"
        strategy = "shard_grad_op"
        backward_prefetch = 2
        listeners = ["trace", {name = "memory", every = 10}]
        policy = {name = "transformer", layers = ["my.models:Block"]}
        """,
    )
    config = ShardConfig.from_toml(file, environ={})
    assert config == ShardConfig(
        collectives="gloo",
        precision="bf16",
        strategy=Strategy.SHARD_GRAD_OP,
        backward_prefetch=2,
        listeners=("trace", {"name": "memory", "every": 10}),
        policy={"name": "transformer", "layers": ["my.models:Block"]},
    )


def test_a_memory_budget_comes_from_a_file_and_goes_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, '[shard]\nreshard_after_forward = "auto"\nmemory_budget = "70 GiB"\n')
    assert ShardConfig.from_toml(file, environ={}).memory_budget == 70 * 2**30
    assert ShardConfig.from_toml(file, environ={"POLYSHARD_MEMORY_BUDGET": "1000"}).memory_budget == 1000
    assert ShardConfig.from_toml(file, environ={"POLYSHARD_MEMORY_BUDGET": "none"}).memory_budget is None
    with pytest.raises(ConfigError, match=r"memory_budget=.* needs .*'auto', but that is False"):
        ShardConfig.from_toml(file, environ={"POLYSHARD_RESHARD_AFTER_FORWARD": "false"})


def test_another_table_can_be_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path, '[shard]\nprecision = "bf16"\n[eval]\nprecision = "fp32"\n')
    assert ShardConfig.from_toml(file, table="eval", environ={}).precision == "fp32"
    with pytest.raises(ConfigError, match=r"no table \[evl\]\. Did you mean 'eval'\? Its tables: shard, eval\."):
        ShardConfig.from_toml(file, table="evl", environ={})


def test_unknown_key_names_key_file_suggestion_and_all_settings(tmp_path: Path) -> None:
    file = write(tmp_path, '[shard]\ncolectives = "gloo"\n')
    with pytest.raises(ConfigError) as caught:
        ShardConfig.from_toml(file, environ={})
    message = str(caught.value)
    assert str(file) in message
    assert "unknown setting 'colectives'. Did you mean 'collectives'?" in message
    for field in dataclasses.fields(ShardConfig):
        assert (field.name in message) == (field.name != "mesh")


def test_unknown_key_is_reported_before_the_environment_is_blamed(tmp_path: Path) -> None:
    file = write(tmp_path, '[shard]\noffloat = "cpu"\n')
    with pytest.raises(ConfigError, match=r"unknown setting 'offloat'.*'offload'") as caught:
        ShardConfig.from_toml(file, environ={"POLYSHARD_PRECISION": "bf16"})
    assert "POLYSHARD_" not in str(caught.value)


def test_all_mistakes_of_a_file_come_at_once(tmp_path: Path) -> None:
    text = '[shard]\nprecison = "bf16"\nstrategy = "fullshard"\nsplit_root = 1\noffload = "cpu"\ntimeout_s = 0\n'
    with pytest.raises(ConfigError) as caught:
        ShardConfig.from_toml(write(tmp_path, text), environ={})
    first, *mistakes = str(caught.value).splitlines()
    assert first == f"[shard] of {tmp_path / 'run.toml'}: 4 mistakes:"
    assert [line.split(".")[0].strip() for line in mistakes[:3]] == [
        "unknown setting 'precison'",
        "strategy 'fullshard' does not exist",
        "split_root must be True or False, not 1",
    ]
    assert mistakes[3].startswith("  timeout_s must be a finite number")
    assert mistakes[4].startswith("  Settings: collectives, precision")
    # Settings that exclude each other, of values that are right.
    text = '[shard]\nmemory_budget = "1 GiB"\nshard_size = 2\n'
    with pytest.raises(ConfigError, match=r"2 mistakes:\n  memory_budget=1073741824 needs .*\n  shard_size=2 needs "):
        ShardConfig.from_toml(write(tmp_path, text), environ={})


def test_a_mesh_cannot_come_from_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mesh' is an object.*Use shard_size"):
        ShardConfig.from_toml(write(tmp_path, "[shard]\nmesh = [2, 4]\n"), environ={})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[shard\n", "is not valid TOML"),
        ("shard = 3\n", r"has no table \[shard\].*Its tables: none"),
        ("[shard]\nforward_prefetch = -3\n", r"\[shard\] of .*run\.toml: forward_prefetch must be .* not -3"),
    ],
)
def test_files_that_cannot_be_read_say_so(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ShardConfig.from_toml(write(tmp_path, text), environ={})


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nowhere\.toml") as caught:
        ShardConfig.from_toml(tmp_path / "nowhere.toml", environ={})
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_mapping_names_its_source() -> None:
    assert ShardConfig.from_mapping({"precision": "fp16"}).precision == "fp16"
    with pytest.raises(ConfigError, match=r"command line: unknown setting 'strateg'\. Did you mean 'strategy'\?"):
        ShardConfig.from_mapping({"strateg": "no_shard"}, source="command line")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"POLYSHARD_STRATEGY": "no_shard"}, {"strategy": Strategy.NO_SHARD}),
        (
            {"POLYSHARD_STRATEGY": "hybrid_shard", "POLYSHARD_SHARD_SIZE": "8"},
            {"strategy": Strategy.HYBRID_SHARD, "shard_size": 8},
        ),
        ({"POLYSHARD_RESHARD_AFTER_FORWARD": "False"}, {"reshard_after_forward": False}),
        ({"POLYSHARD_RESHARD_AFTER_FORWARD": "none"}, {"reshard_after_forward": None}),
        ({"POLYSHARD_RESHARD_AFTER_FORWARD": "8"}, {"reshard_after_forward": 8}),
        (
            {"POLYSHARD_RESHARD_AFTER_FORWARD": "auto", "POLYSHARD_MEMORY_BUDGET": "70 GiB"},
            {"reshard_after_forward": "auto", "memory_budget": 70 * 2**30},
        ),
        ({"POLYSHARD_FORWARD_PREFETCH": "3"}, {"forward_prefetch": 3}),
        ({"POLYSHARD_BATCH_NBYTES": "0"}, {"batch_nbytes": 0}),
        ({"POLYSHARD_BATCH_NBYTES": "4 MiB"}, {"batch_nbytes": 4 * 2**20}),
        ({"POLYSHARD_CHECK_RANKS": "always"}, {"check_ranks": "always"}),
        ({"POLYSHARD_CHECK_RANKS": "True"}, {"check_ranks": True}),
        ({"POLYSHARD_TIMEOUT_S": "1.5"}, {"timeout_s": 1.5}),
        ({"POLYSHARD_DEVICE": "cpu"}, {"device": torch.device("cpu")}),
        ({"POLYSHARD_LISTENERS": "trace,memory"}, {"listeners": ("trace", "memory")}),
        (
            {"POLYSHARD_LISTENERS": '["trace", {name = "memory", every = 2}]'},
            {"listeners": ("trace", {"name": "memory", "every": 2})},
        ),
        ({"POLYSHARD_PRECISION": "acme-fp8:fp8"}, {"precision": "acme-fp8:fp8"}),
        (
            {"POLYSHARD_POLICY": '{name = "size", min_num_params = 1000}'},
            {"policy": {"name": "size", "min_num_params": 1000}},
        ),
        ({"POLYSHARD_OFFLOAD": "", "PATH": "/bin", "polyshard_x": "1"}, {}),
    ],
)
def test_environment_overrides_one_setting(environ: dict[str, str], expected: dict[str, Any]) -> None:
    start = ShardConfig(offload="cpu", reshard_after_forward=True)
    assert start.with_environment(environ) == dataclasses.replace(start, **expected)


def test_one_rank_of_a_pretended_world_by_environment_alone(tmp_path: Path) -> None:
    file = write(tmp_path, '[shard]\ncollectives = {name = "nccl", max_ctas = 4}\nprecision = "bf16"\n')
    environ = {
        "POLYSHARD_COLLECTIVES__RANK": "3",
        "POLYSHARD_COLLECTIVES": "fake",
        "POLYSHARD_COLLECTIVES__WORLD_SIZE": "1024",
    }
    config = ShardConfig.from_toml(file, environ=environ)
    # max_ctas belonged to nccl and would be an unknown option of fake.
    assert config.collectives == {"name": "fake", "world_size": 1024, "rank": 3}
    assert config.precision == "bf16"


def test_naming_the_same_plugin_again_keeps_its_options(tmp_path: Path) -> None:
    file = write(tmp_path, '[shard]\ncollectives = {name = "fake", world_size = 16}\n')
    config = ShardConfig.from_toml(file, environ={"POLYSHARD_COLLECTIVES": "fake", "POLYSHARD_COLLECTIVES__RANK": "5"})
    assert config.collectives == {"name": "fake", "world_size": 16, "rank": 5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("0.5", 0.5),
        ("true", True),
        ('["a:B", "c:D"]', ["a:B", "c:D"]),
        ("float32", "float32"),
        ('"7"', "7"),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_options_are_toml_values_or_plain_text(text: str, value: Any) -> None:
    config = ShardConfig().with_environment({"POLYSHARD_PRECISION__COMMUNICATION": text})
    assert config.precision == {"name": "none", "communication": value}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"POLYSHARD_COLECTIVES": "fake"}, "POLYSHARD_COLECTIVES is no setting. Did you mean 'POLYSHARD_COLLECTIVES'"),
        ({"POLYSHARD_MESH": "2"}, "POLYSHARD_MESH is no setting"),
        ({"POLYSHARD_STRATEGY__RANK": "2"}, "POLYSHARD_STRATEGY__RANK sets no option of a plugin"),
        ({"POLYSHARD_POLICY__NAME": "size"}, "POLYSHARD_POLICY__NAME sets no option.*Write POLYSHARD_POLICY for"),
        ({"POLYSHARD_FORWARD_PREFETCH": "many"}, "POLYSHARD_FORWARD_PREFETCH: forward_prefetch must be .*'many'"),
        ({"POLYSHARD_STRATEGY": "zero4"}, "POLYSHARD_STRATEGY: strategy 'zero4' does not exist"),
    ],
)
def test_wrong_variables_are_refused_by_name(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ShardConfig().with_environment(environ)


def test_suggestion_does_not_come_from_the_prefix_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        ShardConfig().with_environment({"POLYSHARD_ZZZZ": "1"})
    assert "Did you mean" not in str(caught.value)


def test_options_of_an_object_cannot_be_set_from_outside() -> None:
    config = ShardConfig(policy=FakeMesh(1))
    with pytest.raises(ConfigError, match=r"POLYSHARD_POLICY__X cannot set an option of policy, .* class FakeMesh"):
        config.with_environment({"POLYSHARD_POLICY__X": "1"})


def test_file_reads_the_process_environment_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "[shard]\nforward_prefetch = 1\n")
    monkeypatch.setenv("POLYSHARD_FORWARD_PREFETCH", "4")
    assert ShardConfig.from_toml(file).forward_prefetch == 4
    assert ShardConfig().forward_prefetch == 1


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
        "POLYSHARD_OFFLOAD__FOLDER": "2",
    }
    config = ShardConfig.from_toml(file, environ=environ)
    in_file = (Origin.FILE, f"[shard] of {file}")
    assert origins(config, "shard_size", "collectives.world_size", "policy.force_leaf", "offload.folder") == [
        (Origin.ENVIRONMENT, "POLYSHARD_SHARD_SIZE"),
        (Origin.ENVIRONMENT, "POLYSHARD_COLLECTIVES__WORLD_SIZE"),
        (Origin.ENVIRONMENT, "POLYSHARD_POLICY"),
        (Origin.ENVIRONMENT, "POLYSHARD_OFFLOAD__FOLDER"),
    ]
    assert origins(config, "collectives", "collectives.rank", "strategy") == [in_file] * 3
    # The manager's name is nobody's, although a variable set an option of it.
    assert origins(config, "offload") == [(Origin.DEFAULT, "")]


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
