"""Runs notebooks as plain programs, and keeps in their files what they print.

    python tests/support/notebooks.py examples/without_gpus.ipynb

Cells run in order in one fresh process, in an empty folder, so that no Jupyter is needed. Only what they print is kept,
which is the same on each machine up to rounding: no times, no addresses, no pictures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Stands between what two cells print.
_END = "\x1e\n"
_PROGRAM = """
import json, sys
names = {"__name__": "__main__"}
for number, source in enumerate(json.load(open(sys.argv[1])), 1):
    exec(compile(source, f"cell {number}", "exec"), names)
    sys.stdout.write(sys.argv[2])
    sys.stdout.flush()
"""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that run, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """What the file says that ``cell`` prints."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run_cells(notebook: dict[str, Any]) -> list[str]:
    """What each cell prints. Raises ``RuntimeError`` with the traceback where one fails or warns."""
    with tempfile.TemporaryDirectory() as folder:
        cells = Path(folder) / "cells.json"
        cells.write_text(json.dumps(["".join(cell["source"]) for cell in code_cells(notebook)]), encoding="utf-8")
        command = [sys.executable, "-W", "error", "-c", _PROGRAM, str(cells), _END]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout.split(_END)[:-1]


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
