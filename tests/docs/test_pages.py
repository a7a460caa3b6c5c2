"""What the pages say is run: their Python, their commands, their links.

[Note: how a page is run]
Blocks run in the order of the page, in an empty folder that is the working directory and on the path:

- A line that holds nothing but a file's name in backticks names the block below it: the block is written to that file.
  A ``pyproject.toml`` written so is installed, as far as its name, version and entry points go; so is that of a folder
  that ``pip install`` names, with its modules. A file of a folder in ``examples/`` is shown as it is there.
- Other ``python`` blocks run, all those of a page in one namespace. ``net.py`` of ``docs/sharding.md`` is there for
  pages that import it.
- In ``console`` blocks the lines after ``$`` run where they start with ``polyshard``, ``python`` or ``torchrun``, whose
  options torchrun's own parser reads. Lines below a command must be in what it prints, in this order, blanks aside;
  ``...`` stands for any lines. Numbers with a decimal point, which machines round differently, may be off by a
  twentieth.
"""

from __future__ import annotations

import dataclasses
import html
import inspect
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard
import polyshard.checkpoint
import polyshard.errors
import pytest
from fake_distribution import install
from polyshard import errors, hookspecs
from polyshard.interfaces import WrapPolicy
from polyshard_testing import PolicySuite, plugin_context
from polyshard_tools.cli import main as polyshard_command
from processes import run_script
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]

#: The page that shows ``net.py``, the model of the guides.
MODEL_PAGE = ROOT / "docs" / "sharding.md"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^```([\w{}-]*)[^\n`]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_NAMED = re.compile(r"^`([\w./-]+)`$")

_LINK = re.compile(r"\]\(([^)\s]+)\)")

_DECIMAL = re.compile(r"-?\d+\.\d+")


@dataclasses.dataclass(frozen=True)
class Snippet:
    """One fenced block of a page."""

    language: str
    text: str
    line: int
    """Number of the block's first line in the page, from 1."""
    file: str | None
    """The file that it stands for."""


def snippets(page: Path) -> Iterator[Snippet]:
    """The fenced blocks of ``page``, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        above = text[: match.start()].rstrip().rpartition("\n")[2]
        named = _NAMED.match(above)
        yield Snippet(match[1], match[2], text.count("\n", 0, match.start(2)) + 1, named[1] if named else None)


def _identify(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_other_plugins: None) -> Iterator[Path]:
    """The working directory of a page. Nothing that was imported from it, or is logged into it, stays."""
    for variable in [name for name in os.environ if name.startswith("POLYSHARD_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for logger in [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]:
        for handler in logger.handlers[:]:
            if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).is_relative_to(tmp_path):
                logger.removeHandler(handler)
                handler.close()
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        places = [origin, *getattr(sys.modules[name], "__path__", [])]
        if any(Path(place).is_relative_to(tmp_path) for place in places if place):
            del sys.modules[name]


#: They take longest; tests/examples/test_acme.py, tests/tools (plans), tests/meshes, tests/pipelining,
#: tests/huggingface and tests/integrations try the same.
_RARE = {*("plugins.md", "plan.md", "parallel.md"), *("accelerate.md", "weights.md", "lightning.md", "transformers.md")}

#: More than half a second, without programs.
_SLOW = {"checkpoints.md", "training.md", "watching.md", "optimizers.md"}


def _marks(page: Path) -> tuple[pytest.MarkDecorator, ...]:
    """Of pages that start programs, or compute for long."""
    if page.name in _RARE:
        return (pytest.mark.nightly, pytest.mark.timeout(140))
    starts = re.search(r"^\$ (torchrun|python) ", page.read_text(encoding="utf-8"), re.MULTILINE) is not None
    return (pytest.mark.slow,) if starts or page.name in _SLOW else ()


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=_identify(page), marks=_marks(page)) for page in PAGES])
def test_page_runs(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A module of its own: classes made in a page are looked up by the name of theirs.
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if "\nfrom net import " in page.read_text(encoding="utf-8"):
        _write(next(snippet for snippet in snippets(MODEL_PAGE) if snippet.file == "net.py"), folder)
    for snippet in snippets(page):
        if snippet.file is not None:
            _write(snippet, folder)
        elif snippet.language == "python":
            # Blank lines in front, so that a traceback shows the line of the page.
            source = "\n" * (snippet.line - 1) + snippet.text
            exec(compile(source, str(page), "exec"), module.__dict__)
        elif snippet.language == "console":
            for installed in re.findall(r"^\$ pip install .*?(?:\./)(\w+)", snippet.text, re.MULTILINE):
                _install(folder / installed, folder)
                monkeypatch.syspath_prepend(folder / installed / "src")
            _run_console(snippet, page, folder, capsys)


def _write(snippet: Snippet, folder: Path) -> None:
    assert snippet.file is not None
    path = folder / snippet.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(snippet.text, encoding="utf-8")
    if path.name == "pyproject.toml" and not _of_example(snippet):
        _install(path.parent, folder)


def _install(package: Path, site: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry_points = [
        (group, name, value)
        for group, names in project.get("entry-points", {}).items()
        for name, value in names.items()
    ]
    install(site, project["name"], project["version"], entry_points)


def _of_example(snippet: Snippet) -> bool:
    return (ROOT / "examples" / (snippet.file or "").partition("/")[0]).is_dir() and snippet.file is not None


@pytest.mark.parametrize("page", PAGES, ids=_identify)
def test_files_of_examples_are_shown_as_they_are(page: Path) -> None:
    for snippet in filter(_of_example, snippets(page)):
        assert snippet.file is not None
        assert snippet.text == (ROOT / "examples" / snippet.file).read_text(encoding="utf-8"), snippet.file


def _run_console(snippet: Snippet, page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torchrun = get_args_parser()
    for block in re.split(r"^\$ ", snippet.text, flags=re.MULTILINE)[1:]:
        command, *shown = block.splitlines()
        where = f"{_identify(page)}, line {snippet.line}: {command}"
        words = shlex.split(command, comments=True)
        if words[0] == "polyshard":
            capsys.readouterr()
            status = polyshard_command(words[1:])
            printed = "".join(capsys.readouterr())
        elif words[0] == "torchrun":
            launch = torchrun.parse_args(words[1:])
            script, arguments = folder / launch.training_script, launch.training_script_args
            status, printed = _run_script(int(launch.nproc_per_node), script, arguments)
        elif words[:3] == ["python", "-m", "pytest"]:
            done = subprocess.run(
                [sys.executable, *words[1:], "-p", "no:cacheprovider"],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
                },
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            status, printed = done.returncode, done.stdout + done.stderr
        elif words[0] == "python":
            status, printed = _run_script(0, folder / words[1], words[2:])
        else:
            continue
        assert status == 0, f"{where}\n{printed}"
        lines = iter(printed.splitlines())
        for wanted in shown:
            found = wanted in ("", "...") or any(_prints(line, wanted) for line in lines)
            assert found, f"{where}\ndoes not print {wanted!r}, but\n{printed}"


def _run_script(ranks: int, script: Path, arguments: list[str]) -> tuple[int, str]:
    done = run_script(ranks, script, arguments)
    return next((code for code in done.codes if code), 0), done.output + done.errors


def _prints(line: str, wanted: str) -> bool:
    """Whether ``line`` is what the page shows as ``wanted``."""
    words, expected = line.split(), wanted.split()
    return len(words) == len(expected) and all(
        float(word) == pytest.approx(float(like), rel=0.05)
        if _DECIMAL.fullmatch(word) and _DECIMAL.fullmatch(like)
        else word == like
        for word, like in zip(words, expected, strict=True)
    )


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", *sorted(ROOT.glob("examples/*/*.md"))], ids=_identify)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in _LINK.findall(prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{_identify(page)} links to {target}"
        if anchor:
            assert anchor in _anchors(file), f"{_identify(page)} links to {target}, which has no such heading"


def _anchors(page: Path) -> set[str]:
    """The anchors that a forge makes of the headings of ``page``."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_setting_and_strategy_is_in_the_tables() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (?:All settings|Strategies)$.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    rows = {row for section in sections for row in re.findall(r"^\| `(\w+)`", section, re.MULTILINE)}
    settings = {field.name for field in dataclasses.fields(polyshard.ShardConfig)}
    assert rows == settings | {strategy.value for strategy in polyshard.Strategy}


def test_the_tree_of_errors_is_the_tree_of_classes() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^([│ ]*[├└]──) (\w+)(?: \((\w+)\))?", text, re.MULTILINE)
    raised = {name for name in errors.__all__ if name[0].isupper() and name != "PolyshardDeprecationWarning"}
    assert {name for _, name, _ in drawn} == raised - {"PolyshardError"}
    parent = errors.PolyshardError
    for branch, name, built_in in drawn:
        error = getattr(errors, name)
        assert issubclass(error, errors.PolyshardError if len(branch) == 3 else parent), name
        if len(branch) == 3:
            parent = error
        if built_in:
            assert built_in in [base.__name__ for base in error.__bases__], name


def test_the_architecture_page_shows_todays_rooms_and_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_rooms

    picture = (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8")
    shown = re.search(r"<dc:description>(.*?)</dc:description>", picture, re.DOTALL)
    assert shown is not None
    assert json.loads(html.unescape(shown[1])) == draw_rooms.imports(), "run docs/draw_rooms.py"
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"^\| room \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    named = [room for cell in re.findall(r"^\| ([\w, ]+) \|", rows, re.MULTILINE)[1:] for room in cell.split(", ")]
    assert named == list(draw_rooms.ROOMS)
    places = {room: index for index, room in enumerate(draw_rooms.ROOMS)}
    back = [
        pair for pair in draw_rooms.imports() for above, below in [pair.split(" > ")] if places[below] < places[above]
    ]
    assert back == [], "a room imports a room above it"
    del sys.modules["draw_rooms"]


#: Every hook, with its arguments: a listener written against these goes on working.
HOOKS = {
    "before_shard": ["model", "config"],
    "after_shard": ["model"],
    "on_save": ["model", "path"],
    "on_load": ["model", "path"],
    "on_progress": ["model", "work", "done", "total"],
    "on_replicas": ["model", "before", "now"],
    "step_begin": ["model"],
    "step_end": ["model"],
    "make_observer": ["unit"],
}


def test_there_are_these_hooks_and_no_others() -> None:
    # What pluggy finds is what a listener's methods are compared with.
    found = {name: each for name, each in vars(hookspecs).items() if hasattr(each, "polyshard_spec")}
    assert {name: list(inspect.signature(each).parameters) for name, each in found.items()} == HOOKS


# The plugin that the README shows, held to the contract that `polyshard new` tests.

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


class TestWideLinear(PolicySuite):
    def make(self) -> WrapPolicy:
        (shown,) = [
            text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class WideLinear" in text
        ]
        names: dict[str, Any] = {"__name__": "shown"}
        exec(shown, names)
        made: WrapPolicy = names["WideLinear"](plugin_context())
        return made
