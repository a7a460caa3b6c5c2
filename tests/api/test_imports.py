"""What an import brings with it, in an interpreter that has imported nothing yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
from fake_distribution import install
from polyshard import ShardConfig, errors
from torch import nn

#: A fresh interpreter runs these one after another: what one must not import, those before it must not either.
STATEMENTS = (
    "import polyshard",
    "import polyshard_tools.cli",
    "import polyshard.__main__",
    "from polyshard.registry import resolve; from polyshard.interfaces import Group; resolve(Group.PRECISION, 'bf16')",
    "polyshard.shard(torch.nn.Linear(2, 2), polyshard.ShardConfig(collectives={'name': 'fake', 'world_size': 2}))",
    "import polyshard_plugins.trace",
)

#: Packages that are installed beside; one in so many offers plugins, some under names that the default settings use.
CROWD, WITH_PLUGINS = 300, 3

_NAMES = {
    "collectives": "fake",
    "precision": "none",
    "offload": "none",
    "policies": "never",
    "plugins": "trace",
}


def crowd(site: Path) -> None:
    """Packages of which nobody asks for anything; importing a plugin of theirs fails."""
    for number in range(CROWD):
        offers = [("console_scripts", f"crowd{number}", f"crowd_{number}:main")]
        if not number % WITH_PLUGINS:
            offers += [(f"polyshard.{group}", f"crowd{number}", f"crowd_{number}:P") for group in _NAMES]
        modules = {f"crowd_{number}": "raise RuntimeError('nobody named this plugin')"}
        if not number % 100:
            offers += [(f"polyshard.{group}", name, f"crowd_{number}:P") for group, name in _NAMES.items()]
        install(site, f"crowd-{number}", "1.0", offers, modules)


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_used(tmp_path: Path) -> None:
    crowd(tmp_path)
    # In front of what is installed, where it would win if order told.
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    code = "import json, sys, torch\n"
    for statement in STATEMENTS:
        code += f"{statement}\nprint(json.dumps(sorted(sys.modules)))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    *core, resolved, sharded, traced = (set(json.loads(line)) for line in done.stdout.splitlines())
    assert len(core) == 3
    # A plugin package or a configuration alone needs no engine.
    assert {name for name in core[0] if name.startswith("polyshard.runtime")} == set()
    # Of 300 packages beside, which share names with built-in plugins, nothing is imported.
    assert "polyshard.runtime.root" in sharded
    assert {name for name in traced if name.startswith("crowd_")} == set()
    for modules in core:
        # Core imports no plugin and no test tool.
        assert "polyshard" in modules
        rooms = ("polyshard_backends", "polyshard_policies", "polyshard_plugins", "polyshard_fsdp")
        assert {name for name in modules if name.startswith(rooms)} == set()
        assert "pytest" not in modules
        assert "polyshard_testing" not in modules
    # One plugin brings its package alone.
    assert "polyshard_plugins.precision" in resolved
    others = ("polyshard_backends", "polyshard_policies")
    assert not {name for name in resolved if name.startswith(others)}
    # What draws is imported when something is drawn.
    assert "polyshard_plugins.trace" in traced
    assert "matplotlib" not in traced


def sharded(**settings: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = ShardConfig(collectives={"name": "fake", "world_size": 4}, policy="always", **settings)
    return polyshard.shard(model, config)


@pytest.mark.parametrize("call", [lambda m: polyshard.no_sync(m).__enter__(), polyshard.report, polyshard.close])
def test_calls_on_an_inner_module(call: Callable[[Any], Any]) -> None:
    model = sharded()
    with pytest.raises(
        errors.StateError, match=r"needs the outermost sharded module, but was given the inner one '1' .*rank 0"
    ) as caught:
        call(model[1])
    assert "FSDP" not in str(caught.value)
