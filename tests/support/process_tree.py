"""Ending a program with all that it started."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

import psutil


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill ``process`` and its descendants, parents first; torchrun's ranks are in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        program = psutil.Process(process.pid)
        for each in [program, *program.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
