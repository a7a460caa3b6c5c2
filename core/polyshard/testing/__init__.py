"""Conformance suites: pytest classes that a plugin's author subclasses, one for each contract.

A subclass overrides what constructs the plugin and inherits the tests::

    class TestAcmeCollectives(CollectivesSuite):
        def make(self, rank):
            return AcmeCollectives(plugin_context(), inner=rank.collectives)

``run_ranks`` starts ranks, threads or processes, for other tests of a plugin.

pytest must be installed; nothing else in polyshard imports this package.
"""

from . import shown_values as shown_values
from .collectives import CollectivesSuite
from .context import plugin_context
from .layout import LayoutSuite
from .listener import ListenerSuite
from .offload import OffloadSuite
from .policy import PolicySuite
from .precision import PrecisionSuite
from .rank_processes import KeptProcesses, RankProcesses
from .ranks import Rank, run_in, run_ranks

__all__ = [
    "CollectivesSuite",
    "KeptProcesses",
    "LayoutSuite",
    "ListenerSuite",
    "OffloadSuite",
    "PolicySuite",
    "PrecisionSuite",
    "Rank",
    "RankProcesses",
    "plugin_context",
    "run_in",
    "run_ranks",
]
