"""Writes packages of plugins: what ``polyshard new`` does."""

from .kinds import Kind
from .package import Written, write_plugin

__all__ = ["Kind", "Written", "write_plugin"]
