"""The page on compatibility says what the code and the package's metadata say."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import warnings
from pathlib import Path

import polyshard
import polyshard_accelerate.saved_state as accelerate_state
import pytest
import release
from polyshard import errors
from polyshard.checkpoint import manifest
from polyshard.errors import PolyshardDeprecationWarning, deprecation
from polyshard.interfaces import CURRENT_API, OLDEST_API, Group
from polyshard_plugins import trace_step

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The table below ``heading``: other cells by the first."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)]
    return {first: others for first, *others in cells[2:]}


def test_versions_of_contracts_are_those_that_are_served() -> None:
    served = {group.value: [str(OLDEST_API[group]), str(CURRENT_API[group])] for group in Group}
    assert {name.strip("`"): cells for name, cells in rows("Contracts of plugins").items()} == served


def test_every_module_is_public_or_inner() -> None:
    public = {name for cell in rows("Public names") for name in re.findall(r"`([\w.]+)`", cell)}
    for name in public:
        # Read, not imported: the trainers' modules bring the trainers.
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        assert ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))), name
    (inner,) = re.findall(r"^Inner, and changed without notice.*?\n\n", TEXT, re.MULTILINE | re.DOTALL)
    hidden = set(re.findall(r"`(\w+)`", inner)) - {"polyshard"}
    folder = ROOT / "core" / "polyshard"
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    shown = {name.removeprefix("polyshard.") for name in public if name.startswith("polyshard.")}
    assert not shown & hidden
    assert shown | hidden == {name for name in modules if not name.startswith("_")}


def test_formats_of_files_are_those_that_are_written_and_read() -> None:
    told = {re.sub(r"`", "", name): cells for name, cells in rows("Files").items()}
    assert told["checkpoints of polyshard.checkpoint"] == [str(manifest.FORMAT), ", ".join(map(str, manifest.READ))]
    assert told["state of polyshard_accelerate"] == [str(accelerate_state._FORMAT)] * 2
    assert told["traces of the listener trace"] == [str(trace_step.FORMAT)] * 2


def test_a_deprecation_is_seen_where_it_is_used() -> None:
    def gone_soon() -> None:
        text = deprecation("gone_soon()", since="0.4", gone="0.5", instead="Call here_to_stay() instead")
        warnings.warn(text, PolyshardDeprecationWarning, stacklevel=2)

    with pytest.warns(PolyshardDeprecationWarning) as caught:
        gone_soon()
    (warning,) = caught
    assert warning.filename == __file__
    words = "gone_soon() is deprecated since polyshard 0.4 and will be gone in 0.5. Call here_to_stay() instead."
    assert str(warning.message) == words
    # Python's own filters hide a DeprecationWarning out of any other module than the script.
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        for action, category in (("default", FutureWarning), ("ignore", DeprecationWarning)):
            warnings.simplefilter(action, category)  # type: ignore[arg-type]
        gone_soon()
    assert len(shown) == 1


def test_names_that_are_imported_late_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(polyshard.__all__) <= set(dir(polyshard))
    for name in polyshard.__all__:
        assert getattr(polyshard, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'shrad'"):
        polyshard.shrad  # type: ignore[attr-defined]  # noqa: B018
    monkeypatch.delattr(polyshard, "optim", raising=False)
    # A public module, too, by whoever has imported polyshard alone.
    assert polyshard.optim.__name__ == "polyshard.optim"
    assert set(errors.__all__) <= set(dir(errors))
    assert importlib.metadata.version("polyshard") == polyshard.__version__


# The version stands wherever a release looks for it.


def test_this_version_stands_everywhere() -> None:
    assert release.misnamed(Path(__file__).parents[2]) == []
