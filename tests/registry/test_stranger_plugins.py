"""Packages of others that are badly behaved: they must not hurt those who did not ask for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_distribution import install
from polyshard import errors
from polyshard.interfaces import Group, UnitPlan, WrapPolicy
from polyshard.registry import PluginState, installed, resolve
from polyshard_tools.cli import main
from refusal import Tower, refused, silent
from torch import nn

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
    error = f"cannot be imported: {words}. Repair or reinstall acme-exits, or name another plugin."
    assert (records["leaves"]["state"], records["leaves"]["error"]) == ("broken", error)
    assert records["never"]["state"] == "ready"
    refused(Tower(), silent(policy="leaves"), errors.PluginLoadError, "'leaves'", "acme-exits 1.2", words, twin=Tower())


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
        ("precision", "PrecisionPlugin", "acme_silent_p"),
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
def test_a_stranger_is_used_where_its_package_is_named() -> None:
    assert resolve(Group.POLICIES, "polyshard:never").distribution == "polyshard"
    assert resolve(Group.POLICIES, "acme-names:never").value == "acme_names:Mine"
    assert resolve(Group.POLICIES, {"name": "Acme_Names:never"}).distribution == "acme-names"


@pytest.mark.usefixtures("squatter")
def test_the_listing_shows_who_is_hidden_and_how_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--json", "policies"]) == 0
    records = [record for record in json.loads(capsys.readouterr().out) if record["name"] == "never"]
    states = {record["distribution"]: (record["state"], record["error"]) for record in records}
    assert states["polyshard"] == ("ready", "")
    assert states["acme-names"] == ("hidden", 'polyshard has a plugin of this name: ask for "acme-names:never"')


def test_one_stranger_twice_beside_a_built_in(site: Path) -> None:
    points = [(POLICIES, "always", "acme_double:Mine"), (POLICIES, "always", "acme_double:Other")]
    source = KEEPS_ALL.format(version="api_version = 1") + "\nOther = Mine\n"
    install(site, "acme-double", "1.0", points, {"acme_double": source})
    assert resolve(Group.POLICIES, "always").distribution == "polyshard"
    with pytest.raises(errors.PluginConflictError, match="Ask the author of acme-double"):
        resolve(Group.POLICIES, "acme-double:always")
    states = {plugin.value: plugin.state for plugin in installed(Group.POLICIES) if plugin.name == "always"}
    assert states["polyshard_policies.module_class:Always"] is PluginState.READY
    assert states["acme_double:Mine"] is states["acme_double:Other"] is PluginState.AMBIGUOUS


# Classes that cannot be used as their contract says.

OFFLOADS = """
from polyshard.interfaces import OffloadCapabilities, OffloadManager

class Base(OffloadManager):
    capabilities = OffloadCapabilities(offloads=True)

    def __init__(self, context):
        pass

    def place(self, unit, shard):
        return shard

    def fetch(self, unit, master, own_slice):
        own_slice.copy_(master)

    def store_grad(self, unit, grad, into):
        return grad

class Mine(Base):
    api_version = 1
{body}
"""


def offered(site: Path, module: str, body: str) -> tuple[PluginState, str]:
    """State and error of an offload manager with ``body``, which is named like its module."""
    install(site, module, "1.0", [(OFFLOAD, module, f"{module}:Mine")], {module: OFFLOADS.format(body=body)})
    (found,) = [plugin for plugin in installed(Group.OFFLOAD) if plugin.name == module]
    return found.state, found.error


@pytest.mark.parametrize(
    ("module", "body", "words"),
    [
        (
            "acme_lacks",
            "    from abc import abstractmethod\n    place = abstractmethod(Base.place)",
            "it lacks place(unit, shard)",
        ),
        (
            "acme_less",
            "    def fetch(self, unit, master): pass",
            "fetch(self, unit, master) is called as fetch(unit, master, own_slice): it does not take 'own_slice'",
        ),
        (
            "acme_more",
            "    def place(self, unit, shard, where): return shard",
            "place(self, unit, shard, where) is called as place(unit, shard): missing a required argument: 'where'",
        ),
        (
            "acme_named",
            "    def place(self, unit, *, shard): return shard",
            "place(self, unit, *, shard) is called as place(unit, shard): it does not take 'shard'",
        ),
        ("acme_selfless", "    def sync_for_step(): pass", "it does not take 'self'"),
        (
            "acme_method",
            "    def capabilities(self): return Base.capabilities",
            "capabilities is a method and must be a property or an attribute: put @property above it",
        ),
        ("acme_nothing", "    place = None", "place is None and must be a method: place(unit, shard)"),
        (
            "acme_renamed",
            "    def units_to_park(self, units): return units[:1]",
            "units_to_park is called units_to_offload now: rename it",
        ),
        ("acme_ungiven", "    def __init__(self): pass", "it must take a PluginContext as its first argument"),
    ],
)
def test_a_class_that_cannot_be_called_as_its_contract_says_is_incomplete(
    site: Path, module: str, body: str, words: str
) -> None:
    state, error = offered(site, module, body)
    assert state is PluginState.INCOMPLETE
    assert words in error
    where = f"plugin '{module}' of polyshard.offload ({module}:Mine, from {module} 1.0) does not fit its contract"
    refused(Tower(), silent(offload=module), errors.PluginContractError, where, words, twin=Tower())


def test_all_that_is_wrong_is_told_at_once(site: Path) -> None:
    body = "    place = None\n    def fetch(self): pass\n    def store_grad(self, unit, grad): return grad"
    _, error = offered(site, "acme_much", body)
    assert [each.partition("(")[0].split()[0] for each in error.partition(": ")[2].split("; ")] == [
        "place",
        "fetch",
        "store_grad",
    ]


@pytest.mark.parametrize(
    ("module", "body"),
    [
        ("acme_stars", "    def place(self, *args): return args[1]\n    def fetch(self, *args, **kwargs): pass"),
        ("acme_optional", "    def place(self, unit, shard, where='here'): return shard"),
        ("acme_placed", "    def place(self, u, s, /): return s"),
        ("acme_static", "    @staticmethod\n    def place(unit, shard): return shard"),
        ("acme_class", "    @classmethod\n    def place(cls, unit, shard): return shard"),
        ("acme_property", "    @property\n    def capabilities(self): return Base.capabilities"),
        ("acme_wraps", "    import functools\n    @functools.wraps(print)\n    def place(self, *args): return args[1]"),
        ("acme_partial", "    import functools\n    place = functools.partialmethod(Base.place)"),
        ("acme_initless", "    def __init__(self, *args, **options): pass"),
    ],
)
def test_what_can_be_called_is_ready_however_it_is_written(site: Path, module: str, body: str) -> None:
    assert offered(site, module, body) == (PluginState.READY, "")
    assert resolve(Group.OFFLOAD, module).distribution == module


def test_a_class_of_no_contract_is_told_what_to_derive_from(site: Path) -> None:
    source = "class Mine:\n    api_version = 1\n    def __init__(self, context): pass\n"
    install(site, "acme-plain", "1.0", [(OFFLOAD, "plain", "acme_plain:Mine")], {"acme_plain": source})
    with pytest.raises(errors.PluginContractError, match=r"derive it from polyshard\.interfaces\.OffloadManager"):
        resolve(Group.OFFLOAD, "plain")


def test_what_a_function_makes_is_compared_with_the_contract_once_it_is_made(site: Path) -> None:
    source = OFFLOADS.format(body="    def fetch(self, unit): pass") + "def make(context):\n    return Mine(context)\n"
    module = {"acme_made": source + "make.api_version = 1\n"}
    install(site, "acme-made", "1.0", [(OFFLOAD, "made", "acme_made:make")], module)
    words = ("'made'", "acme-made 1.0", "fetch(self, unit) is called as fetch(unit, master, own_slice)")
    refused(Tower(), silent(offload="made"), errors.PluginContractError, *words, twin=Tower())


def test_an_object_that_is_given_is_compared_too() -> None:
    class Mine(WrapPolicy):
        def plan(self, root: nn.Module) -> UnitPlan:  # type: ignore[override]
            return {}

    words = ("Mine object given for polyshard.policies", "is called as plan(root, context)", "does not take 'context'")
    refused(Tower(), silent(policy=Mine()), errors.PluginContractError, *words, twin=Tower())


# Versions that were never stated.


def test_an_inherited_version_is_refused_by_name(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "from polyshard_policies.module_class import Never\nclass Mine(Never): pass\n"
    install(site, "acme-heir", "1.0", [(POLICIES, "heir", "acme_heir:Mine")], {"acme_heir": source})
    words = "inherits api_version from polyshard_policies.module_class:Never; state its own"
    assert main(["plugins", "list", "--json", "policies"]) == 0
    (found,) = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "heir"]
    assert found["state"] == "incompatible"
    assert words in found["error"]
    refused(Tower(), silent(policy="heir"), errors.PluginVersionError, "'heir'", "acme-heir 1.0", words, twin=Tower())


def test_an_object_that_is_called_states_its_version_in_its_own_class(site: Path) -> None:
    lines = [
        "from polyshard_policies.module_class import Never",
        "class Makes:",
        "    api_version = 1",
        "    def __call__(self, context): return Never(context)",
        "class Heir(Makes): pass",
        "makes, heir, stated = Makes(), Heir(), Heir()",
        "stated.api_version = 1",
    ]
    names = ("makes", "heir", "stated")
    points = [(POLICIES, f"acme_{name}", f"acme_called:{name}") for name in names]
    install(site, "acme-called", "1.0", points, {"acme_called": "\n".join(lines)})
    states = {plugin.name: plugin.state for plugin in installed(Group.POLICIES)}
    assert [states[f"acme_{name}"] for name in names] == [
        PluginState.READY,
        PluginState.INCOMPATIBLE,
        PluginState.READY,
    ]


def test_the_listing_as_json_holds_what_a_program_asks_for(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(
        site,
        "acme-json",
        "2.1",
        [(POLICIES, "acme_json", "acme_json:Mine"), (POLICIES, "acme_torn", "acme_torn:Mine")],
        {"acme_json": KEEPS_ALL.format(version="api_version = 1"), "acme_torn": "import sys\nsys.exit(4)"},
    )
    assert main(["plugins", "list", "--json", "policies"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    keys = ("group", "name", "distribution", "version", "file", "state", "error")
    assert [records["acme_json"][key] for key in keys] == [
        *(POLICIES, "acme_json", "acme-json", "2.1"),
        *(str(site / "acme_json.py"), "ready", ""),
    ]
    assert [records["acme_torn"][key] for key in ("file", "state", "error")] == [
        *(str(site / "acme_torn.py"), "broken"),
        "cannot be imported: SystemExit: 4. Repair or reinstall acme-json, or name another plugin.",
    ]
    assert records["size"]["file"].endswith("polyshard_policies/functions.py")
