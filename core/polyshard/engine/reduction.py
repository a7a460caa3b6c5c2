"""From the gradients of a unit's views to ``.grad`` of its originals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import StateError
from ..interfaces import COMPLETED, BufferRole, Collectives, OffloadManager, ReduceOp, UnitDtypes, UnitSpec, Work
from . import _torch_private
from .buffer import FlatBuffer, view_of
from .layout import FlatLayout
from .originals import Recipient
from .ranks import RankGrid
from .step import Step


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
        self._result: torch.Tensor | None = None
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._recipients = tuple(recipients)
        self._owners = [recipient.parameter for recipient in recipients]
        self._sizes: list[int] = []
        self._picks: list[int] = []
        cursor = 0
        for recipient in recipients:
            if recipient.offset > cursor:
                self._sizes.append(recipient.offset - cursor)
            self._picks.append(len(self._sizes))
            self._sizes.append(recipient.numel)
            cursor = recipient.offset + recipient.numel
        if cursor < layout.shard_numel:
            self._sizes.append(layout.shard_numel - cursor)

    @property
    def wire_nbytes(self) -> int:
        """Bytes of a reduction's input."""
        return self._layout.padded_numel * self._wire_dtype.itemsize

    @property
    def unreduced(self) -> bool:
        """Whether gradients of earlier microbatches wait for a synchronising backward."""
        return self._has_unreduced

    def keep(self, gradients: list[torch.Tensor | None]) -> None:
        """Add ``gradients`` to those that wait for a synchronising backward."""
        if self._unreduced is None:
            self._unreduced = FlatBuffer.allocate(self._layout, self._dtypes.reduce, self.spec.device)
        if self._has_unreduced:
            views, present = _present(self._unreduced.views, gradients)
            if present:
                _torch_private.foreach_add_(views, present)
        else:
            self._unreduced.attach()
            self._copy_in(self._unreduced, gradients)
            self._has_unreduced = True

    def reduce(self, gradients: list[torch.Tensor | None], step: Step) -> None:
        """Reduce ``gradients``, and those that waited, over ranks; ``.grad`` has the result after ``Lanes.drain``."""
        layout, device = self._layout, self.spec.device
        if self.grid.shard is None:
            # Reduced in place, and then what ``.grad`` views: not memory that comes and goes.
            whole = torch.empty(layout.padded_numel, dtype=self._dtypes.reduce, device=device)
            wire = FlatBuffer(whole, layout, resizable=False)
        else:
            if self._wire is None:
                self._wire = FlatBuffer.allocate(layout, self._wire_dtype, device)
            wire = self._wire
            if wire.attached:
                # The unit's last reduction is still reading it: a unit used twice in one backward.
                step.lanes.drain()
            wire.attach()
        if self._has_unreduced:
            self.keep(gradients)
            assert self._unreduced is not None
            wire.flat.copy_(self._unreduced.flat)
            self._unreduced.release()
            self._has_unreduced = False
        else:
            self._copy_in(wire, gradients)
        if step.audit is not None:
            step.audit.agree(self.grid.world, self.spec.name or "(root)", "reduce", wire.flat)
        retire: Callable[[], None] = wire.release
        step.lanes.reduce(lambda: self._issue(wire.flat), self._deliver, retire)

    def discard(self) -> None:
        """Release what a backward that failed left behind."""
        if self._wire is not None:
            self._wire.release()

    def let_go(self) -> None:
        """Do not keep the last reduced gradient alive once the user has dropped it."""
        if self._views and self._owners[0].grad is None:
            self._flat, self._views = None, []

    def forget(self) -> None:
        """Let reductions in flight end without a result."""
        self._result = None

    def run_post_accumulate_hooks(self) -> None:
        """Run the hooks that the user put on the originals: there, autograd accumulates nothing that would."""
        for owner in self._owners:
            for hook in _torch_private.post_accumulate_grad_hooks(owner):
                hook(owner)

    def _copy_in(self, buffer: FlatBuffer, gradients: list[torch.Tensor | None]) -> None:
        if buffer.gaps:
            _torch_private.foreach_zero_(buffer.gaps)
        views, present = _present(buffer.views, gradients)
        if len(present) < len(gradients):
            # A parameter that took no part: its range is zero, on this rank or on all.
            missing = [view for view, gradient in zip(buffer.views, gradients, strict=True) if gradient is None]
            _torch_private.foreach_zero_(missing)
        if present:
            _torch_private.foreach_copy_(views, present)

    def _issue(self, wire: torch.Tensor) -> Work:
        grid = self.grid
        if grid.shard is None:
            self._result = wire
            return COMPLETED if grid.replicate is None else grid.replicate.all_reduce(wire, op=ReduceOp.MEAN)
        result = torch.empty(self._layout.shard_numel, dtype=self._dtypes.reduce, device=wire.device)
        nbytes = grid.shard.scratch_nbytes(BufferRole.REDUCE, wire.numel(), wire.dtype, result.dtype)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=wire.device) if nbytes else None
        self._result = result
        work = grid.shard.reduce_scatter(result, wire, op=ReduceOp.MEAN, scratch=scratch)
        return work if grid.replicate is None else _ThenAllReduce(work, grid.replicate, result)

    def _deliver(self) -> None:
        result = self._result
        if result is None:
            return
        self._result = None
        if result.dtype != self._dtypes.grad:
            result = result.to(self._dtypes.grad)
        present = [owner.grad for owner in self._owners]
        # The same objects may stand on other memory: a user may set ``.grad.data``.
        accumulates = (
            bool(self._views)
            and all(current is view for current, view in zip(present, self._views, strict=True))
            and list(map(torch.Tensor.data_ptr, self._views)) == self._addresses
        )
        if accumulates and self._flat is not None:
            if self._parks:
                flat = self._offload.store_grad(self.spec, result, self._flat)
                if flat is not self._flat:
                    self._assign(flat)
            else:
                self._flat.add_(result)
            return
        fresh = all(current is None for current in present)
        if self._parks:
            result = self._offload.store_grad(self.spec, result, None)
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
                    f"in unit '{self.spec.name or '(root)'}' on rank {self.grid.world.rank}. Set .grad to a tensor "
                    "of the shard's shape."
                )
            else:
                current.add_(view)
        self._flat, self._views = None, []

    def _assign(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._views = self._split(flat)
        self._addresses = list(map(torch.Tensor.data_ptr, self._views))
        for owner, view in zip(self._owners, self._views, strict=True):
            if owner.requires_grad:
                owner.grad = view
        if not all(owner.requires_grad for owner in self._owners):
            self._flat, self._views = None, []

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        if self.grid.shard is None:
            return [view_of(flat, each.shape, each.stride, each.offset) for each in self._recipients]
        parts = torch.split_with_sizes(flat, self._sizes)
        return [parts[index] for index in self._picks]


class _ThenAllReduce:
    """A reduction over shards, then over the replicas of each shard."""

    def __init__(self, first: Work, replicate: Collectives, result: torch.Tensor) -> None:
        self._first = first
        self._replicate = replicate
        self._result = result
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._first.wait()
            self._replicate.all_reduce(self._result, op=ReduceOp.MEAN).wait()
            self._done = True


def _present(
    views: list[torch.Tensor], gradients: list[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(gradients):
        return views, present
    return [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None], present
