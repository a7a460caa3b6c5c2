"""The entry-point groups and the contract versions that this polyshard serves.

Listener hooks need no versions: pluggy passes an implementation the arguments that it names.
"""

from __future__ import annotations

import enum


class Group(enum.StrEnum):
    """Entry-point groups, one for each contract."""

    COLLECTIVES = "polyshard.collectives"
    """Factories of ``Collectives``."""
    PRECISION = "polyshard.precision"
    """Factories of ``PrecisionCaster``."""
    OFFLOAD = "polyshard.offload"
    """Factories of ``OffloadManager``."""
    POLICIES = "polyshard.policies"
    """Factories of ``WrapPolicy``."""
    LAYOUTS = "polyshard.layouts"
    """Factories of ``Layout``."""
    PLUGINS = "polyshard.plugins"
    """Factories of listeners."""


#: The oldest ``api_version`` that is still served, per group.
OLDEST_API: dict[Group, int] = dict.fromkeys(Group, 1)
#: The newest ``api_version`` that is served, per group.
CURRENT_API: dict[Group, int] = dict.fromkeys(Group, 1)
