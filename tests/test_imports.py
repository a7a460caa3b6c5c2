"""What an import brings with it, in an interpreter that has imported nothing yet."""

from __future__ import annotations

import json
import subprocess
import sys

#: A fresh interpreter runs these one after another: what one must not import, those before it must not either.
STATEMENTS = (
    "import polyshard",
    "import polyshard.cli",
    "import polyshard.__main__",
    "from polyshard.catalog import resolve; from polyshard.interfaces import Group; resolve(Group.PRECISION, 'bf16')",
    "import polyshard_plugins.trace",
)


def test_nothing_is_imported_before_it_is_used() -> None:
    code = "import json, sys\n"
    for statement in STATEMENTS:
        code += f"{statement}\nprint(json.dumps(sorted(sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *core, resolved, traced = (set(json.loads(line)) for line in done.stdout.splitlines())
    assert len(core) == 3
    for modules in core:
        # Core imports no plugin and no test tool.
        assert "polyshard" in modules
        assert {name for name in modules if name.startswith("polyshard_")} == set()
        assert "pytest" not in modules
        assert "polyshard.testing" not in modules
    # One plugin brings its package alone.
    assert "polyshard_plugins.precision" in resolved
    others = ("polyshard_backends", "polyshard_policies", "polyshard_layouts")
    assert not {name for name in resolved if name.startswith(others)}
    # What draws is imported when something is drawn.
    assert "polyshard_plugins.trace" in traced
    assert "matplotlib" not in traced
