"""Finds plugins through entry points, and constructs them, when a model is wrapped."""

from .construct import Constructed, construct
from .identity import code_digest, engine_digest, fingerprint
from .listing import Installed, PluginState, installed
from .offers import scan
from .permission import Permission
from .resolve import resolve
from .resolved import Resolved
from .used import UsedPlugin, used

__all__ = [
    "Constructed",
    "Installed",
    "Permission",
    "PluginState",
    "Resolved",
    "UsedPlugin",
    "code_digest",
    "construct",
    "engine_digest",
    "fingerprint",
    "installed",
    "resolve",
    "scan",
    "used",
]
