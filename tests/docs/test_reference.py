"""The API reference: every public name is in it, and its docstrings are read as they are meant."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from processes import run_script
from sphinx.util.inventory import InventoryFile

ROOT = Path(__file__).parents[2]
SOURCES = ("core", "backends", "policies", "plugins", "faces", "integrations", "tools", "testing")
#: Modules by the page of the reference that has their names.
PAGES = {
    "polyshard": "polyshard",
    "interfaces": "polyshard.interfaces",
    "errors": "polyshard.errors",
    "state": "polyshard.state",
    "pipelining": "polyshard.pipelining",
    "forecast": "polyshard_tools.forecast",
}


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(tmp_path: Path) -> None:
    pages, site = tmp_path / "pages", tmp_path / "site"
    pages.mkdir()
    for page in PAGES:
        (pages / f"{page}.rst").write_text((ROOT / "docs/api" / f"{page}.rst").read_text())
    (pages / "index.rst").write_text("All\n===\n\n.. toctree::\n" + "".join(f"\n   {page}" for page in PAGES))
    # As `make docs`, without the other pages and their tools.
    changes = (
        "extensions=sphinx.ext.autodoc,sphinx.ext.napoleon",
        "html_theme=basic",
        "nitpicky=0",
        "html_use_index=0",
    )
    options = ["-q", "-c", f"{ROOT / 'docs'}", *(word for each in changes for word in ("-D", each))]
    # Forked from a process that has imported torch.
    script = tmp_path / "build.py"
    script.write_text("import sys\nfrom sphinx.cmd.build import main\n\nsys.exit(main(sys.argv[1:]))\n")
    done = run_script(0, script, [*options, f"{pages}", f"{site}"], timeout=200.0)
    assert done.codes == [0], done.errors
    found = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    known = {name for kind, those in found.items() if kind.startswith("py:") for name in those}
    for page, module in PAGES.items():
        assert {f"{module}.{name}" for name in importlib.import_module(module).__all__} <= known
        # For whoever changes the code.
        assert "[Note" not in (site / f"{page}.html").read_text()


def test_a_section_of_errors_has_errors_alone() -> None:
    wrong, number = [], 0
    for file in (file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")):
        for section in re.finditer(r"^( *)Raises:\n((?:\1 +\S.*\n|\n)*)", file.read_text(), re.MULTILINE):
            lines = [line for line in section[2].splitlines() if line]
            margin = min(len(line) - len(line.lstrip()) for line in lines)
            for line in (line for line in lines if line[margin] != " "):
                number += 1
                # Anything else is shown as the name of an exception.
                if not re.match(r" +[\w.]+(, [\w.]+)*: \S", line):
                    wrong.append(f"{file.name}: {line.strip()}")
    assert not wrong
    assert number > 200
