"""Writes packages of plugins: what ``polyshard new`` does."""

from __future__ import annotations

from .package import Kind, Written, write_plugin

__all__ = ["Kind", "Written", "write_plugin"]
