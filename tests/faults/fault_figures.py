"""What the faults came to, written down for ``figures.md``."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "faults"


def record(name: str, **figures: object) -> None:
    """Write ``build/faults/<name>.json``: ``figures``, and on what they were taken."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    told = {
        "figures": figures,
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
