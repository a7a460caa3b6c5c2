"""The API reference: every public name is in it, and its docstrings are read as they are meant."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from processes import run_script
from sphinx.util.inventory import InventoryFile

ROOT = Path(__file__).parents[2]
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
