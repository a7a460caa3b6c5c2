"""``polyshard plugins check``: verdicts on plugins of strangers, and on what comes with polyshard."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_distribution import install
from polyshard.interfaces import Group
from polyshard_tools.cli import main

OFFLOAD, POLICIES, COLLECTIVES = Group.OFFLOAD.value, Group.POLICIES.value, Group.COLLECTIVES.value

POLICY = """
import os
from polyshard.interfaces import WrapPolicy

class Mine(WrapPolicy):
    api_version = 1

    def __init__(self, context, setting="precision", *, depth):
        self.setting, self.depth = setting, depth

    def plan(self, root, context):
        if self.depth == 0 and context.ignored_modules:
            os._exit(7)
        chosen = list(root.children())[: max(1, self.depth)]
        return {module: {self.setting: "fp32"} for module in chosen if module not in context.ignored_modules}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def acme(site: Path) -> None:
    install(site, "acme-check", "1.0", [(POLICIES, "children", "acme_check:Mine")], {"acme_check": POLICY})


def check(*arguments: str) -> int:
    return main(["plugins", "check", *arguments])


@pytest.mark.slow
@pytest.mark.usefixtures("acme")
def test_a_rule_that_does_not_hold_is_shown_with_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("children", "--options", '{depth = 1, setting = "presicion"}', "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert [record[key] for key in ("group", "name", "distribution", "version", "state")] == [
        *(POLICIES, "children", "acme-check", "1.0", "checked")
    ]
    assert record["devices"][0] == "cpu"
    rules = {rule["name"]: rule for rule in record["rules"]}
    failed = {name for name, rule in rules.items() if rule["failures"]}
    assert failed
    assert not any(rules[name]["holds"] for name in failed)
    assert any("presicion" in each["message"] for name in failed for each in rules[name]["failures"])
    # Not every rule is about overrides.
    assert rules["test_api_version_stands_in_the_class_itself_and_is_served"]["holds"]


@pytest.mark.nightly
@pytest.mark.usefixtures("acme")
def test_a_verdict_names_the_package_and_counts_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("acme-check:children", "--options", "{depth = 1}", "--group", "policies") == 0
    *ran, _, line = capsys.readouterr().out.strip().splitlines()
    prefix, _, counts = line.partition(": ")
    assert prefix == "acme-check 1.0 children of polyshard.policies"
    held, _, rest = counts.partition(" of ")
    assert rest.startswith(f"{held} rules hold on cpu")
    assert [line.startswith("holds ") for line in ran].count(True) == int(held) > 5
    assert "holds          api version stands in the class itself and is served" in ran
    assert check("acme-check:children", "--options", '{depth = 1, setting = "presicion"}') == 1
    out = capsys.readouterr().out
    assert "\ndoes not hold on cpu: " in out
    assert "presicion" in out
    assert f" of {held} rules hold" in out


@pytest.mark.nightly
@pytest.mark.usefixtures("acme")
def test_a_plugin_that_ends_the_process_is_caught_at_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("children", "--options", "{depth = 0}") == 1
    out = capsys.readouterr().out
    assert "does not hold on cpu: " in out
    assert "the suite's process ended with 7; rules that come later were not tried" in out


DISK = """
import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import OffloadCapabilities, OffloadManager

class Disk(OffloadManager):
    api_version = 1
    capabilities = OffloadCapabilities(offloads=True)

    def __init__(self, context, folder):
        if folder == "":
            raise ConfigError("folder is empty; name one")
        if folder == "nowhere":
            raise SystemExit("no licence")

    def place(self, unit, shard):
        return shard.clone()

    def fetch(self, unit, master, own_slice):
        own_slice.copy_(master)

    def store_grad(self, unit, grad, into):
        return grad.clone() if into is None else into.add_(grad)
"""


@pytest.fixture
def disk(site: Path) -> None:
    install(site, "acme-disk", "1.0", [(OFFLOAD, "disk", "acme_check_disk:Disk")], {"acme_check_disk": DISK})


@pytest.mark.usefixtures("disk")
def test_a_missing_option_is_told_by_name_and_how_to_give_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("disk") == 2
    assert capsys.readouterr().err == (
        "polyshard: plugin 'disk' of polyshard.offload (from acme-disk 1.0) needs the option 'folder': "
        "give --options '{folder = ...}'\n"
    )


@pytest.mark.nightly
@pytest.mark.usefixtures("disk")
def test_a_plugin_that_cannot_be_made_is_unusable(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("disk", "--options", '{folder = ""}') == 2
    out = capsys.readouterr().out
    assert out.startswith("acme-disk 1.0 disk of polyshard.offload: unusable\n")
    assert "ConfigError: folder is empty; name one" in out
    assert check("disk", "--options", '{folder = "nowhere"}', "--json") == 2
    record = json.loads(capsys.readouterr().out)
    assert record["state"] == "unusable"
    assert "SystemExit: no licence" in record["error"]
    assert check("disk", "--options", '{folder = "."}') == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("{folder", "--options '{folder' is no inline table of TOML, such as '{folder = \".\"}'"),
        ('"."', "is no inline table of TOML"),
        ('{foldr = "."}', "needs the option 'folder'"),
        ('{folder = ".", size = 3}', "does not take the option 'size'"),
    ],
)
@pytest.mark.usefixtures("disk")
def test_wrong_options_are_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert check("disk", "--options", options) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonee",), "no installed plugin of any group is named 'nonee'. Did you mean 'none'?"),
        (("none",), "2 groups have a plugin named 'none': say --group precision or --group offload."),
        (("bf16", "--group", "offload"), "no installed plugin of polyshard.offload is named 'bf16'"),
        (("bf16", "--group", "policy"), "no plugin group is named 'policy'. Did you mean 'policies'?"),
        (("fake", "--suite", "{world_size = [3]}"), "has no attribute 'world_size'. Did you mean 'world_sizes'?"),
        (("bf16", "--model", "torch.nn:Linear"), "--model is for policies"),
        (("bf16", "--timeout", "0"), "--timeout 0 is no time for a suite; give a positive number of seconds"),
        (("acme-none:bf16",), "no installed plugin of any group is named 'acme-none:bf16'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_can(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert check(*arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "source", "state", "words"),
    [
        ("acme_check_torn", "import sys\nsys.exit('no licence')", "broken", "SystemExit: no licence"),
        ("acme_check_old", POLICY.replace("api_version = 1", "api_version = 0"), "incompatible", "version 0"),
        ("acme_check_less", POLICY.replace("root, context", "root"), "incomplete", "it does not take 'context'"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named_with_its_state(
    site: Path, capsys: pytest.CaptureFixture[str], module: str, source: str, state: str, words: str
) -> None:
    install(site, module, "1.0", [(POLICIES, module, f"{module}:Mine")], {module: source})
    assert check(module, "--json") == 2
    record = json.loads(capsys.readouterr().out)
    assert (record["group"], record["name"], record["state"], record["rules"]) == (POLICIES, module, state, [])
    assert words in record["error"]
    assert check(module) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"{module} of polyshard.policies: {state}\n")
    assert words in out


def test_a_missing_pytest_is_named_with_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert check("bf16") == 2
    assert "pytest, which is not installed here: pip install pytest" in capsys.readouterr().err


@pytest.mark.nightly
def test_listing_and_help_do_not_load_pytest() -> None:
    program = (
        "import sys; from polyshard_tools.cli import main; main(['plugins', 'list', 'policies']); "
        "assert 'pytest' not in sys.modules and 'polyshard_testing' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


RANKS = """
import os
import time
from polyshard_backends.gloo import GlooCollectives

class Slow(GlooCollectives):
    api_version = 1

    def __init__(self, context, does="nothing"):
        super().__init__(context)
        self.does = does

    def broadcast(self, tensor, src):
        if self.does == "dies" and self.rank == 0 and self.world_size > 1:
            os._exit(9)
        if self.does == "hangs":
            time.sleep(60)
        return super().broadcast(tensor, src)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("does", "words"),
    [("dies", "rank 0 of 2 died with exit code 9"), ("hangs", "had not returned after")],
)
def test_ranks_that_die_or_hang_are_one_rule_that_does_not_hold(
    site: Path, capsys: pytest.CaptureFixture[str], does: str, words: str
) -> None:
    install(site, "acme-slow", "1.0", [(COLLECTIVES, "slow", "acme_check_slow:Slow")], {"acme_check_slow": RANKS})
    suite = "{world_sizes = [1, 2], timeout_s = 5.0}"
    assert check("slow", "--options", f'{{does = "{does}"}}', "--suite", suite, "--json") == 1
    rules = {rule["name"]: rule for rule in json.loads(capsys.readouterr().out)["rules"]}
    assert [name for name, rule in rules.items() if rule["failures"]] == ["test_broadcast_reaches_every_rank"]
    assert words in rules["test_broadcast_reaches_every_rank"]["failures"][0]["message"]


@pytest.mark.nightly
def test_a_suite_that_does_not_end_is_ended(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "acme-slow", "1.0", [(COLLECTIVES, "slow", "acme_check_slow:Slow")], {"acme_check_slow": RANKS})
    arguments = ("--options", '{does = "hangs"}', "--suite", "{world_sizes = [1]}", "--timeout", "25")
    assert check("slow", *arguments) == 1
    out = capsys.readouterr().out
    assert "does not hold on cpu: broadcast reaches every rank" in out
    assert "the suite had not ended after 25 s; rules that come later were not tried" in out
