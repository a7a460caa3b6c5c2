"""Which suite tests the plugins of which group."""

from __future__ import annotations

from collections.abc import Mapping

from ..interfaces import Group
from .collectives import CollectivesSuite
from .layout import LayoutSuite
from .listener import ListenerSuite
from .offload import OffloadSuite
from .policy import PolicySuite
from .precision import PrecisionSuite

OF_GROUP: Mapping[Group, type] = {
    Group.COLLECTIVES: CollectivesSuite,
    Group.PRECISION: PrecisionSuite,
    Group.OFFLOAD: OffloadSuite,
    Group.POLICIES: PolicySuite,
    Group.LAYOUTS: LayoutSuite,
    Group.PLUGINS: ListenerSuite,
}
