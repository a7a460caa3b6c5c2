"""Looks at a machine for what would keep polyshard from working, or from working fast.

Each file is about one thing, and its checks are functions of a ``Machine``, which ``read_machine`` makes: nothing else
looks at the outside, but the trial, which starts ranks.
"""

from .devices import devices
from .finding import Finding, Level, Section
from .limits import limits
from .links import links
from .machine import Device, Machine, read_machine
from .plugins import plugins
from .report import Report
from .trial import LIMIT_S, Outcome, Trial, TrialState, run_trial, trial_section, trials_for
from .variables import variables
from .versions import versions

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
