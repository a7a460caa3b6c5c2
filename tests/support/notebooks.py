"""Runs notebooks as plain programs, and keeps in their files what they print.

    python tests/support/notebooks.py examples/without_gpus.ipynb

Cells run in order, in an empty folder, so that no Jupyter is needed. Only what they print is kept,
which is the same on each machine up to rounding: no times, no addresses, no pictures.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that run, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """What the file says that ``cell`` prints."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run_cells(notebook: dict[str, Any]) -> list[str]:
    """What each cell prints. Raises what one raises, or warns of."""
    # Classes look their module up by its name.
    module = ModuleType("notebook")
    sys.modules[module.__name__] = module
    texts = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, cell in enumerate(code_cells(notebook), 1):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), module.__dict__)
            texts.append(printed.getvalue())
    del sys.modules[module.__name__]
    return texts


def with_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """``notebook``, run: cells numbered, with what they print."""
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run_cells(notebook), strict=True), 1):
        cell["execution_count"] = number
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        made = with_outputs(json.loads(Path(name).read_text(encoding="utf-8")))
        Path(name).write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
