"""`polyshard new` writes plugins that work under any name, and adds to packages; where it cannot, it writes nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from fake_distribution import install
from packaging.requirements import Requirement
from polyshard import interfaces, registry
from polyshard.interfaces import Group
from polyshard_testing import plugin_context
from polyshard_tools.cli import main

#: What a configuration expects of each kind, and its entry-point group.
KINDS = {
    "collectives": (Group.COLLECTIVES, interfaces.CollectivesDecorator),
    "backend": (Group.COLLECTIVES, interfaces.Collectives),
    "precision": (Group.PRECISION, interfaces.PrecisionPlugin),
    "offload": (Group.OFFLOAD, interfaces.OffloadManager),
    "policy": (Group.POLICIES, interfaces.WrapPolicy),
    "listener": (Group.PLUGINS, interfaces.Listener),
}

#: A package that somebody else laid out, with entry points of others.
FOREIGN = """\
# Ours.
[project]
name = "quarry-tools"
version = "3.0"
dependencies = [
    "polyshard",  # see [the docs]
]

[project.entry-points."pytest11"]
quarry = "quarry_tools.testing"

[ project.entry-points.'polyshard.offload' ]  # where it lies
pit = "quarry_tools.pits:Pit"

# What follows is for the tools.
[tool.ruff]
line-length = 100
"""


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def entry_points(pyproject: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = tomllib.loads(pyproject.read_text())["project"]["entry-points"]
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def foreign(here: Path) -> Path:
    package = here / "tools"
    (package / "quarry_tools").mkdir(parents=True)
    (package / "quarry_tools" / "__init__.py").touch()
    (package / "pyproject.toml").write_text(FOREIGN)
    return package


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said where the command refuses."""
    assert main(["new", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_a_plugin_of_each_kind_is_constructed_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        assert main(["new", kind, f"slate_{kind}", "--into", "polyshard.Slate-9"]) == 0
    package = here / "polyshard.Slate-9"
    offered = entry_points(package / "pyproject.toml")
    listed = [(group, name, value) for group, named in offered.items() for name, value in named.items()]
    assert len(listed) == len(KINDS)
    install(here / "site", "polyshard.Slate-9", "0.1.0", listed)
    monkeypatch.syspath_prepend(package / "src")
    monkeypatch.syspath_prepend(here / "site")
    try:
        for kind, (group, contract) in KINDS.items():
            choice = {"name": f"polyshard.Slate-9:slate_{kind}"} | ({"inner": "fake"} if kind == "collectives" else {})
            plugin = plugin_context().construct(group, choice)
            assert isinstance(plugin, contract)
            assert type(plugin).__qualname__ == f"Slate{kind.capitalize()}"
            (state,) = [each.state for each in registry.installed(group) if each.name == f"slate_{kind}"]
            assert state is registry.PluginState.READY
            test = (package / "tests" / f"test_slate_{kind}.py").read_text()
            compile(test, "test", "exec")
            assert f"class TestSlate{kind.capitalize()}(" in test
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "polyshard_slate_9"]:
            del sys.modules[name]


def test_what_was_written_and_what_comes_next_are_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "policy", "by_depth"]) == 0
    printed = capsys.readouterr().out
    package = here / "polyshard-by-depth"
    written = [line.split()[1] for line in printed.splitlines() if line.startswith("wrote")]
    assert {here / name for name in written} == {path for path in package.rglob("*") if path.is_file()}
    assert "pip install --editable './polyshard-by-depth[test]'" in printed
    assert "polyshard plugins check polyshard-by-depth:by_depth" in printed
    assert 'policy = "by_depth"' in printed
    # What is left to be written is marked.
    text = (package / "pyproject.toml").read_text()
    assert re.findall(r"TODO: (\w+)", text) == ["what", "license", "authors", "where"]
    assert main(["new", "backend", "slate", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    package = here / told["folder"]
    assert {package / name for name in told["added"]} == {path for path in package.rglob("*") if path.is_file()}
    assert (told["setting"], told["missing"]) == ('collectives = "slate"', ["license", "authors", "LICENSE"])


@pytest.mark.slow
def test_a_new_package_is_built_as_an_index_takes_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whose = ("--author", 'Ada Q. "Quarry" <ada@quarry.example>', "--license", "MIT OR Apache-2.0")
    assert main(["new", "collectives", "slate", *whose]) == 0
    assert "Before it is published, it needs: LICENSE\n" in capsys.readouterr().out
    run("build", "--no-isolation", "--outdir", "dist", "polyshard-slate")
    run("twine", "check", "--strict", *map(str, (here / "dist").iterdir()))
    (wheel,) = (here / "dist").glob("*.whl")
    metadata = importlib.metadata.PathDistribution(zipfile.Path(wheel, "polyshard_slate-0.1.0.dist-info/")).metadata
    assert metadata["Author-email"] == '"Ada Q. \\"Quarry\\"" <ada@quarry.example>'
    assert metadata["License-Expression"] == "MIT OR Apache-2.0"
    workflow = yaml.safe_load((here / "polyshard-slate" / ".github" / "workflows" / "test.yml").read_text())
    prefix = "Programming Language :: Python :: "
    named = [each.removeprefix(prefix) for each in metadata.get_all("Classifier") or [] if each.startswith(prefix)]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == named
    needs = {each.name: each for each in map(Requirement, metadata.get_all("Requires-Dist") or [])}
    for package in ("polyshard", "torch"):
        assert importlib.metadata.version(package).partition("+")[0] in needs[package].specifier
    major, minor, *_ = importlib.metadata.version("polyshard").split(".")
    assert f"{major}.{int(minor) + 1}" not in needs["polyshard"].specifier


def run(module: str, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("licence", ["Apache-2.0", "BSD-3-Clause", "MIT"])
def test_a_common_licence_is_written_with_its_holder(
    licence: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "policy", "slate", "--author", "Ada <ada@quarry.example>", "--license", licence]) == 0
    assert "Before it is published" not in capsys.readouterr().out
    text = (here / "polyshard-slate" / "LICENSE").read_text()
    assert " Ada\n" in text
    assert "IS" in text


def test_a_package_that_is_there_has_its_own_author(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(foreign)
    assert "it has its own" in refusal(capsys, "policy", "veins", "--into", "tools", "--author", "Ada")
    assert tree(foreign) == before


def test_inside_of_a_package_it_gets_one_more(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "offload", "shelf"]) == 0
    package = here / "polyshard-shelf"
    before = tree(package)
    capsys.readouterr()
    monkeypatch.chdir(package)
    assert main(["new", "offload", "cellar"]) == 0
    assert "pip install --editable '.[test]'" in capsys.readouterr().out
    monkeypatch.chdir(package / "tests")
    assert main(["new", "listener", "watch"]) == 0
    assert "pip install --editable '..[test]'" in capsys.readouterr().out
    after = tree(package)
    added = {f"src/polyshard_shelf/{name}.py" for name in ("cellar", "watch")} | {
        f"tests/test_{name}.py" for name in ("cellar", "watch")
    }
    assert after.keys() - before.keys() == added
    assert {path for path in before if after[path] != before[path]} == {"README.md", "pyproject.toml"}
    assert entry_points(package / "pyproject.toml") == {
        "polyshard.offload": {"shelf": "polyshard_shelf.shelf:Shelf", "cellar": "polyshard_shelf.cellar:Cellar"},
        "polyshard.plugins": {"watch": "polyshard_shelf.watch:Watch"},
    }
    readme = after["README.md"].decode().splitlines()
    start = readme.index('- `offload = "shelf"`: `src/polyshard_shelf/shelf.py`')
    assert [line.split("`")[1] for line in readme[start : start + 3]] == [
        'offload = "shelf"',
        'offload = "cellar"',
        'listeners = ["watch"]',
    ]


def test_a_package_of_other_origin_keeps_everything_else(foreign: Path) -> None:
    for kind, name in (("offload", "shaft"), ("policy", "seams")):
        assert main(["new", kind, name, "--into", "tools"]) == 0
    text = (foreign / "pyproject.toml").read_text()
    added = [line for line in text.splitlines() if line not in FOREIGN.splitlines()]
    assert added == [
        'shaft = "quarry_tools.shaft:Shaft"',
        '[project.entry-points."polyshard.policies"]',
        'seams = "quarry_tools.seams:Seams"',
    ]
    assert [line for line in text.splitlines() if line and line not in added] == [
        line for line in FOREIGN.splitlines() if line
    ]
    assert entry_points(foreign / "pyproject.toml")["polyshard.offload"] == {
        "pit": "quarry_tools.pits:Pit",
        "shaft": "quarry_tools.shaft:Shaft",
    }
    assert (foreign / "quarry_tools" / "seams.py").is_file()
    assert (foreign / "tests" / "test_shaft.py").is_file()
    assert not (foreign / "README.md").exists()


def test_line_ends_stay_as_they_are(foreign: Path) -> None:
    (foreign / "pyproject.toml").write_bytes(FOREIGN.replace("\n", "\r\n").encode())
    assert main(["new", "policy", "veins", "--into", "tools"]) == 0
    text = (foreign / "pyproject.toml").read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n")
    assert entry_points(foreign / "pyproject.toml")["polyshard.policies"] == {"veins": "quarry_tools.veins:Veins"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("offload Tape-Drive", "Did you mean 'tape_drive'?"),
        ("offload tapeDrive", "Did you mean 'tape_drive'?"),
        ("offload 3d", "beginning with a letter"),
        ("offload ../shelf", "Did you mean 'shelf'?"),
        ("offload übung", "beginning with a letter"),
        ("offload ''", "beginning with a letter"),
        ("offload cpu", "'cpu' is a built-in plugin of polyshard.offload"),
        ("collectives nccl", "Choose another, 'my_nccl' for example"),
        ("listener lambda", "its module lambda"),
        ("listener none", "its class None"),
        ("policy wrap_policy", "its class WrapPolicy"),
        ("policy seams --into json", "would hide the module json. Choose another folder"),
        ("policy seams --into polyshard", "would hide the module polyshard"),
        ("policy seams --into pytest", "would hide the module pytest, which is installed"),
        ("policy seams --into 9lives", "does not name both a distribution and a module"),
        ("policy seams --into 'my tools'", "does not name both a distribution and a module"),
        ("policy seams --into=-tools", "does not name both a distribution and a module"),
        ("policy seams --into missing/tools", "missing is not there; make it first"),
        ("policy seams --author '<ada@quarry.example>'", "Write 'Name' or 'Name <mail@example.org>'"),
        ("policy seams --license 'Apache 2.0'", "is no SPDX expression. Write 'Apache-2.0'"),
    ],
)
def test_what_does_not_do_is_refused(
    arguments: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, *shlex.split(arguments))
    assert list(here.iterdir()) == []


def test_a_folder_that_is_no_package_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "slate").mkdir()
    (here / "slate" / "notes.txt").write_text("Keep.")
    (here / "chalk").write_text("A file.")
    before = tree(here)
    assert "slate is there already, and is no package" in refusal(capsys, "policy", "seams", "--into", "slate")
    assert "chalk is there already, and is no package" in refusal(capsys, "policy", "seams", "--into", "chalk")
    assert tree(here) == before


def test_a_plugin_that_is_there_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "policy", "seams", "--into", "slate"]) == 0
    capsys.readouterr()
    before = tree(here)
    assert "slate/src/slate/seams.py is there already" in refusal(capsys, "policy", "seams", "--into", "slate")
    assert "slate/src/slate/seams.py is there already" in refusal(capsys, "offload", "seams", "--into", "slate")
    (here / "slate" / "src" / "slate" / "seams.py").unlink()
    (here / "slate" / "tests" / "test_seams.py").unlink()
    assert "has a plugin 'seams' of polyshard.policies already" in refusal(capsys, "policy", "seams", "--into", "slate")
    assert before.keys() - tree(here).keys() == {"slate/src/slate/seams.py", "slate/tests/test_seams.py"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[project", "cannot be read"),
        ("[tool.ruff]\nline-length = 100\n", "has no name in [project]"),
        ('[project]\nname = "elsewhere"\nversion = "1"\n', "module elsewhere of the package in tools is found neither"),
        (
            '[project]\nname = "quarry-tools"\nentry-points = { "polyshard.policies" = { a = "quarry_tools:A" } }\n',
            'as [project.entry-points."polyshard.policies"] with veins = "quarry_tools.veins:Veins" below',
        ),
        (
            '[project]\nname = "quarry-tools"\nentry-points."polyshard.policies".a = "quarry_tools:A"\n',
            "in a form that polyshard does not edit",
        ),
        ('[project]\nname = "quarry-tools"\ndynamic = ["entry-points"]\n', "they are written elsewhere"),
    ],
)
def test_a_pyproject_that_cannot_be_added_to_is_left_alone(
    text: str, words: str, foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (foreign / "pyproject.toml").write_text(text)
    before = tree(foreign)
    assert words in refusal(capsys, "policy", "veins", "--into", "tools")
    assert tree(foreign) == before


def test_a_failure_half_way_leaves_nothing(foreign: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A module's file may have 255 bytes in its name; its test's would have more.
    name = "a" * 250
    before = sorted(here.rglob("*"))
    assert "Nothing was written" in refusal(capsys, "policy", name, "--into", "tools")
    assert "Nothing was written" in refusal(capsys, "policy", name, "--into", "slate")
    assert sorted(here.rglob("*")) == before
    assert (foreign / "pyproject.toml").read_text() == FOREIGN
    assert main(["new", "policy", "veins", "--into", "tools"]) == 0


def test_a_package_that_hides_nothing_may_have_the_name_of_a_folder_nearby(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "elsewhere" / "slate").mkdir(parents=True)
    monkeypatch.syspath_prepend(here / "elsewhere")
    importlib.invalidate_caches()
    assert main(["new", "policy", "veins", "--into", "slate"]) == 0
