"""What the units of one model share: streams, order, phase, and the ends of forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..events import Events
from ..interfaces import Collectives, OffloadManager, PrecisionCaster
from . import _torch_private
from .audit import Audit
from .lanes import Lanes
from .phase import Phase
from .schedule import Schedule
from .stage import Stage
from .unit import Unit, UnitState


class Root:
    """The outermost of a model's sharded modules, and every stage inside it."""

    def __init__(
        self,
        collectives: Collectives,
        stages: Sequence[Stage],
        lanes: Lanes,
        schedule: Schedule,
        events: Events,
        *,
        check_ranks: bool,
    ) -> None:
        self.collectives = collectives
        self.stages = tuple(stages)
        self.lanes = lanes
        self.schedule = schedule
        self.events = events
        self.phase = Phase.IDLE
        self.active: Stage | None = None
        self.synchronises = True
        self.accumulates = False
        self.unsharded = False
        self.reduced: list[Unit] = []
        #: Compares each collective with the other ranks' until the first backward has ended.
        self.audit = Audit(collectives) if check_ranks and collectives.capabilities.can_communicate else None
        for stage in self.stages:
            stage.root = self
            for unit in stage.units:
                unit.root = self
        self._parking: tuple[OffloadManager, ...] = tuple(
            {id(u.offload): u.offload for u in self.units if u.parks}.values()
        )
        self._encoding: tuple[PrecisionCaster, ...] = tuple(
            {id(u.caster): u.caster for u in self.units if u.caster.capabilities.encodes}.values()
        )

    @property
    def units(self) -> Iterator[Unit]:
        """Every unit, in module order."""
        for stage in self.stages:
            yield from stage.units

    @property
    def rank(self) -> int:
        """This process's rank among all that share the model."""
        return self.collectives.rank

    @property
    def backward_failed(self) -> bool:
        """Whether a backward started and never ended. To be asked outside of backward."""
        return self.phase is Phase.BACKWARD

    def begin_forward(self, stage: Stage) -> None:
        """The outermost forward starts, in ``stage``."""
        if self.phase is not Phase.IDLE:
            self.abandon()
        if self.audit is not None and self.audit.done:
            self.audit = None
        self.phase = Phase.FORWARD
        for unit in self.units:
            unit.take_up_changes()
            if not unit.prepared:
                unit.prepare()
            unit.expire()
            unit.hide()
        self.active = stage
        self.lanes.begin_forward()
        self.schedule.begin_forward()
        for caster in self._encoding:
            caster.prepare([unit.spec for unit in self.units if unit.caster is caster], self.collectives)
        if self.events.active:
            self.events.step_begin(stage.module)

    def end_forward(self) -> None:
        """The outermost forward ended."""
        self.active = None
        self.phase = Phase.IDLE
        self.schedule.end_forward()
        if self.audit is not None:
            self.audit.forward_ended()
        for stage in self.stages:
            stage.left_forward()
        if self.events.active and not any(stage.awaits_backward for stage in self.stages):
            self.events.step_end(self.stages[0].module)

    def enter_backward(self) -> None:
        """A gradient reached one of the outputs."""
        if self.phase is not Phase.BACKWARD:
            self.phase = Phase.BACKWARD
            self.accumulates = any(
                leaf.requires_grad and _torch_private.will_accumulate(leaf)
                for stage in reversed(self.stages)
                if stage.awaits_backward
                for unit in stage.units
                for leaf in unit.leaves
            )
            _torch_private.queue_after_backward(self.end_backward)

    def end_backward(self) -> None:
        """All gradients of this backward have been accumulated."""
        # In one order on all ranks, whichever of them got gradients.
        for stage in reversed(self.stages):
            if stage.late():
                stage.catch_up()
        self.lanes.drain()
        for offload in self._parking:
            offload.sync_for_step()
        reduced, self.reduced = self.reduced, []
        for unit in reduced:
            unit.gradients.run_post_accumulate_hooks()
        for stage in self.stages:
            if not stage.entered:
                stage.reset()
        self.schedule.end_backward()
        # A forward that differentiates inside itself goes on.
        self.phase = Phase.IDLE if self.active is None else Phase.FORWARD
        self.audit = None
        if self.events.active:
            self.events.step_end(self.stages[0].module)

    def abandon(self) -> None:
        """Give up an unfinished forward or backward: release everything, drop its gradients."""
        self.active = None
        self.phase = Phase.IDLE
        self.schedule.end_backward()
        for unit in self.units:
            unit.gradients.forget()
        self.lanes.drain()
        self.reduced.clear()
        for stage in self.stages:
            stage.reset()
            for unit in stage.units:
                unit.gradients.discard()

    @property
    def gathered(self) -> tuple[str, ...]:
        """Names of the units that hold whole parameters in a gather buffer, or are about to."""
        return tuple(u.name for u in self.units if not u.permanent and u.state is not UnitState.SHARDED)
