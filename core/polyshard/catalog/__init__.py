"""Finds plugins through entry points, and constructs them, when a model is wrapped."""

from .construct import Constructed, construct
from .identity import code_digest, fingerprint
from .listing import Installed, PluginState, installed
from .offers import scan
from .resolve import resolve
from .resolved import Resolved

__all__ = [
    "Constructed",
    "Installed",
    "PluginState",
    "Resolved",
    "code_digest",
    "construct",
    "fingerprint",
    "installed",
    "resolve",
    "scan",
]
