"""The kinds of plugins, as a user asks for one."""

from __future__ import annotations

import enum

from ..interfaces import Group


class Kind(enum.Enum):
    """What a plugin is for. Templates have the names of the values."""

    COLLECTIVES = "collectives"
    """Moves bytes between ranks."""
    PRECISION = "precision"
    """Chooses dtypes, and casts."""
    OFFLOAD = "offload"
    """Parks shards between uses."""
    POLICY = "policy"
    """Chooses which modules become units."""
    LAYOUT = "layout"
    """Chooses where in its unit each parameter lies."""
    LISTENER = "listener"
    """Watches."""

    @property
    def group(self) -> Group:
        """The entry-point group whose plugins are of this kind."""
        return _GROUPS[self]

    def setting(self, name: str) -> str:
        """The line of TOML that picks the plugin ``name``."""
        return f'listeners = ["{name}"]' if self is Kind.LISTENER else f'{self.value} = "{name}"'


_GROUPS = {
    Kind.COLLECTIVES: Group.COLLECTIVES,
    Kind.PRECISION: Group.PRECISION,
    Kind.OFFLOAD: Group.OFFLOAD,
    Kind.POLICY: Group.POLICIES,
    Kind.LAYOUT: Group.LAYOUTS,
    Kind.LISTENER: Group.PLUGINS,
}
