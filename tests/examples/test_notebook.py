"""The notebook: its form, and that it prints what its file shows."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from notebooks import code_cells, printed, run_cells

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").rglob("*.ipynb"))
_DECIMAL = re.compile(r"-?\d+\.\d+")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_form_is_that_of_notebooks(path: Path) -> None:
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    for cell in notebook["cells"]:
        common = {"cell_type", "id", "metadata", "source"}
        assert set(cell) == (common if cell["cell_type"] == "markdown" else common | {"execution_count", "outputs"})
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"])
    for number, cell in enumerate(code_cells(notebook), 1):
        assert cell["execution_count"] == number
        for output in cell["outputs"]:
            assert output == {"name": "stdout", "output_type": "stream", "text": output["text"]}
    if importlib.util.find_spec("nbformat"):
        import nbformat

        nbformat.validate(notebook)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_links_lead_to_files(path: Path) -> None:
    prose = "".join(line for cell in read(path)["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    links = re.findall(r"\]\(([^)#]+)", prose)
    assert links
    for link in links:
        assert (path.parent / link).exists(), link


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_prints_what_it_shows(path: Path) -> None:
    notebook = read(path)
    told = "run tests/support/notebooks.py"
    for cell, text in zip(code_cells(notebook), run_cells(notebook), strict=True):
        # Digits behind the point are the machine's.
        assert _DECIMAL.sub("#", text) == _DECIMAL.sub("#", printed(cell)), told
        found, shown = ([float(number) for number in _DECIMAL.findall(each)] for each in (text, printed(cell)))
        assert found == pytest.approx(shown, rel=0.02), told
