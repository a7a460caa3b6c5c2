"""Where a model stands in a step."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where the model stands in a step.

    ========  ========  ==========================================================
    from      to        by
    ========  ========  ==========================================================
    IDLE      FORWARD   the outermost forward starts
    FORWARD   IDLE      it ends, or raises
    IDLE      BACKWARD  a gradient reaches an output
    BACKWARD  IDLE      the backward ends; after one that raised, the next forward
    FORWARD   BACKWARD  a forward differentiates inside itself, and goes on after
    IDLE      CLOSED    ``polyshard.close``; there is no way back
    ========  ========  ==========================================================
    """

    IDLE = "idle"
    """Between forwards and backwards: parameters may be read, changed and saved."""
    FORWARD = "forward"
    """Inside the outermost module's forward."""
    BACKWARD = "backward"
    """Inside a backward."""
    CLOSED = "closed"
    """Nothing can be gathered or reduced any more: the collectives were closed."""
