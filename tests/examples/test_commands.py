"""The commands of the examples' pages: files that are there, make targets, and settings that the programs take.

That the programs do what the pages say, tests of their own show: ``test_recipes.py``, ``test_moe.py``,
``test_pretrain.py``, ``test_rollout.py``, ``test_acme.py``, ``test_byte_lm.py``, ``test_notebook.py``.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import importing_from
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("examples/*/*.md"))
#: What the targets of the Makefile that train are given.
CONFIGS = {"pretrain": "examples/pretrain/llama_toy.toml", "moe": "examples/moe/mixtral_toy.toml"}
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
_COMMAND = r"(?:\w+=\S+ )?((?:torchrun|make) [^`\n]+)"


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command that starts a program of this repository."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for command in re.findall(rf"^{_COMMAND}$|`{_COMMAND}`", text, re.MULTILINE):
        yield shlex.split("".join(command), comments=True)


def require_settings(config: str, words: list[str]) -> None:
    """That ``examples/pretrain`` takes ``--set`` of ``words``."""
    with importing_from(ROOT / "examples" / "pretrain"):
        from settings import load_settings

        overrides = [value for option, value in itertools.pairwise(words) if option == "--set"]
        load_settings(ROOT / config, overrides, environ={})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "examples").as_posix())
def test_commands_name_what_is_there(page: Path) -> None:
    for words in commands(page):
        if words[0] == "make":
            assert words[1] in TARGETS, words
            (options,) = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")] or [""]
            if words[1] in CONFIGS:
                require_settings(CONFIGS[words[1]], shlex.split(options))
            continue
        launch = get_args_parser().parse_args(words[1:])
        assert (ROOT / launch.training_script).is_file(), words
        given = launch.training_script_args
        files = [word for word in given if word.endswith(".toml")]
        assert all((ROOT / file).is_file() for file in files), words
        if launch.training_script == "examples/pretrain/train.py":
            require_settings((files or [CONFIGS["pretrain"]])[0], given)


def test_every_recipe_has_a_page_a_row_and_a_test() -> None:
    folder = ROOT / "examples" / "recipes"
    table = (folder / "README.md").read_text(encoding="utf-8")
    tested = (ROOT / "tests" / "examples" / "test_recipes.py").read_text(encoding="utf-8")
    names = {file.stem for file in folder.glob("*.toml")}
    assert names == {file.stem for file in folder.glob("*.md")} - {"README"}
    for name in names:
        assert f"({name}.md)" in table
        assert f"{name}.toml" in table
        assert f'"{name}"' in tested
