"""Looks at a machine for what would keep polyshard from working, or from working fast.

Each file is about one thing, and its checks are functions of a ``Machine``, which ``read_machine`` makes: nothing else
looks at the outside, but the trial, which starts ranks.
"""

from __future__ import annotations

from .checks import devices, limits, links, plugins, variables, versions
from .machine import Device, Machine, read_machine
from .report import Finding, Level, Report, Section
from .trial import LIMIT_S, Outcome, Trial, TrialState, run_trial, trial_section, trials_for

__all__ = [
    "LIMIT_S",
    "Device",
    "Finding",
    "Level",
    "Machine",
    "Outcome",
    "Report",
    "Section",
    "Trial",
    "TrialState",
    "devices",
    "limits",
    "links",
    "plugins",
    "read_machine",
    "run_trial",
    "trial_section",
    "trials_for",
    "variables",
    "versions",
]
