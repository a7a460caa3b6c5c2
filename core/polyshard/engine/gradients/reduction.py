"""From the gradients of a unit's views to ``.grad`` of its originals."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch.utils.weak import TensorWeakRef

from ...errors import StateError
from ...interfaces import BufferRole, Observer, OffloadManager, UnitDtypes, UnitSpec, Work
from .. import _torch_private
from ..parameters.originals import Recipient
from ..planning.answers import refuse_gradient
from ..planning.layout import FlatLayout
from ..planning.ranks import RankGrid
from ..transport.buffer import FlatBuffer
from ..transport.lanes import REDUCTIONS_ALIVE, Lanes
from .bucket import Bucket, Copies, PendingReduction

#: More bytes of gradients are copied where they were computed, and give their memory back at once, as do those of units
#: that are not sharded, of which any number may be on their way. Fewer are held until they were reduced.
_HELD_NBYTES = 64 * 2**20

_gradient_of = attrgetter("grad")
_is_trained = attrgetter("requires_grad")


class Gradients:
    """One unit's gradients: brought together, reduced over ranks, handed to the optimizer.

    Under ``no_sync`` they gather in a private buffer of the whole unit in the reduction dtype, and ``.grad`` of the
    originals stays as it is.
    """

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        grid: RankGrid,
        dtypes: UnitDtypes,
        recipients: Sequence[Recipient],
        offload: OffloadManager,
    ) -> None:
        self.spec = spec
        self.grid = grid
        self._layout = layout
        self._dtypes = dtypes
        self._offload = offload
        self._parks = offload.capabilities.parks
        wire = dtypes.wire
        if grid.shard is None or not (grid.shard.capabilities.widening and wire in grid.shard.capabilities.dtypes):
            # Nothing widens on the way, so what travels is as wide as what accumulates.
            wire = dtypes.reduce
        self._wire_dtype = wire
        self._wire: FlatBuffer | None = None
        self._unreduced: FlatBuffer | None = None
        self._has_unreduced = False
        # Which parameters had no gradient in any of them.
        self._unreduced_missed: frozenset[int] = frozenset()
        #: Which parameters had no gradient on this rank in the backward that runs.
        self.missed: frozenset[int] = frozenset()
        #: Which of them have their ``.grad`` here, and had none before.
        self.bare: frozenset[int] = frozenset()
        #: Which had a gradient on no rank, when that was asked last.
        self.unused: frozenset[int] = frozenset()
        self._reduced_once = False
        #: Waiting in a bucket.
        self._arrived: list[torch.Tensor | None] | None = None
        self._claimed: set[int] = set()
        # Where the gradients that are reduced next were computed, and those that wait for them kept.
        self._places: list[object] = []
        #: Where the reduction's input was given memory.
        self.taken_at: object = None
        # Of reductions in flight, the oldest first.
        self._results: deque[torch.Tensor] = deque()
        # The last reduced gradient, which lives as long as any ``.grad`` that views it: ``zero_grad`` frees its memory.
        self._delivered: TensorWeakRef | None = None
        self._shown: list[int] = []
        self._addresses: list[int] = []
        self.observers: tuple[Observer, ...] = ()
        self.deliver_to(recipients)

    def deliver_to(self, recipients: Sequence[Recipient]) -> None:
        """Which parameters receive which parts of the reduced gradient, in order of offset."""
        self._delivered = None
        self._recipients = tuple(recipients)
        self._owners = [recipient.parameter for recipient in recipients]
        self._owner_of = {recipient.index: recipient.parameter for recipient in recipients}
        self._sizes: list[int] = []
        self._picks: list[int] = []
        cursor = 0
        for recipient in recipients:
            if recipient.offset > cursor:
                self._sizes.append(recipient.offset - cursor)
            self._picks.append(len(self._sizes))
            self._sizes.append(recipient.numel)
            cursor = recipient.offset + recipient.numel
        if cursor < self._layout.shard_numel:
            self._sizes.append(self._layout.shard_numel - cursor)

    @property
    def wire_nbytes(self) -> int:
        """Bytes of a reduction's input."""
        return self._layout.padded_numel * self._wire_dtype.itemsize

    @property
    def unreduced(self) -> bool:
        """Whether gradients of earlier microbatches wait for a synchronising backward."""
        # Those that wait in a bucket have found theirs.
        return self._has_unreduced and self._arrived is None

    def computed_at(self, places: Iterable[object]) -> None:
        """``places``, as ``Lanes.here`` says, are where the gradients that come next were computed."""
        for place in places:
            if place not in self._places:
                self._places.append(place)

    def keep(self, gradients: list[torch.Tensor | None], lanes: Lanes) -> None:
        """Add ``gradients`` to those that wait for a synchronising backward."""
        if self._unreduced is None:
            self._unreduced = FlatBuffer.allocate(self._layout, self._dtypes.reduce, self.spec.device)
        self.computed_at((lanes.here(),))
        with lanes.between(self._places):
            self._add_unreduced(self._unreduced, gradients)

    def _add_unreduced(self, buffer: FlatBuffer, gradients: list[torch.Tensor | None]) -> None:
        missed = _missing(gradients)
        self._unreduced_missed = self._unreduced_missed & missed if self._has_unreduced else missed
        if self._has_unreduced:
            views, present = _present(buffer.views, gradients)
            if present:
                _torch_private.foreach_add_(views, present)
        else:
            buffer.attach()
            self._copies(buffer, gradients).run()
            self._has_unreduced = True

    def reduce(self, gradients: list[torch.Tensor | None], bucket: Bucket) -> None:
        """Reduce ``gradients``, and those that waited, over ranks.

        ``.grad`` has the result after ``Bucket.flush`` and ``Lanes.drain``.
        """
        if self._arrived is not None:
            # A unit used twice in one backward.
            bucket.flush()
        self._arrived = gradients
        self._note_missed(gradients)
        if bucket.audit is not None:
            numel, dtype = self._layout.padded_numel, self._wire_dtype
            bucket.audit.agree(self.grid.world, self.spec.label, "reduce", numel, dtype)
        self.computed_at((bucket.lanes.here(),))
        places = tuple(self._places)
        self._places.clear()
        bucket.reduce(self, places)

    def _note_missed(self, gradients: list[torch.Tensor | None]) -> None:
        missed = _missing(gradients)
        if missed and self._has_unreduced:
            missed &= self._unreduced_missed
        if self._reduced_once:
            self.missed &= missed
            self.bare &= missed
            return
        self._reduced_once = True
        self.missed = missed
        if missed:
            self.bare = frozenset(index for index in missed if self._is_bare(index))

    def _is_bare(self, index: int) -> bool:
        owner = self._owner_of.get(None if None in self._owner_of else index)
        return owner is not None and owner.requires_grad and owner.grad is None

    def _forget_missed(self) -> None:
        self.missed = self.bare = frozenset()
        self._reduced_once = False

    def drop(self, indices: frozenset[int]) -> None:
        """Take ``.grad`` away from parameters for which no rank had a gradient."""
        if None in self._owner_of:
            # One for all of them, which are here together or not at all.
            if len(indices) == len(self._layout.slots):
                self._owner_of[None].grad = None
        else:
            for index in indices:
                self._owner_of[index].grad = None

    def make_room(self, lanes: Lanes) -> None:
        """Retire earlier reductions, so that one more may be issued. Called by buckets."""
        # Attached: the last reduction of this unit is still reading it.
        attached = self._wire is not None and self._wire.attached and not self._claimed
        for observer in self.observers:
            observer.wait(self.spec)
        lanes.make_room(0 if attached else REDUCTIONS_ALIVE - 1)
        for observer in self.observers:
            observer.waited(self.spec)

    def collect(self) -> Copies:
        """What is to be written into the reduction's input. Called by buckets."""
        gradients, self._arrived = self._arrived, None
        assert gradients is not None
        wire = self.input
        if self._has_unreduced:
            assert self._unreduced is not None
            self._add_unreduced(self._unreduced, gradients)
            self._has_unreduced = False
            return Copies([], [wire.flat], [self._unreduced.flat], [self._unreduced])
        copies = self._copies(wire, gradients)
        self._claimed.clear()
        return copies

    def prepare(self, lanes: Lanes) -> PendingReduction:
        """The reduction of what has arrived, with its memory. Called by buckets."""
        if self.grid.shard is None:
            # Reduced in place, and then what ``.grad`` views: not memory that comes and goes.
            whole = torch.empty(self._layout.padded_numel, dtype=self._dtypes.reduce, device=self.spec.device)
            self._wire = FlatBuffer(whole, self._layout, resizable=False)
        elif not self._claimed:
            self._attach(self._take_wire(), lanes)
        wire = self.input
        copies = self.collect()
        held = self.grid.shard is not None and (
            self.wire_nbytes <= _HELD_NBYTES or sum(source.nbytes for source in copies.sources) <= _HELD_NBYTES
        )
        if not held:
            copies.run()
            copies.let_go()
            copies = Copies([], [], [], [])
        if self.grid.shard is None:
            result, self._wire = wire.flat, None
        else:
            result = self.new_result(self.shard_numel)
            copies.spent.append(wire)
        self._results.append(result)
        return PendingReduction(wire.flat, result, copies)

    def issue(self, reduction: PendingReduction) -> Work:
        """Start what ``prepare`` returned. Called by buckets."""
        return self.grid.reduce(reduction.result, reduction.input)

    @property
    def label(self) -> str:
        """The unit's name, for people."""
        return self.spec.name or "(root)"

    @property
    def goes_with(self) -> object:
        """What the gradients of two units must agree in to be reduced together; None where they never are."""
        grid = self.grid
        return None if grid.shard is None else (grid.shard, grid.replicate, self._wire_dtype, self._dtypes.reduce)

    @property
    def input(self) -> FlatBuffer:
        """The reduction's input."""
        return self._wire or self._take_wire()

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's gradient shard."""
        return self._layout.shard_numel

    def new_result(self, numel: int) -> torch.Tensor:
        """Memory for ``numel`` reduced elements.

        From the pool of the stream that computes: what one step uses for gradients, the next has for activations.
        """
        return torch.empty(numel, dtype=self._dtypes.reduce, device=self.spec.device)

    def expect(self, result: torch.Tensor) -> None:
        """``result`` (``[shard_numel]``) will hold the reduced shard by ``finish``. Called by buckets."""
        self._results.append(result)

    def starting(self) -> None:
        """The reduction starts at the present point of the current stream. Called by buckets."""
        for observer in self.observers:
            observer.reduce(self.spec)

    def finish(self) -> None:
        """Hand the result to the optimizer; the reduction ends at the present point of the current stream."""
        self._deliver()
        for observer in self.observers:
            observer.reduced(self.spec)

    @property
    def widens(self) -> bool:
        """Whether gradients are cast on their way into the reduction, or reduced whole."""
        return self.grid.shard is None or self._wire_dtype != self._dtypes.compute

    def claim(self, index: int, bucket: Bucket) -> torch.Tensor | None:
        """Where in the reduction's input the gradient of parameter ``index`` may be written, as a new tensor.

        None where it has to come as a tensor of its own: it is not the first of this backward, adds to others, or is
        computed on another stream than the first that claimed.
        """
        if self._has_unreduced or self._arrived is not None or index in self._claimed:
            return None
        wire = self._take_wire()
        if not self._claimed:
            if wire.attached:
                return None
            self._attach(wire, bucket.lanes)
            self.computed_at((self.taken_at,))
        elif bucket.lanes.here() is not self.taken_at:
            return None
        self._claimed.add(index)
        return wire.views[index].detach()

    def discard(self) -> None:
        """Release what a backward that failed left behind."""
        self._arrived = None
        self._forget_missed()
        self._claimed.clear()
        self._places.clear()
        if self._wire is not None:
            self._wire.release()

    def let_go(self) -> None:
        """Forget what a backward left that reduced nothing of it."""
        if self._claimed:
            # Written to, and then not part of any reduction.
            self.discard()
        if not self._has_unreduced:
            # Of gradients that were none: a backward that accumulates nowhere.
            self._places.clear()

    def forget(self) -> None:
        """Let reductions in flight end without a result."""
        self._results.clear()

    def end_backward(self) -> None:
        """Run the hooks that the user put on the originals: there, autograd accumulates nothing that would."""
        self._forget_missed()
        for owner in self._owners:
            if owner.grad is None:
                continue
            for hook in _torch_private.post_accumulate_grad_hooks(owner):
                hook(owner)

    def _attach(self, wire: FlatBuffer, lanes: Lanes) -> None:
        self.make_room(lanes)
        with (self.grid.shard or self.grid.world).allocation(BufferRole.REDUCE, wire.nbytes):
            wire.attach()
        self.taken_at = lanes.here()

    def _take_wire(self) -> FlatBuffer:
        if self._wire is None:
            self._wire = FlatBuffer.allocate(self._layout, self._wire_dtype, self.spec.device)
        return self._wire

    def _copies(self, buffer: FlatBuffer, gradients: list[torch.Tensor | None]) -> Copies:
        zeroed = list(buffer.gaps)
        if self._claimed:
            # Most are there already.
            apart = [
                index
                for index, (view, gradient) in enumerate(zip(buffer.views, gradients, strict=True))
                if gradient is None or gradient.data_ptr() != view.data_ptr()
            ]
            all_views = [buffer.views[index] for index in apart]
            gradients = [gradients[index] for index in apart]
        else:
            all_views = buffer.views
        views, present = _present(all_views, gradients)
        if len(present) < len(gradients):
            # A parameter that took no part: its range is zero, on this rank or on all.
            zeroed += [view for view, gradient in zip(all_views, gradients, strict=True) if gradient is None]
        return Copies(zeroed, views, present, [])

    def _deliver(self) -> None:
        if not self._results:
            return
        result = self._results.popleft()
        if result.dtype != self._dtypes.grad:
            result = result.to(self._dtypes.grad)
        whole = self.delivered
        if whole is not None:
            if self._parks:
                flat = self._store(result, whole)
                if flat is not whole:
                    self._assign(flat)
            else:
                whole.add_(result)
            return
        present = list(map(_gradient_of, self._owners))
        fresh = all(map(is_, present, repeat(None)))
        if self._parks:
            result = self._store(result, None)
            if not fresh:
                self._offload.sync_for_step()
        if fresh:
            self._assign(result)
            return
        # The user replaced or kept some gradients: add to what is there, parameter by parameter.
        for owner, current, view in zip(self._owners, present, self._split(result), strict=True):
            if not owner.requires_grad:
                continue
            if current is None:
                owner.grad = view
            elif current.shape != view.shape:
                raise StateError(
                    f"Cannot writeback when the gradient shape changes\nExpects {view.shape} but got {current.shape} "
                    f"in unit '{self.spec.label}' on rank {self.grid.world.rank}. Set .grad to a tensor "
                    "of the shard's shape."
                )
            else:
                current.add_(view)
        self._delivered = None

    @property
    def delivered(self) -> torch.Tensor | None:
        """The reduced gradient (``[shard_numel]``) if every ``.grad`` is still the part of it that it was made."""
        flat = None if self._delivered is None else self._delivered()
        if flat is None:
            return None
        present = list(map(_gradient_of, self._owners))
        # Objects of other gradients may come to have the same ids, but not while they lie in this memory. And the same
        # objects may stand on other memory: a user may set ``.grad.data``.
        same = list(map(id, present)) == self._shown and list(map(torch.Tensor.data_ptr, present)) == self._addresses
        return flat if same else None

    def _store(self, result: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        stored = self._offload.store_grad(self.spec, result, into)
        # A rank that holds no element has no owner, and nothing views the gradient.
        device = self._owners[0].device if self._owners else None
        refuse_gradient(self._offload, self.spec, stored, result, device, self.grid.world.rank)
        return stored

    def _assign(self, flat: torch.Tensor) -> None:
        # Views keep their base alive, and that of a view's view is not the view.
        if flat._is_view():
            flat = flat.data
        views = self._split(flat)
        for owner, view in zip(self._owners, views, strict=True):
            if owner.requires_grad:
                owner.grad = view
        self._delivered = None
        if all(map(_is_trained, self._owners)):
            self._delivered = TensorWeakRef(flat)
            self._shown = list(map(id, views))
            self._addresses = list(map(torch.Tensor.data_ptr, views))

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        if self.grid.shard is None:
            start = flat.storage_offset()
            return [flat.as_strided(each.shape, each.stride, start + each.offset) for each in self._recipients]
        parts = torch.split_with_sizes(flat, self._sizes)
        return [parts[index] for index in self._picks]


def _missing(gradients: list[torch.Tensor | None]) -> frozenset[int]:
    # Nearly always none is missing, which is found out at C speed.
    if any(map(is_, gradients, repeat(None))):
        return frozenset(index for index, gradient in enumerate(gradients) if gradient is None)
    return frozenset()


def _present(
    views: list[torch.Tensor], gradients: list[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(gradients):
        return views, present
    return [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None], present
