# PYTHON_ARGCOMPLETE_OK
"""The command ``polyshard``: one module for each of its commands, and ``main``, which puts them together."""

from __future__ import annotations

from .main import main

__all__ = ["main"]
