"""Which installed plugins may be imported: what is forbidden leaves no mark, nor does what nobody names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from fake_distribution import install
from polyshard import ShardConfig, errors
from polyshard.interfaces import Group, resolve_class
from polyshard.registry import PluginState, installed, resolve
from polyshard_tools.cli.main import main
from polyshard_tools.doctor.checks import plugins, variables
from polyshard_tools.doctor.machine import Machine
from processes import run_processes
from refusal import Tower, refused, silent
from torch import nn

POLICIES = Group.POLICIES.value
ALLOWED, DISABLE = "POLYSHARD_ALLOWED_PLUGINS", "POLYSHARD_DISABLE_PLUGINS"

#: Leaves a mark beside itself when it is imported.
SOURCE = """
from pathlib import Path
from polyshard.interfaces import WrapPolicy

Path(__file__).with_suffix(".imported").touch()


class Some(WrapPolicy):
    api_version = 1

    def __init__(self, context):
        pass

    def plan(self, root, context):
        return {child: {} for child in root.children()}
"""


class Site:
    """A folder on the path with the package Acme.Marks, whose plugins are one and two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        offers = [(POLICIES, name, f"acme_marks_{name}:Some") for name in ("one", "two")]
        modules = {f"acme_marks_{name}": SOURCE for name in ("one", "two")}
        install(folder, "Acme.Marks", "1.5", offers, modules)

    @property
    def imported(self) -> set[str]:
        return {mark.stem.removeprefix("acme_marks_") for mark in self.folder.glob("*.imported")}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name in ("one", "two"):
        monkeypatch.delitem(sys.modules, f"acme_marks_{name}", raising=False)
    for variable in (ALLOWED, DISABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return Site(tmp_path)


REFERENCES = [
    ("policy", {"name": "module_class", "classes": ["acme_marks_one:Some"]}),
    ("policy", {"name": "custom", "fn": "acme_marks_one:Some"}),
    ("precision", {"name": "bf16", "leave_alone": ["acme_marks_one:Some"]}),
]


@pytest.mark.parametrize(
    ("variable", "text"), [(ALLOWED, "acme-marks"), (ALLOWED, ""), (DISABLE, "1"), (DISABLE, "yes")]
)
@pytest.mark.parametrize(("setting", "choice"), REFERENCES, ids=["classes", "function", "leave_alone"])
def test_options_import_no_module_where_plugins_are_restricted(
    site: Site, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, setting: str, choice: dict[str, Any]
) -> None:
    monkeypatch.setenv(variable, text)
    model = nn.Sequential(nn.Linear(2, 2))
    config = ShardConfig.from_mapping({"strategy": "no_shard", "collectives": "fake", setting: choice})
    words = f"names a module that the program has not imported, and {variable} is set"
    with pytest.raises(errors.ConfigError, match=words):
        polyshard.shard(model, config)
    assert site.imported == set()
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("text", ["0", "off", ""])
def test_options_import_modules_where_nothing_is_restricted(
    site: Site, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(DISABLE, text)
    assert resolve_class("acme_marks_one:Some", "a test").__name__ == "Some"
    assert site.imported == {"one"}
    # What is imported already may be named whatever is set.
    monkeypatch.setenv(DISABLE, "1")
    assert resolve_class("acme_marks_one:Some", "a test").__name__ == "Some"


@pytest.mark.parametrize(
    "allowed",
    ["acme-marks", "ACME_marks", "polyshard, acme.marks:one", "other,acme-marks:one", "acme-marks:one,acme-marks:two"],
)
def test_what_is_listed_may_be_imported(site: Site, monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    monkeypatch.setenv(ALLOWED, allowed)
    assert resolve(Group.POLICIES, "one").distribution == "Acme.Marks"
    assert site.imported == {"one"}


@pytest.mark.parametrize("allowed", ["", " , ", "polyshard", "acme", "acme-marks:two", "acme-marks:ONE", "acme-marks2"])
@pytest.mark.parametrize("name", ["one", "acme-marks:one"])
def test_what_is_not_listed_is_refused_and_leaves_no_mark(
    site: Site, monkeypatch: pytest.MonkeyPatch, allowed: str, name: str
) -> None:
    monkeypatch.setenv(ALLOWED, allowed)
    words = ("'one' of polyshard.policies", "Acme.Marks 1.5", "was not imported", ALLOWED, '"Acme.Marks:one"')
    refused(Tower(), silent(policy=name), errors.PluginRefusedError, *words, twin=Tower())
    assert site.imported == set()
    with pytest.raises(PermissionError):
        resolve(Group.POLICIES, name)


@pytest.mark.parametrize("allowed", [None, "acme-marks"])
def test_the_switch_leaves_polyshards_own_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch, allowed: str | None
) -> None:
    monkeypatch.setenv(DISABLE, "1")
    if allowed:
        monkeypatch.setenv(ALLOWED, allowed)
    words = ("'one'", "Acme.Marks 1.5", f"{DISABLE} is set", "Unset it")
    refused(Tower(), silent(policy="one"), errors.PluginRefusedError, *words, twin=Tower())
    assert site.imported == set()
    assert resolve(Group.POLICIES, "always").distribution == "polyshard"
    monkeypatch.setenv(DISABLE, "0")
    assert resolve(Group.POLICIES, "one").name == "one"


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        (DISABLE, "perhaps", "must be 1 or 0, not 'perhaps'"),
        (ALLOWED, "acme,:one", "has ':one', which is neither"),
        (ALLOWED, "acme:", "has 'acme:'"),
        (ALLOWED, "a:b:c", "has 'a:b:c'"),
    ],
)
def test_what_says_nothing_allows_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, words: str
) -> None:
    monkeypatch.setenv(variable, text)
    refused(Tower(), silent(policy="one"), errors.ConfigError, variable, words, twin=Tower())
    assert site.imported == set()


def test_objects_of_the_program_are_its_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    given = resolve(Group.POLICIES, "one").factory
    monkeypatch.setenv(DISABLE, "1")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    polyshard.shard(model, ShardConfig(collectives={"name": "fake", "world_size": 2}, policy=given(None)))
    model(torch.ones(1, 4)).sum().backward()


def test_they_are_no_settings(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ = {ALLOWED: "acme", DISABLE: "1", "POLYSHARD_PRECISION": "bf16"}
    assert ShardConfig().with_environment(environ) == ShardConfig(precision="bf16")
    file = tmp_path / "wide.toml"
    for setting in ("allowed_plugins", "disable_plugins", "POLYSHARD_ALLOWED_PLUGINS"):
        file.write_text(f'[shard]\n{setting} = "acme-marks"\n')
        with pytest.raises(errors.ConfigError, match=setting):
            ShardConfig.from_toml(file, environ={})
    with pytest.raises(errors.ConfigError, match="POLYSHARD_ALLOW_PLUGINS is no setting"):
        ShardConfig().with_environment({"POLYSHARD_ALLOW_PLUGINS": "acme"})


def test_commands_show_it_without_importing(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ALLOWED, "acme-marks:two")
    assert main(["plugins", "list", "policies", "--json"]) == 0
    states = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert (states["one"]["state"], states["two"]["state"]) == ("refused", "ready")
    assert ALLOWED in states["one"]["error"]
    assert main(["plugins", "check", "one"]) == 2
    assert ALLOWED in capsys.readouterr().out
    (found,) = [each for each in installed(Group.POLICIES) if each.name == "one"]
    assert found.state is PluginState.REFUSED
    (finding,) = plugins([found]).findings
    assert "refused" in finding.what
    assert ALLOWED in finding.cure
    assert site.imported == {"two"}


def test_the_doctor_shows_the_variables_and_finds_misspelt_ones() -> None:
    machine = Machine({ALLOWED: "acme", DISABLE: "0", "POLYSHARD_ALOWED_PLUGINS": "acme"}, {}, ())
    section = variables(machine)
    assert (ALLOWED, "acme") in section.facts
    own = [each for each in section.findings if "POLYSHARD" in each.about]
    assert [each.about for each in own] == ["POLYSHARD_ALOWED_PLUGINS"]
    assert ALLOWED in own[0].cure


def with_variable_of_its_own(rank: int, folder: str) -> str:
    # The process goes on to serve other tests.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv(ALLOWED, ("acme-marks", "acme-marks,other")[rank])
        with pytest.raises(errors.RankMismatchError) as caught:
            polyshard.shard(torch.nn.Linear(4, 4), ShardConfig(policy="one"))
    return str(caught.value)


@pytest.mark.slow
def test_ranks_are_told_that_their_variables_differ(site: Site) -> None:
    for text in run_processes(2, with_variable_of_its_own, str(site.folder)):
        assert f"['{ALLOWED}', 'acme-marks']" in text
        assert f"['{ALLOWED}', 'acme-marks', 'other']" in text
