from __future__ import annotations

import json
import subprocess
import sys

import pytest


def modules_after(statement: str) -> set[str]:
    """What a fresh interpreter has imported after ``statement``."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("statement", ["import polyshard", "import polyshard.cli", "import polyshard.__main__"])
def test_importing_core_imports_no_plugin_and_no_test_tool(statement: str) -> None:
    modules = modules_after(statement)
    assert "polyshard" in modules
    plugins = {name for name in modules if name.startswith("polyshard_")}
    assert plugins == set()
    assert "pytest" not in modules
    assert "polyshard.testing" not in modules


def test_looking_up_one_plugin_imports_its_package_alone() -> None:
    modules = modules_after(
        "from polyshard.catalog import resolve\n"
        "from polyshard.interfaces import Group\n"
        "resolve(Group.PRECISION, 'bf16')"
    )
    assert "polyshard_plugins.precision" in modules
    assert not {
        name for name in modules if name.startswith(("polyshard_backends", "polyshard_policies", "polyshard_layouts"))
    }
