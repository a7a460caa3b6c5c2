"""One unit's gradients, from the backward that computes them to the reduced shard in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch.utils.weak import TensorWeakRef

from .. import _torch_private
from ..errors import StateError
from ..interfaces import OffloadManager, UnitDtypes
from ..planning.answers import refuse_gradient
from ..planning.layout import FlatLayout, contiguous_stride
from .backward_step import BackwardStep
from .parameters import GradientTarget
from .reduce import Contribution, Reducer, Reducible, ReductionInput
from .streams import CommStreams

_gradient_of = attrgetter("grad")
_is_trained = attrgetter("requires_grad")


class Gradients:
    """Collects one unit's gradients, contributes them to reductions, and delivers its shard to the optimizer.

    Under ``no_sync`` they are added up in the reduction dtype, and ``.grad`` of the originals stays as it is. It stays
    so behind a reduction that is not over the replicas, too: this rank keeps its shard of the sum until one is.
    """

    def __init__(
        self,
        unit: Reducible,
        layout: FlatLayout,
        dtypes: UnitDtypes,
        targets: Sequence[GradientTarget],
        offload_manager: OffloadManager | None,
        placed: Callable[[int | None, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """``offload_manager``: offloads the reduced gradient; None where it stays on the device that computes.

        ``placed``: makes a target's part of it what the target is, by the target's index; None where it is that.
        """
        self.unit = unit
        self._layout = layout
        self._dtypes = dtypes
        self._offload_manager, self._placed = offload_manager, placed
        travels = dtypes.communication
        shard = unit.ranks.reduction
        if shard is None or not (shard.capabilities.widening and travels in shard.capabilities.dtypes):
            # No backend that widens: gradients travel in the dtype in which they accumulate.
            travels = dtypes.reduce
        self.input = ReductionInput(layout, travels, dtypes.reduce, unit.spec.device)
        #: Where gradients of several backwards are added up before they are reduced. They travel as they add up: in a
        #: narrower dtype, sums would be rounded once more.
        self.sums = self.input
        if travels != dtypes.reduce:
            self.sums = ReductionInput(layout, dtypes.reduce, dtypes.reduce, unit.spec.device)
        # The sum of what other replicas or groups have not added up, and how many reductions are still to add to it.
        self._shard: torch.Tensor | None = None
        self._shards_coming = 0
        self._shard_missed: frozenset[int] = frozenset()
        #: Parameters without a gradient on this rank in the backward that runs.
        self.missed: frozenset[int] = frozenset()
        #: Those of them that have their ``.grad`` on this rank, and had none before.
        self.bare: frozenset[int] = frozenset()
        #: Parameters that had a gradient on no rank, in the last exchange.
        self.unused: frozenset[int] = frozenset()
        #: Where one ``.grad`` serves all parameters: those with zeros in it, since no rank had a gradient of them after
        #: it was None. An optimizer moves them, but would leave a parameter without a gradient alone.
        self.unfilled: frozenset[int] = frozenset()
        #: A factor of the mean over ranks; None for 1.
        self.scale = unit.ranks.scale
        #: Whether parameters of a reduced unit that no rank had a gradient of get zeros, and not None.
        self.fills_unused = False
        self._reduced_once = False
        #: Whether they are reduced in the backward that runs.
        self.reduced = False
        #: Told of gradients that no later one of the backward is added to; None where nobody steps there.
        self.stepper: BackwardStep | None = None
        #: The places (``CommStreams.here``) at which the gradients of the next reduction were computed, and those in
        #: the sum added up.
        self.places: list[object] = []
        # The last reduced gradient, which lives as long as any ``.grad`` that views it: ``zero_grad`` frees its memory.
        self._delivered: TensorWeakRef | None = None
        self._shown: list[int] = []
        self._addresses: list[int] = []
        self.set_targets(targets)

    def set_targets(self, targets: Sequence[GradientTarget]) -> None:
        """Deliver the reduced gradient to ``targets``, which are in order of offset."""
        self._delivered = None
        self._targets = tuple(targets)
        self._owners = [target.parameter for target in targets]
        self._owner_of = {target.index: target.parameter for target in targets}
        # One call makes all parts, and one more each part of more dimensions.
        rows = [(each.shape, each.stride) for each in targets if len(each.shape) != 1]
        self._strided = any(stride != contiguous_stride(shape) for shape, stride in rows)
        self._shapes = [each.shape if len(each.shape) != 1 else None for each in targets] if rows else []
        self._sizes: list[int] = []
        self._picks: list[int] = []
        cursor = 0
        for target in targets:
            if target.offset > cursor:
                self._sizes.append(target.offset - cursor)
            self._picks.append(len(self._sizes))
            self._sizes.append(target.numel)
            cursor = target.offset + target.numel
        if cursor < self._layout.shard_numel:
            self._sizes.append(self._layout.shard_numel - cursor)

    @property
    def widens(self) -> bool:
        """Whether gradients are cast on their way into the reduction, or reduced whole."""
        return self.unit.ranks.reduction is None or self.input.dtype != self._dtypes.compute

    @property
    def unreduced(self) -> bool:
        """Whether gradients of earlier microbatches wait for a synchronising backward."""
        # The sum of a unit that waits in a bucket is part of that reduction.
        sums = self.sums
        return (sums.has_sum or self._shard is not None or self._shards_coming > 0) and sums.gradients is None

    def computed_at(self, here: object) -> None:
        """Note the place (``CommStreams.here``) at which the next gradients were computed."""
        if here not in self.places:
            self.places.append(here)

    def claim(self, index: int, reducer: Reducer) -> torch.Tensor | None:
        """Memory in the reduction's input for the gradient of parameter ``index``, as a new tensor.

        None where the gradient needs memory of its own.
        """
        here = reducer.streams.current()
        if not self.input.claimed:
            if self.sums.has_sum or not self.input.free:
                return None
            reducer.open(Contribution(self.unit, self.unit.ranks, self.input, (), self._deliver))
            self.computed_at(here)
        return self.input.claim(index, here)

    def keep(self, gradients: list[torch.Tensor | None], streams: CommStreams) -> None:
        """Add ``gradients`` to the sum that waits for a synchronising backward."""
        self.computed_at(streams.current())
        if self.sums.sum_travels:
            streams.make_room(0)
        with streams.between(self.places):
            self.sums.accumulate(gradients)

    def contribute(self, gradients: list[torch.Tensor | None], streams: CommStreams) -> Contribution:
        """The unit's contribution to the reduction that follows: ``gradients`` and the sum.

        ``.grad`` has the result after ``Reducer.flush`` and ``CommStreams.drain``.
        """
        input = self.sums if self.sums.has_sum else self.input
        missed = input.missing(gradients)
        if self._shard is not None or self._shards_coming:
            missed &= self._shard_missed
            if self._shards_coming:
                streams.make_room(0)
        if missed or self.unfilled:
            self._note_missed(missed)
        else:
            self.missed = self.bare = missed
            self._reduced_once = True
        self.computed_at(streams.current())
        unit, places = self.unit, tuple(self.places)
        contribution = Contribution(unit, unit.ranks, input, places, self._deliver, self._shard)
        self._shard = None
        self.places.clear()
        return contribution

    def contribute_among_near(self, gradients: list[torch.Tensor | None], streams: CommStreams) -> Contribution:
        """As ``contribute``, to a reduction whose result waits on this rank for one that has its second part, too."""
        input = self.sums if self.sums.has_sum else self.input
        missed = input.missing(gradients)
        waits = self._shard is not None or self._shards_coming
        self._shard_missed = missed & self._shard_missed if waits else missed
        self.computed_at(streams.current())
        ranks, places = self.unit.ranks.among_near, tuple(self.places)
        self._shards_coming += 1
        self.places.clear()
        return Contribution(self.unit, ranks, input, places, self._keep_shard)

    def _keep_shard(self, shard: torch.Tensor) -> None:
        self._shards_coming -= 1
        if self._shard is None:
            self._shard = shard
        else:
            self._shard.add_(shard)

    def _note_missed(self, missed: frozenset[int]) -> None:
        if self.unfilled:
            self.unfilled = self.unfilled & missed if self._owner_of[None].grad is not None else frozenset()
        if self._reduced_once:
            self.missed &= missed
            self.bare &= missed
            return
        self._reduced_once = True
        self.missed = missed
        if missed:
            self.bare = frozenset(filter(self._is_bare, missed))

    def _is_bare(self, index: int) -> bool:
        owner = self._owner_of.get(None if None in self._owner_of else index)
        return owner is not None and owner.requires_grad and (owner.grad is None or index in self.unfilled)

    def drop(self, indices: frozenset[int]) -> None:
        """Take ``.grad`` away from parameters for which no rank had a gradient."""
        if self.fills_unused:
            return
        if None not in self._owner_of:
            for index in indices:
                self._owner_of[index].grad = None
            return
        # One ``.grad`` for all of them.
        filled = {index for index, slot in enumerate(self._layout.slots) if slot.numel}
        self.unfilled = indices & filled
        if self.unfilled == filled:
            self._owner_of[None].grad = None
            self.unfilled = frozenset()

    def discard(self) -> None:
        """Release the gradients of a backward that failed."""
        self.missed = self.bare = frozenset()
        self._reduced_once = False
        self.places.clear()
        self._shards_coming = 0
        self.input.discard()
        self.sums.discard()

    def discard_sums(self) -> None:
        """Forget what earlier backwards left to be reduced."""
        self._shard = None
        self._shards_coming = 0
        self.sums.has_sum = False

    def keep_memory(self) -> None:
        """Leave memory to reductions that read it and may not have ended."""
        self.input.keep_memory()
        self.sums.keep_memory()

    def drop_unreduced(self) -> None:
        """Forget gradients that the last backward computed and did not reduce."""
        if self.input.claimed:
            # Written in place, and then part of no reduction.
            self.discard()
        if not self.sums.has_sum:
            # A backward that accumulated nowhere.
            self.places.clear()

    def end_backward(self) -> None:
        """Run the user's hooks on the originals, into which autograd itself accumulates nothing."""
        self.missed = self.bare = frozenset()
        self._reduced_once = self.reduced = False
        if not any(map(_torch_private.hooks_after_accumulation, self._owners)):
            return
        for owner in self._owners:
            if owner.grad is not None:
                for hook in _torch_private.post_accumulate_grad_hooks(owner):
                    hook(owner)

    def _deliver(self, result: torch.Tensor) -> object:
        if self.stepper is not None:
            self.stepper.before_gradient(self.unit)
        if result.dtype != self._dtypes.grad:
            result = result.to(self._dtypes.grad)
        if self.scale is not None:
            result.mul_(self.scale)
        present = list(map(_gradient_of, self._owners))
        fresh = all(map(is_, present, repeat(None)))
        # Nearly always there is none: gradients are set to None between steps.
        whole = None if fresh and self._offload_manager is None else self.delivered
        if whole is not None and self._offload_manager is None:
            whole.add_(result)
            return present
        fresh |= whole is not None
        if self._offload_manager is not None:
            spec = self.unit.spec
            stored = self._offload_manager.store_grad(spec, result, whole)
            # A rank that holds no element has no owner, and nothing views the gradient.
            device = self._owners[0].device if self._owners else None
            refuse_gradient(self._offload_manager, spec, stored, result, device, self.unit.ranks.world.rank)
            if stored is whole:
                return present
            if not fresh:
                self._offload_manager.sync_for_step()
            result = stored
        if fresh:
            self._assign(result)
            if self.stepper is not None and whole is None:
                self._let_step(self.stepper, result)
            return None
        # The user replaced or kept some gradients: add to what is there, parameter by parameter.
        for owner, current, view in zip(self._owners, present, self._split(result), strict=True):
            if not owner.requires_grad:
                continue
            if current is None:
                owner.grad = view
            elif current.shape != view.shape:
                raise StateError(
                    f"Cannot writeback when the gradient shape changes\nExpects {view.shape} but got {current.shape} "
                    f"in unit '{self.unit.spec.label}' on rank {self.unit.ranks.world.rank}. Set .grad to a tensor "
                    "of the shard's shape."
                )
            else:
                current.add_(view)
        self._delivered = None
        return present

    def _let_step(self, stepper: BackwardStep, stored: torch.Tensor) -> None:
        """Let ``stepper`` have the gradient, unless it may still change or be taken away."""
        offload_manager, hooked = self._offload_manager, any(map(_torch_private.hooks_after_accumulation, self._owners))
        if offload_manager is not None and not (self.missed or self.unfilled or hooked):
            stepper.take(self.unit, self._owners, stored, partial(offload_manager.await_grad, self.unit.spec, stored))

    @property
    def delivered(self) -> torch.Tensor | None:
        """The reduced gradient (``[shard_numel]``) if every ``.grad`` is still the view of it that was assigned."""
        flat = None if self._delivered is None else self._delivered()
        if flat is None:
            return None
        present = list(map(_gradient_of, self._owners))
        # Other gradients may get the same ids, but not in this memory; the same objects may get other memory, where a
        # user sets ``.grad.data``. So both are compared.
        same = list(map(id, present)) == self._shown and list(map(torch.Tensor.data_ptr, present)) == self._addresses
        return flat if same else None

    def _assign(self, flat: torch.Tensor) -> None:
        # The weak reference needs the tensor that views keep alive, their base: of a view's view, that is not the view.
        if flat._is_view():
            flat = flat.data
        views = self._split(flat)
        self._delivered = None
        if all(map(_is_trained, self._owners)):
            for owner, view in zip(self._owners, views, strict=True):
                owner.grad = view
            self._delivered = TensorWeakRef(flat)
            self._shown = list(map(id, views))
            self._addresses = list(map(torch.Tensor.data_ptr, views))
            return
        for owner, view in zip(self._owners, views, strict=True):
            if owner.requires_grad:
                owner.grad = view

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The ranges of ``flat`` (``[shard_numel]``) for the targets, as what these are."""
        if self._strided or self.unit.ranks.reduction is None:
            start = flat.storage_offset()
            parts = [flat.as_strided(each.shape, each.stride, start + each.offset) for each in self._targets]
        else:
            split = torch.split_with_sizes(flat, self._sizes)
            parts = [split[index] for index in self._picks]
            if self._shapes:
                pairs = zip(parts, self._shapes, strict=True)
                parts = [part if shape is None else part.view(shape) for part, shape in pairs]
        if self._placed is None:
            return parts
        return [self._placed(target.index, part) for target, part in zip(self._targets, parts, strict=True)]
