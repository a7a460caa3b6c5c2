"""Writes packages of plugins: what ``polyshard new`` does."""

from .package import Kind, Written, write_plugin

__all__ = ["Kind", "Written", "write_plugin"]
