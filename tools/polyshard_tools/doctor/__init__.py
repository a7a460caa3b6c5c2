"""Looks at a machine for what would keep polyshard from working, or from working fast.

Each file is about one thing, and its checks are functions of a ``Machine``, which ``read_machine`` makes: nothing else
looks at the outside, but the trial, which starts ranks.
"""

from __future__ import annotations
