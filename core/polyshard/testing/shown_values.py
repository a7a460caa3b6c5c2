"""Lets pytest show the values that an assertion of a suite compared, as in an author's own tests.

To be imported before the suites: what is imported already is left as it is.
"""

from __future__ import annotations

import pytest

_ASSERTING = (
    "collectives",
    "collectives_checks",
    "collectives_exchange_checks",
    "layout",
    "listener",
    "module_state",
    "offload",
    "plugin",
    "policy",
    "precision",
    "training",
)

pytest.register_assert_rewrite(*(f"{__package__}.{module}" for module in _ASSERTING))
