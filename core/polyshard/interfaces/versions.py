"""The entry-point groups and the contract versions that this polyshard serves.

[Note: a second version of a contract]
The engine knows the current version alone. A plugin of an older one is adapted where it is resolved:
``catalog.resolve`` has checked ``api_version``, and wraps the factory so that what it constructs answers as the current
contract asks. An adapter is one class beside the contract in this package, named after what it adapts
(``CollectivesOf1``), and the only place that knows the older form; capabilities say what the older form cannot do. It
is written together with version 2, kept while ``OLDEST_API`` says 1, and deleted with it. ``tests/api1`` holds plugins
that must then still load. Hooks of listeners need none: pluggy passes an implementation the arguments that it names.
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
