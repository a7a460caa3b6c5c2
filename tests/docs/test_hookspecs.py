"""What ``pydoc polyshard.hookspecs`` tells an author of a listener."""

from __future__ import annotations

import inspect
import pydoc

import pytest
from polyshard import hookspecs

#: Every hook, with its arguments: a listener written against these goes on working.
HOOKS = {
    "before_shard": ["model", "config"],
    "after_shard": ["model"],
    "on_save": ["model", "path"],
    "on_load": ["model", "path"],
    "on_progress": ["model", "work", "done", "total"],
    "step_begin": ["model"],
    "step_end": ["model"],
    "make_observer": ["unit"],
}


@pytest.fixture(scope="module")
def page() -> str:
    return pydoc.render_doc(hookspecs, renderer=pydoc.plaintext)


def test_there_are_these_hooks_and_no_others() -> None:
    # What pluggy finds is what a listener's methods are compared with.
    found = {name: each for name, each in vars(hookspecs).items() if hasattr(each, "polyshard_spec")}
    assert {name: list(inspect.signature(each).parameters) for name, each in found.items()} == HOOKS


@pytest.mark.parametrize("name", HOOKS)
def test_the_page_shows_each_with_signature_and_docstring(page: str, name: str) -> None:
    hook = getattr(hookspecs, name)
    _, _, entry = page.partition(f"\n    {name}(")
    signature, _, told = entry.partition("\n")
    assert [each.partition(":")[0].strip() for each in signature.partition(")")[0].split(",")] == HOOKS[name]
    assert hook.__doc__
    first_line = inspect.getdoc(hook).splitlines()[0]
    assert told.startswith(f"        {first_line}")


def test_the_page_shows_the_marker_and_says_how_hooks_are_called(page: str) -> None:
    assert "a method becomes a hook implementation by ``@polyshard.hookimpl``" in page
    assert "hookimpl = " in page
