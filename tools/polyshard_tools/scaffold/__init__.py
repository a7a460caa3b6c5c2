"""Writes packages of plugins: what ``polyshard new`` does."""

from __future__ import annotations

from .package import Kind, Ownership, Written, write_plugin

__all__ = ["Kind", "Ownership", "Written", "write_plugin"]
