"""The states of a model, its modules and its units in a step, and what leads from one to the next."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .unit import Unit


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

    ALWAYS = "always", True, True
    """Released, and gathered again for backward."""
    UNLESS_TURNING = "unless_turning", True, False
    """Released, but for modules whose backward follows their forward at once: the outermost one, and the last one to
    run if it was split off the outermost one, or that one has no parameters of its own."""
    PARTLY = "partly", True, True
    """Released but for a part, where a backward may follow: for that it is gathered among neighbours alone."""
    NEVER = "never", False, False
    """Kept until the end of its backward."""

    def __init__(self, _: str, otherwise: bool, turning: bool) -> None:
        #: Whether it is, by whether its backward is expected to follow at once.
        self.releases = otherwise, turning


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


class Retention:
    """The policy of release of one unit. It leads ``GatheredParameters.fresh`` from one value to the next."""

    def __init__(self, unit: Unit, policy: Reshard) -> None:
        self._unit = unit
        #: Whether forwards release the parameters.
        self.policy = policy
        # Whether no optimizer stepped behind the last backward; the versions of parameters when a forward began last.
        self._outlives = False
        self._versions: Sequence[int] = ()

    def keep(self) -> None:
        """Keep the parameters for this rank's recomputation, where the ranks' common order releases them."""
        gathered = self._unit.gathered
        # Modules hold what they hold on ranks that release. Before the recomputation a gather with these may write to
        # the whole parameters, which is no write of the program's.
        gathered.conceal()
        if self._hide_whole():
            gathered.wait()
            gathered.fresh = Fresh.ALONE

    def retain(self) -> None:
        """Keep the parameters whole for later forwards, until an optimizer steps."""
        if self._hide_whole():
            gathered = self._unit.gathered
            self._unit.root.awaits_optimizer = True
            if not gathered.fresh.due:
                gathered.fresh = Fresh.RETAINED

    def _hide_whole(self) -> bool:
        """Hide, and keep no part; returns whether there are gathered parameters."""
        gathered = self._unit.gathered
        gathered.hide()
        if gathered.state is UnitState.SHARDED_POST_FORWARD:
            gathered.drop_secondary()
        return not (self._unit.permanent or gathered.state is UnitState.SHARDED)

    def outlive(self) -> None:
        """A backward ended: what is left of its parameters serves the next forward too, unless an optimizer steps."""
        self._outlives = self._unit.root.awaits_optimizer = True

    def outdate(self) -> None:
        """The master gets other values: parameters that are retained, or kept in part, are gathered again at their next
        use."""
        gathered = self._unit.gathered
        if gathered.prepared and gathered.shards.masters is not None:
            gathered.shards.masters.current = False
        if gathered.fresh is Fresh.RETAINED:
            gathered.refuse_lost_writes()
            gathered.fresh = Fresh.NOT
            gathered.conceal()
        elif gathered.state is UnitState.SHARDED_POST_FORWARD:
            gathered.drop_secondary()

    def expire(self) -> None:
        """A new step begins: parameters that stayed gathered may be older than the master, and are gathered again."""
        unit, gathered = self._unit, self._unit.gathered
        module_state = unit.module_state
        chosen = gathered.shards.masters is not None or not module_state.releases_by_default
        if chosen or not module_state.releases_after_backward:
            # What programs write to parameters between backwards is seen by the counters of these. Not by them is seen
            # what ``.data`` hides, as in updates that are written by hand: these have no optimizer, or no backward.
            before, self._versions = self._versions, unit.held.versions
            # An optimizer in the backward steps over what has gradients on this rank, and other ranks may gather.
            lasts = self._outlives and unit.root.stepped and unit.root.backward_step is None
            self._outlives = False
            if before != self._versions or (chosen and not lasts):
                self.outdate()
        if unit.permanent:
            gathered.places.clear()
        elif gathered.fresh is Fresh.AHEAD:
            gathered.fresh = Fresh.NOW
        elif gathered.fresh is not Fresh.RETAINED:
            if gathered.state is UnitState.SHARDED_POST_FORWARD:
                gathered.drop_secondary()
            gathered.fresh = Fresh.NOT
