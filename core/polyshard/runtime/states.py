"""The states of a model, its modules and its units in a step, and what leads from one to the next."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where the model stands in a step.

    ========  ========  ===============================================================
    from      to        by
    ========  ========  ===============================================================
    IDLE      FORWARD   the outermost forward starts
    FORWARD   IDLE      it ends, or raises
    IDLE      BACKWARD  a gradient reaches an output, or what backwards left is reduced
    BACKWARD  IDLE      the backward ends; after one that raised, the next forward
    FORWARD   BACKWARD  a forward differentiates inside itself, and goes on after
    IDLE      STREAM    the first weights of ``polyshard.stream`` are asked for
    STREAM    IDLE      the stream ends, or is closed
    IDLE      CLOSED    ``polyshard.close``; there is no way back
    any       FAILED    a communication did not end; ``polyshard.close`` alone follows
    ========  ========  ===============================================================
    """

    IDLE = "idle"
    """Between forwards and backwards: parameters may be read, changed and saved."""
    FORWARD = "forward"
    """Inside the outermost module's forward."""
    BACKWARD = "backward"
    """Inside a backward."""
    STREAM = "stream"
    """Whole weights are handed out, and the next ones on their way: masters must not change, and no step begins."""
    FAILED = "failed"
    """Nothing can be gathered or reduced any more: ranks stand at different places of their order."""
    CLOSED = "closed"
    """Nothing can be gathered or reduced any more: the collectives were closed."""


class UnitState(enum.Enum):
    """Where a unit's whole parameters are.

    ====================  ====================  =====================================================
    from                  to                    by
    ====================  ====================  =====================================================
    SHARDED               GATHERING             ``unshard``
    GATHERING             UNSHARDED             ``wait``
    GATHERING             SHARDED               ``reshard`` (a prefetch nobody used)
    UNSHARDED             GATHERING             ``unshard`` after ``expire``
    UNSHARDED             SHARDED               ``reshard``
    UNSHARDED             SHARDED_POST_FORWARD  ``reshard_post_forward``
    SHARDED_POST_FORWARD  GATHERING             ``unshard``, among neighbours
    SHARDED_POST_FORWARD  SHARDED               ``reshard``, ``outdate``; ``expire``: no backward came
    ====================  ====================  =====================================================
    """

    SHARDED = "sharded"
    """Nowhere: the gather buffer has no memory, and reading a view of it would be a crash."""
    GATHERING = "gathering"
    """On their way; compute must wait before it reads them."""
    UNSHARDED = "unsharded"
    """In the gather buffer, and compute is ordered after the gather."""
    SHARDED_POST_FORWARD = "sharded post-forward"
    """Nowhere, as in SHARDED, but this rank keeps a part of the gather buffer, from which a backward gathers them."""


class Fresh(enum.Enum):
    """For what a unit's whole parameters have the values of its master. Where ``due``, the next use gathers them.

    ========  ========  ==============================================================================
    from      to        by
    ========  ========  ==============================================================================
    NOT       NOW       ``unshard``
    NOW       AHEAD     a gather between steps, which the next forward uses
    NOW       RETAINED  ``retain``: a backward that releases nothing
    NOW       ALONE     ``keep``: a recomputation of this rank is still to come
    AHEAD     NOW       ``expire``: that forward begins
    NOW       NOT       ``expire``: a forward begins, and the master may have other values
    RETAINED  NOT       ``outdate``: an optimizer steps
    any       NOT       ``reshard``
    ========  ========  ==============================================================================
    """

    NOT = "not", True
    """For nothing, or they are not there."""
    NOW = "now", False
    """For the step that runs. Where nothing is gathered, always."""
    AHEAD = "ahead", False
    """For the next forward."""
    RETAINED = "retained", False
    """For all forwards until an optimizer steps. The same on all ranks."""
    ALONE = "alone", True
    """For a recomputation of this rank alone: in the ranks' common order they are released."""

    def __init__(self, _: str, due: bool) -> None:
        self.due = due


class Reshard(enum.Enum):
    """Whether a unit is released after forward."""

    ALWAYS = "always"
    """Released, and gathered again for backward."""
    UNLESS_TURNING = "unless_turning"
    """Released, but for modules whose backward follows their forward at once: the outermost one, and the last one to
    run if it was split off the outermost one, or that one has no parameters of its own."""
    PARTLY = "partly"
    """Released but for a part, where a backward may follow: for that it is gathered among neighbours alone."""
    NEVER = "never"
    """Kept until the end of its backward."""


class BackwardState(enum.Enum):
    """How far the backward that runs has come in a module state.

    =============  =============  =========================================================
    from           to             by
    =============  =============  =========================================================
    NOT_REACHED    PRE_BACKWARD   ``pre_backward``: a gradient reaches one of its outputs
    PRE_BACKWARD   POST_BACKWARD  ``post_backward``
    POST_BACKWARD  PRE_BACKWARD   another gradient: of an earlier call, or a recomputation
    any            NOT_REACHED    ``reset``: the backward ended, or was given up
    =============  =============  =========================================================

    ``post_backward`` in NOT_REACHED takes part in a reduction for other ranks' sake, and in POST_BACKWARD reduces
    gradients that arrived late. Neither changes the state.
    """

    NOT_REACHED = "not reached"
    """None of its outputs has a gradient."""
    PRE_BACKWARD = "pre-backward"
    """Its parameters are whole, and its gradients are being computed."""
    POST_BACKWARD = "post-backward"
    """Its parameters are released, and its gradients on their way."""
