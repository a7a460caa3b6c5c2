"""Conformance suites: pytest classes that a plugin's author subclasses, one for each contract.

A subclass overrides what constructs the plugin and inherits the tests::

    class TestAcmeCollectives(CollectivesSuite):
        def make(self, rank):
            return AcmeCollectives(plugin_context(), inner=rank.collectives)

``run_ranks`` starts ranks, threads or processes, for other tests of a plugin.

pytest must be installed; nothing else in polyshard imports this package.
"""

# ruff: noqa: E402
import pytest

# Before the suites are imported: pytest then shows the values that an assertion compared, as in an author's own tests.
_ASSERTING = ("listener", "offload", "plugin", "policy", "precision", "training")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _ASSERTING))

from .collectives import CollectivesSuite
from .listener import ListenerSuite
from .offload import OffloadSuite
from .plugin import plugin_context
from .policy import PolicySuite
from .precision import PrecisionSuite
from .ranks import KeptProcesses, Rank, RankProcesses, run_ranks

__all__ = [
    "CollectivesSuite",
    "KeptProcesses",
    "ListenerSuite",
    "OffloadSuite",
    "PolicySuite",
    "PrecisionSuite",
    "Rank",
    "RankProcesses",
    "plugin_context",
    "run_ranks",
]
