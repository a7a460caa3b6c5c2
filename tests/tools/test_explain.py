"""``explain``: what a configuration means for a model, told without ranks, devices or memory."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from fake_distribution import install
from polyshard import ShardConfig, Strategy
from polyshard.config import Origin
from polyshard.errors import (
    AlreadyShardedError,
    ConfigError,
    ConfigTypeError,
    DeviceError,
    EmptyUnitError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
    StateError,
    WorldSizeError,
)
from polyshard.interfaces import PolicyContext, UnitPlan, WrapPolicy
from polyshard_tools.cli import main
from polyshard_tools.explaining import explain
from torch import nn


class Block(nn.Module):
    """12 parameters: a weight of 9 elements and a bias of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x))


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(tokens))


def on_meta(depth: int = 4) -> nn.Module:
    with torch.device("meta"):
        return Net(depth)


def of_blocks(**settings: Any) -> ShardConfig:
    return ShardConfig(policy={"name": "transformer", "layers": Block}, **settings)


# Units


def test_units_have_the_numbers_that_alignment_gives() -> None:
    told = explain(of_blocks(), on_meta(), 4)
    assert (told.model, told.world_size, told.shards, told.replicas) == ("Net", 4, 4, 1)
    assert [unit.name for unit in told.units] == ["(root)", *(f"blocks.{index}" for index in range(4))]
    root, block = told.units[:2]
    # 7 rows of 3 over four ranks: two rows each.
    assert (root.elements, root.padding, root.shard_elements) == (21, 3, 6)
    # A rank has a row of each: 3 elements and three times 1, which begin at multiples of 16 bytes and end at 13.
    assert [(each.name, each.shape, each.offset) for each in block.parameters] == [
        ("blocks.0.linear.weight", (3, 3), 0),
        ("blocks.0.linear.bias", (3,), 4 * 4),
        ("blocks.0.norm.weight", (3,), 4 * 8),
        ("blocks.0.norm.bias", (3,), 4 * 12),
    ]
    assert (block.elements, block.padding, block.shard_elements) == (18, 4 * 13 - 18, 13)
    assert (told.elements, told.padding) == (21 + 4 * 18, 3 + 4 * 34)
    assert block.gather_nbytes == 13 * 4


def test_what_is_told_is_what_sharding_does() -> None:
    settings: dict[str, Any] = {"precision": "bf16"}
    told = explain(of_blocks(**settings), on_meta(), 4, device="cpu")
    model = polyshard.shard(Net(), of_blocks(collectives={"name": "fake", "world_size": 4}, **settings))
    report = polyshard.report(model)
    assert (len(told.units), told.elements, told.padding) == (report.units, report.parameters, report.padding)
    held = sum(unit.shard_elements for unit in told.units)
    assert held * 4 == report.master_nbytes
    for unit in told.units:
        for parameter in unit.parameters:
            assert model.get_parameter(parameter.name).shape == parameter.shape


def test_a_unit_says_which_rule_made_it() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(2**11, 2**11, device="meta")
            self.blocks = nn.Sequential(Block(), Block())
            self.scale = nn.Parameter(torch.ones(3))
            self.norm = nn.BatchNorm1d(3)

    precision = {"name": "mixed", "param": "bfloat16", "leave_alone": [nn.BatchNorm1d]}
    told = explain(of_blocks(precision=precision), Large(), 2)
    assert {unit.name: unit.reason for unit in told.units} == {
        "(root)": "what no unit inside of it holds",
        "embedding": "a large module before or behind all units (split_root)",
        "blocks.0": "class Block is in layers",
        "blocks.1": "class Block is in layers",
        "norm": "the precision leaves it alone",
    }
    assert {unit.name: unit.compute for unit in told.units}["norm"] is torch.float32


def test_parameters_of_one_module_that_differ_are_units_of_their_own() -> None:
    block = Block()
    block.norm.requires_grad_(False)
    units = explain(ShardConfig(), block, 2).units
    assert [(unit.name, unit.trained, unit.elements) for unit in units] == [
        ("(root)", True, 12),
        ("(root)[float32, frozen]", False, 6),
    ]


def test_overrides_and_the_plugins_that_they_name_are_shown() -> None:
    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, Block):
            return {"precision": "bf16", "placement": 1, "reshard_after_forward": False}
        return False

    told = explain(ShardConfig(policy=choose), on_meta(2), 3)
    root, first, _ = told.units
    assert (root.compute, root.overrides) == (torch.float32, {})
    assert first.compute is torch.bfloat16
    assert (first.overrides["reshard_after_forward"], first.overrides["placement"]) == (False, 1)
    assert [each.dim for each in first.parameters] == [1, 0, 0, 0]
    assert f"{__name__}:" in first.reason
    assert [(each.serves, each.name) for each in told.plugins if ":" in each.serves] == [
        ("blocks.0: precision", "bf16"),
        ("blocks.1: precision", "bf16"),
    ]


@pytest.mark.parametrize(
    ("settings", "world_size", "expected"),
    [
        ({}, 16384, (Strategy.FULL_SHARD, 16384, 1)),
        ({}, 1, (Strategy.NO_SHARD, 1, 1)),
        ({"strategy": "no_shard"}, 8, (Strategy.NO_SHARD, 1, 8)),
        ({"strategy": "hybrid_shard", "shard_size": 8}, 16384, (Strategy.HYBRID_SHARD, 8, 2048)),
    ],
)
def test_ranks_are_shared_out_as_the_strategy_says(
    settings: dict[str, Any], world_size: int, expected: tuple[Strategy, int, int]
) -> None:
    told = explain(of_blocks(**settings), on_meta(), world_size)
    assert (told.strategy, told.shards, told.replicas) == expected
    block = told.units[1]
    # Whole, a block's 18 elements end at 23. Of its parameters of 3 rows each of many ranks has one row, or none.
    assert block.shard_elements == (23 if told.shards == 1 else 13)
    assert block.gather_nbytes == (0 if told.shards == 1 else 4 * block.shard_elements)


def test_the_model_stays_as_it_is() -> None:
    model = Net()
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    explain(of_blocks(), model, 3)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    model(torch.tensor([1, 2])).sum().backward()


# Plugins


def test_the_default_collectives_depend_on_the_device_and_need_neither_it_nor_ranks() -> None:
    shown = {}
    for device, names in (("cuda", ["auto"]), ("cpu", ["auto", "gloo"])):
        told = explain(ShardConfig(), on_meta(), 8, device=device)
        (auto,) = [each for each in told.plugins if each.serves == "collectives"]
        *_, last = shown[device] = auto.walk()
        assert [each.name for each in shown[device]] == names
        assert [Path(each.file).name for each in shown[device]] == [f"{name}.py" for name in names]
        assert (last.serves, last.distribution) == ("auto" if len(names) > 1 else "collectives", "polyshard")
        assert "torch.distributed" in last.absent
        assert told.device.type == device
    assert shown["cuda"][0].reason.startswith("symmetric for units from 64 MiB where all ranks")
    assert [each.reason for each in shown["cpu"]] == ["", ""]
    assert not torch.cuda.is_initialized()


def test_options_have_sources_and_the_defaults_of_the_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ShardConfig.from_mapping({"policy": {"name": "or", "policies": [{"name": "size", "min_num_params": 3}]}})
    config = config.with_environment({"POLYSHARD_PRECISION": "mixed", "POLYSHARD_PRECISION__REDUCE": "float32"})
    told = explain(config, on_meta(), 2)
    plugins = {each.serves: each for each in told.plugins}
    reduce, param = (
        next(each for each in plugins["precision"].options if each.name == name) for name in ("reduce", "param")
    )
    assert (reduce.value, reduce.source.origin, reduce.source.where) == (
        "float32",
        Origin.ENVIRONMENT,
        "POLYSHARD_PRECISION__REDUCE",
    )
    assert (param.value, param.source.origin) == (None, Origin.DEFAULT)
    (size,) = plugins["policy"].inner
    assert [(each.name, each.source.origin) for each in size.options] == [
        ("min_num_params", Origin.CODE),
        ("force_leaf", Origin.DEFAULT),
        ("exclude", Origin.DEFAULT),
    ]
    # As the list of policies in which it stands.
    assert size.options[0].source.where == "the mapping"
    settings = {each.name: each.source.origin for each in told.settings}
    assert (settings["precision"], settings["policy"], settings["offload"]) == (
        Origin.ENVIRONMENT,
        Origin.CODE,
        Origin.DEFAULT,
    )


class Given(WrapPolicy):
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        return {module: {} for module in root.modules() if isinstance(module, Block)}


def test_an_object_of_the_program_is_shown_as_such() -> None:
    told = explain(ShardConfig(policy=Given()), on_meta(2), 2)
    (policy,) = [each for each in told.plugins if each.serves == "policy"]
    assert (policy.name, policy.distribution, policy.value) == ("Given", "", f"{__name__}:Given")
    assert Path(policy.file) == Path(__file__)
    assert told.units[1].reason == "the policy chose it"


def test_a_reason_that_is_no_text_is_refused_by_name() -> None:
    class Silent(Given):
        def reason(self, module: nn.Module, name: str) -> str:
            return None  # type: ignore[return-value]

    class Failing(Given):
        def reason(self, module: nn.Module, name: str) -> str:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(PluginContractError, match=r"reason of .*Silent for 'blocks\.0' answered None"):
        explain(ShardConfig(policy=Silent()), on_meta(), 2)
    with pytest.raises(PluginContractError, match=r"Failing for 'blocks\.0' failed: ZeroDivisionError: on purpose"):
        explain(ShardConfig(policy=Failing()), on_meta(), 2)


ACME = """
import torch
from polyshard.interfaces import Group
from polyshard_backends.fake import FakeCollectives
from polyshard_plugins.offload import NoOffload
from polyshard_policies.module_class import Never

class Compressed:
    api_version = 1
    def __new__(cls, context, inner="nccl", rate=2):
        if rate < 1:
            raise ValueError("no rate")
        return context.construct(Group.COLLECTIVES, inner)

class Needy(NoOffload):
    api_version = 1
    def __init__(self, context, folder="/"):
        torch.distributed.get_rank()

class Late(Never):
    api_version = 1
    def __init__(self, context):
        self.context = context
    def plan(self, root, policy_context):
        self.context.construct(Group.POLICIES, "always")
        return {}

class Two(FakeCollectives):
    api_version = 1
    def __init__(self, context):
        super().__init__(context, 0, 2)
    @property
    def capabilities(self):
        import dataclasses
        return dataclasses.replace(super().capabilities, devices=frozenset({"cpu"}), max_world_size=2)

class Writing:
    api_version = 1
    def __init__(self, context, file):
        open(file, "w").close()
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose plugins need what is not there."""
    offers = [
        ("polyshard.collectives", "squeezed", "acme_explained:Compressed"),
        ("polyshard.collectives", "two", "acme_explained:Two"),
        ("polyshard.collectives", "broken", "acme_explained_broken:Two"),
        ("polyshard.offload", "needy", "acme_explained:Needy"),
        ("polyshard.policies", "late", "acme_explained:Late"),
        ("polyshard.plugins", "writing", "acme_explained:Writing"),
    ]
    modules = {"acme_explained": ACME, "acme_explained_broken": "import a_library_that_is_absent"}
    install(tmp_path, "acme-explained", "2.5", offers, modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("acme_explained", None)


def test_what_misses_ranks_or_a_device_is_stood_in_for(acme: Path) -> None:
    config = ShardConfig(
        collectives="squeezed", offload="needy", listeners=[{"name": "writing", "file": str(acme / "written")}]
    )
    told = explain(config, on_meta(), 16, device="cuda")
    plugins = {each.serves: each for each in told.plugins}
    outer = plugins["collectives"]
    assert (outer.distribution, outer.version, outer.absent) == ("acme-explained", "2.5", "")
    assert outer.file == str(acme / "acme_explained.py")
    assert [(each.name, each.value) for each in outer.options] == [("inner", "nccl"), ("rate", 2)]
    assert [each.name for each in outer.walk()] == ["squeezed", "nccl"]
    assert "process group has not been initialized" in plugins["offload"].absent
    assert plugins["listeners[0]"].absent == "listeners may write files"
    assert not (acme / "written").exists()


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("settings", "world_size", "error", "words"),
    [
        ({"collectives": {"name": "squeezed", "inner": "broken"}}, 2, PluginLoadError, "a_library_that_is_absent"),
        ({"collectives": {"name": "squeezed", "rate": 0}}, 2, PluginLoadError, "rate=0: ValueError: no rate"),
        ({"collectives": {"name": "squeezed", "inner": "ncll"}}, 2, PluginNotFoundError, "named 'ncll'"),
        ({"collectives": "squeezed"}, 2, DeviceError, "'nccl' serves cuda tensors and the model computes on cpu"),
        ({"collectives": "two"}, 3, WorldSizeError, r"'two' serve 1 to 2 ranks, but there are 3"),
        ({"collectives": "two", "device": "cuda"}, 2, DeviceError, "'two' serve cpu tensors"),
        ({"policy": "late"}, 2, StateError, "after its construction"),
        ({"listeners": ["writing"]}, 2, ConfigError, "missing a required argument: 'file'"),
        ({"offload": {"name": "cpu", "pin_memory": 3}}, 2, ConfigError, "takes bool for pin_memory, not 3"),
        ({"policy": {"name": "transformer", "layers": nn.LSTM}}, 2, ConfigError, "has no module of the class"),
        ({"strategy": "hybrid_shard", "shard_size": 4}, 6, WorldSizeError, "6 ranks cannot be divided .* of 4"),
        ({"reshard_after_forward": "auto"}, 2, ConfigError, "needs memory_budget on cpu"),
        ({"listeners": [nn.ReLU]}, 2, PluginContractError, "hook"),
        ({}, 0, WorldSizeError, "there is no world of 0 ranks"),
        ({}, 10**11, WorldSizeError, "there is no world of 100000000000 ranks.* at most 1048576"),
        ({}, 2.0, WorldSizeError, r"there is no world of 2\.0 ranks"),
    ],
)
def test_what_sharding_would_refuse_is_refused(
    settings: dict[str, Any], world_size: int, error: type[Exception], words: str
) -> None:
    model = Net()
    with pytest.raises(error, match=words):
        explain(ShardConfig(**{"device": "cpu", **settings}), model, world_size)
    assert len(explain(of_blocks(), model, 2).units) == 5


def test_models_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(ConfigTypeError, match="explain takes a module, not 'models:Net'"):
        explain(ShardConfig(), "models:Net", 2)  # type: ignore[arg-type]
    with pytest.raises(EmptyUnitError, match="nothing to shard"):
        explain(ShardConfig(), nn.ReLU(), 2)
    sharded = polyshard.shard(Net(), ShardConfig(collectives={"name": "fake", "world_size": 2}))
    with pytest.raises(AlreadyShardedError):
        explain(ShardConfig(), sharded, 2)


@pytest.mark.parametrize("setting", ["collectives", "precision", "offload", "policy", "listeners"])
def test_a_name_that_no_plugin_has_is_told_with_the_file_or_variable_that_gives_it(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, variable = tmp_path / "run.toml", f"POLYSHARD_{setting.upper()}"
    valid = "[shard]\n" + ("" if setting == "collectives" else 'collectives = {name = "fake", world_size = 2}\n')
    file.write_text(valid + f"{setting} = {['bf61'] if setting == 'listeners' else 'bf61'!r}\n")
    in_file = ShardConfig.from_toml(file, environ={})
    file.write_text(valid)
    in_variable = ShardConfig.from_toml(file, environ={variable: "bf61"})
    for config, where in ((in_file, f"[shard] of {file}"), (in_variable, variable)):
        told = rf"^{re.escape(where)}: no installed plugin of .* is named 'bf61'"
        with pytest.raises(PluginNotFoundError, match=told):
            polyshard.shard(Net(), config)
        with pytest.raises(PluginNotFoundError, match=told):
            explain(config, Net(), 2)
    monkeypatch.setenv(variable, "bf61")
    assert main(["config", str(file)]) == 2
    assert f"{variable}: no installed plugin of " in capsys.readouterr().err


# The command

MODULE = """
import torch
from torch import nn

print("built")

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

class Net(nn.Module):
    def __init__(self, depth=3, width=4):
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The command in a folder with a model and a file of settings, but for its options."""
    (tmp_path / "explained_nets.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text(
        textwrap.dedent(
            """
            [shard]
            precision = "bf16"
            policy = { name = "transformer", layers = "explained_nets:Block" }
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    yield ["explain", "run.toml", "--model", "explained_nets:Net", "--world-size", "8"]
    sys.modules.pop("explained_nets", None)


def rows_after(text: str, header: str) -> list[list[str]]:
    """The cells of the table whose first column is called ``header``."""
    lines = iter(text.splitlines())
    next(line for line in lines if line.startswith(f"{header} "))
    rows = []
    for line in lines:
        if not line:
            break
        rows.append([cell.strip() for cell in line.split("  ") if cell.strip()])
    return rows


@pytest.mark.slow
def test_equal_units_are_one_line_unless_all_are_asked_for(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--model-args", '{"depth": 80}', "--device", "cuda"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Net on 8 ranks, computing on cuda: full_shard, units in 8 shards\n")
    assert captured.err == "built\n"
    root, blocks = rows_after(captured.out, "unit")
    assert root[:3] == ["(root)", "Net", "3"]
    # 4 * 8 + 8 + 8 * 4 + 4 elements. A rank has a row of each: 4, 1, 8 and 1, at multiples of 8 elements in bf16.
    assert blocks[:5] == ["blocks.0 to blocks.79 (80 units)", "Block", "4", "76", f"{8 * 25 - 76}"]
    dtypes = ["float32", "bfloat16", "bfloat16", "float32", "float32"]
    assert blocks[5:] == ["25", *dtypes, "class Block is in layers"]
    assert "81 units of 6,170 elements; " in captured.out
    assert main([*command, "--model-args", '{"depth": 80}', "--all"]) == 0
    assert len(rows_after(capsys.readouterr().out, "unit")) == 81


def test_settings_and_plugins_are_shown_with_their_sources(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYSHARD_POLICY__LAYERS", '["explained_nets:Block", "torch.nn:Embedding"]')
    assert main(command) == 0
    out = capsys.readouterr().out
    settings = rows_after(out, "setting")
    assert ["policy", "transformer", "[shard] of run.toml"] in settings
    assert ["layers", "explained_nets:Block, torch.nn:Embedding", "POLYSHARD_POLICY__LAYERS"] in settings
    assert ["offload", "none", "default"] in settings
    plugins = {row[0]: row[1:] for row in rows_after(out, "plugin")}
    origin = f"polyshard {polyshard.__version__}"
    assert plugins["gloo"][:3] == ["auto", "polyshard_backends.gloo:GlooCollectives", origin]
    assert Path(plugins["bf16"][3]).is_file()
    assert "gloo was not constructed here: " in out


def test_a_mesh_is_told_with_the_units_over_its_dimensions(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYSHARD_SHARD", "edp,ep")
    monkeypatch.setenv("POLYSHARD_POLICY__OVERRIDES", '{"blocks.1" = {mesh = "edp", gradient_divisor = "group"}}')
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "names 'edp', 'ep', of which --world-size says no sizes" in told
    assert "--mesh edp=N,ep=N" in told
    at = command.index("--world-size")
    command[at : at + 2] = ["--mesh", "edp=2,ep=4,tp=2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("Net on 16 ranks, computing on cpu: full_shard, units in 8 shards\n")
    assert ["shard", "edp, ep", "POLYSHARD_SHARD"] in rows_after(out, "setting")
    assert ["mesh", "{'edp': 2, 'ep': 4, 'tp': 2}", "code"] in rows_after(out, "setting")
    over = {row[0]: row[-2:] if row[0] == "blocks.1" else row[-1] for row in rows_after(out, "unit")}
    dense = "edp, ep: 8 x 1 ranks, sum / 8"
    assert over == {
        "(root)": dense,
        "blocks.0": dense,
        "blocks.1": ["edp: 2 x 1 ranks, sum / 2", "mesh=edp, gradient_divisor=group"],
        "blocks.2": dense,
    }
    command[-1:] = ["edp=2,ep"]
    assert main(command) == 2
    assert "--mesh 'edp=2,ep' is no mesh" in capsys.readouterr().err


def test_json_holds_every_unit(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["world_size"], told["shards"], told["strategy"], told["device"]) == (8, 8, "full_shard", "cpu")
    assert [unit["name"] for unit in told["units"]] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert told["units"][1]["compute"] == "bfloat16"
    assert told["units"][1]["parameters"][0] == {
        "name": "blocks.0.up.weight",
        "shape": [8, 4],
        "offset": 0,
        "dim": 0,
    }
    assert told["elements"] == 4 * 10 + 3 * 76 + 50
    (policy,) = [plugin for plugin in told["plugins"] if plugin["serves"] == "policy"]
    assert policy["options"] == [
        {
            "name": "layers",
            "value": "explained_nets:Block",
            "source": {"origin": "file", "where": "[shard] of run.toml"},
        },
        {"name": "overrides", "value": None, "source": {"origin": "default", "where": ""}},
    ]
