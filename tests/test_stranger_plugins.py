"""Packages of others that are badly behaved: they must not hurt those who did not ask for them."""

from __future__ import annotations

import json
from pathlib import Path

import polyshard
import pytest
from fake_distribution import install
from polyshard import ShardConfig, errors
from polyshard.catalog import PluginState, installed, resolve
from polyshard.cli import main
from polyshard.interfaces import Group
from refusal import Tower, refused, silent

OFFLOAD, POLICIES = Group.OFFLOAD.value, Group.POLICIES.value

KEEPS_ALL = """
from polyshard.interfaces import WrapPolicy

class Mine(WrapPolicy):
    {version}

    def __init__(self, context):
        pass

    def plan(self, root, context):
        return {{}}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("acme_exits", "import sys\nsys.exit('no licence found')", "SystemExit: no licence found"),
        ("acme_stops", "raise GeneratorExit('odd')", "GeneratorExit: odd"),
        ("acme_own", "class Fatal(BaseException): pass\nraise Fatal('gone')", "Fatal: gone"),
    ],
)
def test_an_import_that_ends_the_process_is_a_broken_plugin(
    site: Path, capsys: pytest.CaptureFixture[str], module: str, source: str, words: str
) -> None:
    install(site, "acme-exits", "1.2", [(POLICIES, "leaves", f"{module}:Mine")], {module: source})
    assert main(["plugins", "list", "--json", "policies"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert (records["leaves"]["state"], records["leaves"]["error"]) == ("broken", words)
    assert records["never"]["state"] == "ready"
    refused(
        Tower(),
        silent(policy="leaves"),
        errors.PluginLoadError,
        "'leaves'",
        "acme-exits 1.2",
        words,
        twin=Tower(),
    )


def test_a_factory_that_ends_the_process_is_an_error_by_name(site: Path) -> None:
    source = "import sys\ndef make(context):\n    sys.exit(3)\nmake.api_version = 1\n"
    install(site, "acme-quits", "1.0", [(OFFLOAD, "quits", "acme_quits:make")], {"acme_quits": source})
    words = ("'quits'", "acme-quits 1.0", "SystemExit: 3")
    refused(Tower(), silent(offload="quits"), errors.PluginLoadError, *words, twin=Tower())


def test_an_interrupt_while_a_plugin_is_imported_is_the_users(site: Path) -> None:
    install(site, "acme-slow", "1.0", [(POLICIES, "slow", "acme_slow:x")], {"acme_slow": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        main(["plugins", "list", "policies"])
    with pytest.raises(KeyboardInterrupt):
        resolve(Group.POLICIES, "slow")


@pytest.mark.parametrize(
    ("group", "contract", "module"),
    [
        ("collectives", "Collectives", "acme_silent_c"),
        ("precision", "PrecisionCaster", "acme_silent_p"),
        ("offload", "OffloadManager", "acme_silent_o"),
        ("policies", "WrapPolicy", "acme_silent_w"),
        ("plugins", "Listener", "acme_silent_l"),
    ],
)
def test_the_contracts_own_version_is_not_the_plugins(site: Path, group: str, contract: str, module: str) -> None:
    source = f"from polyshard.interfaces import {contract}\nclass Mine({contract}): pass\n"
    install(site, "acme-silent", "1.0", [(f"polyshard.{group}", "silent", f"{module}:Mine")], {module: source})
    with pytest.raises(errors.PluginVersionError, match=r"has none\. Add 'api_version = 1' to the class"):
        resolve(Group(f"polyshard.{group}"), "silent")
    (found,) = [plugin for plugin in installed(Group(f"polyshard.{group}")) if plugin.name == "silent"]
    assert found.state is PluginState.INCOMPATIBLE


def test_every_built_in_says_its_version() -> None:
    for group in Group:
        for plugin in installed(group):
            if plugin.distribution == "polyshard":
                assert plugin.state is PluginState.READY, plugin


# Names that built-in plugins have.


@pytest.fixture
def squatter(site: Path) -> None:
    """A package that offers the names of two defaults."""
    install(
        site,
        "acme-names",
        "3.0",
        [(OFFLOAD, "none", "acme_names:Mine"), (POLICIES, "never", "acme_names:Mine")],
        {"acme_names": KEEPS_ALL.format(version="api_version = 1")},
    )


@pytest.mark.usefixtures("squatter")
def test_a_strangers_name_does_not_change_the_defaults() -> None:
    for group, name in ((Group.OFFLOAD, "none"), (Group.POLICIES, "never")):
        assert resolve(group, name).distribution == "polyshard"
        assert resolve(group, f"polyshard:{name}").distribution == "polyshard"
    model = polyshard.shard(Tower(), ShardConfig(collectives={"name": "fake", "world_size": 2}))
    assert polyshard.report(model).world_size == 2


@pytest.mark.usefixtures("squatter")
def test_a_stranger_is_used_where_its_package_is_named() -> None:
    assert resolve(Group.POLICIES, "acme-names:never").value == "acme_names:Mine"
    assert resolve(Group.POLICIES, {"name": "Acme_Names:never"}).distribution == "acme-names"


@pytest.mark.usefixtures("squatter")
def test_the_listing_shows_who_is_hidden_and_how_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--json", "policies"]) == 0
    records = [record for record in json.loads(capsys.readouterr().out) if record["name"] == "never"]
    states = {record["distribution"]: (record["state"], record["error"]) for record in records}
    assert states["polyshard"] == ("ready", "")
    assert states["acme-names"] == ("hidden", 'polyshard has a plugin of this name: ask for "acme-names:never"')


def test_two_strangers_with_one_name_are_both_named(site: Path) -> None:
    source = KEEPS_ALL.format(version="api_version = 1")
    for distribution in ("acme-one", "acme-other"):
        module = distribution.replace("-", "_") + "_twice"
        install(site, distribution, "1.0", [(POLICIES, "twice", f"{module}:Mine")], {module: source})
    words = ("'twice'", "acme-one 1.0", "acme-other 1.0", '"acme-one:twice" or "acme-other:twice"')
    refused(Tower(), silent(policy="twice"), errors.PluginConflictError, *words, twin=Tower())


def test_one_stranger_twice_beside_a_built_in(site: Path) -> None:
    points = [(POLICIES, "always", "acme_double:Mine"), (POLICIES, "always", "acme_double:Other")]
    source = KEEPS_ALL.format(version="api_version = 1") + "\nOther = Mine\n"
    install(site, "acme-double", "1.0", points, {"acme_double": source})
    assert resolve(Group.POLICIES, "always").distribution == "polyshard"
    with pytest.raises(errors.PluginConflictError, match="Ask the author of acme-double"):
        resolve(Group.POLICIES, "acme-double:always")
    states = {plugin.value: plugin.state for plugin in installed(Group.POLICIES) if plugin.name == "always"}
    assert states["polyshard_policies.simple:Always"] is PluginState.READY
    assert states["acme_double:Mine"] is states["acme_double:Other"] is PluginState.AMBIGUOUS
