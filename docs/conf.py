"""Makes a site of these pages: ``make docs``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
# The checkout's modules, whatever else is installed.
_FOLDERS = ("core", "backends", "policies", "plugins", "drop_ins", "integrations", "tools", "testing")
sys.path[:0] = [str(_ROOT / folder) for folder in _FOLDERS]

from polyshard import __version__  # noqa: E402

project = "polyshard"
release = version = __version__
author = "The polyshard maintainers"
copyright = f"2026, {author}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"polyshard {version}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_style, pygments_dark_style = "default", "monokai"
highlight_language = "text"
# Prompts are not copied with what is behind them.
copybutton_prompt_text = "$ "

# Links to headings go by the names that a forge gives them.
myst_heading_anchors = 3

nitpicky = True
# What stands in signatures and is documented elsewhere: without a network, torch's and Python's own are not looked up.
# Nor are type variables, and the private base classes of public ones.
nitpick_ignore_regex = [("py:.*", r"(?!polyshard).*"), ("py:.*", r".*\.[A-Z]"), ("py:.*", r".*\._.*")]
# What functions return or take and users never name, and bases that are written down nowhere else.
_UNNAMED = (
    r"polyshard_plugins\.stand_in\.StandIn",
    r"polyshard\.(planning|runtime|functions|setup|capture)\..*",
    r"polyshard\.checkpoint\.(pending\.Notes|storage\.contract\.AnyPlace)",
    r"polyshard\.(inspect\.unit\.ShardedUnit|state\.sharded\.KeptPiece)",
    r"polyshard_lightning\.(fabric\.ShardedModule|common\.Strategy)",
    r"polyshard_tools\.forecast\.(memory|recording|timing)\..*",
    r"polyshard_testing\.(plugin|ranks)\..*",
    r"polyshard_plugins\.(block_scaled\.BlockScaled|offload\.OffloadRule|precision\.Configured)",
    r"polyshard_policies\.(division\..*|functions\.RecursivePolicy)",
)
nitpick_ignore_regex.append(("py:(class|obj)", "|".join(_UNNAMED)))

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# A class's page begins with what it is; how it is made stands in ``__init__``.
autoclass_content = "both"
napoleon_numpy_docstring = False


def _cells(notebook: dict[str, Any]) -> str:
    """The cells behind the title of ``notebook`` as Markdown, each with what it printed."""
    parts = []
    for cell in notebook["cells"][1:]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # Links are those of a file in examples/.
            parts.append(text.replace("](../docs/", "](").replace("](recipes/README.md)", "](recipes.md)"))
        else:
            printed = "".join(line for each in cell["outputs"] for line in each.get("text", []))
            parts.append(f"```python\n{text}\n```")
            parts += [f"```text\n{printed}```"] if printed else []
    return "\n\n".join(parts)


def _prepare(app: Any, page: str, source: list[str]) -> None:
    if page == "notebook":
        path = _ROOT / "examples" / "without_gpus.ipynb"
        app.env.note_dependency(path, docname=page)
        source[0] += _cells(json.loads(path.read_text(encoding="utf-8")))
    # Markdown outside of this folder is no page of the site: what links to it becomes a download.
    source[0] = re.sub(r"\]\((\.\./[\w./-]+\.md)(?:#[\w-]*)?\)", r"](path:\1)", source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _prepare)
