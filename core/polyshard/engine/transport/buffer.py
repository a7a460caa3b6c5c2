"""Flat memory with one view per parameter, attached only while it is in use."""

from __future__ import annotations

import torch

from ...interfaces import BufferRole, Collectives
from ..planning.layout import FlatLayout


class FlatBuffer:
    """A unit's worth of elements in one dtype, and static views of it, one per parameter.

    The views are made once. Their memory comes with ``attach`` and goes with ``release``, by resizing the one storage
    that they share: whatever autograd saved (a weight, its transpose) points at that storage and is right again once
    it has been filled again.

    A view's version counter is its own: writing through ``flat`` bumps none of them, so a gather between forward and
    backward does not look like an in-place change of a saved tensor.

    Reading a view while it is released is a crash, not an exception: callers keep views out of reach by then.
    """

    def __init__(self, flat: torch.Tensor, layout: FlatLayout, *, resizable: bool, rank: int = 0) -> None:
        self.flat = flat
        #: This rank's shard of ``flat``.
        self.own = flat.narrow(0, rank * layout.shard_numel, layout.shard_numel)
        self.dtype = flat.dtype
        self.views = [view_of(flat, slot.shape, slot.stride, slot.offset) for slot in layout.slots]
        self.gaps = [flat.narrow(0, offset, numel) for offset, numel in layout.gaps()]
        self.address = flat.data_ptr()
        self._storage = flat.untyped_storage()
        #: Bytes while attached.
        self.nbytes = self._storage.nbytes()
        self._resizable = resizable
        # Resizable but for that.
        self._kept = False
        self.attached = True

    @classmethod
    def allocate(
        cls, layout: FlatLayout, dtype: torch.dtype, device: torch.device, *, rank: int = 0, leaves: bool = False
    ) -> FlatBuffer:
        """A buffer that starts released. ``leaves``: its views collect gradients."""
        # Built inside an inference pass, views would refuse autograd for the rest of their life.
        with torch.inference_mode(False):
            flat = torch.empty(layout.padded_numel, dtype=dtype, device=device)
            buffer = cls(flat, layout, resizable=True, rank=rank)
            buffer.release()
            if leaves:
                buffer.make_leaves()
        return buffer

    @classmethod
    def lease(cls, layout: FlatLayout, dtype: torch.dtype, collectives: Collectives) -> FlatBuffer:
        """A buffer of leaves at a fixed address that ``collectives`` owns."""
        with torch.inference_mode(False):
            flat = collectives.lease(layout.padded_numel, dtype, BufferRole.GATHER)
            buffer = cls(flat, layout, resizable=False, rank=collectives.rank)
            buffer.attached = False
            buffer.make_leaves()
        return buffer

    @classmethod
    def over(cls, flat: torch.Tensor, layout: FlatLayout) -> FlatBuffer:
        """Leaves over memory that already holds the values and is never released."""
        with torch.inference_mode(False):
            buffer = cls(flat, layout, resizable=False)
            buffer.make_leaves()
        return buffer

    def make_leaves(self) -> None:
        """Let every view collect a gradient of its own."""
        for view in self.views:
            view.requires_grad_(True)

    def attach(self) -> None:
        """Give the buffer memory, uninitialised, from the current stream's pool. Nothing happens if it has some."""
        if self._resizable and not self.attached:
            self._storage.resize_(self.nbytes)
            self.address = self.flat.data_ptr()
        self.attached = True

    def release(self) -> None:
        """Take the memory away. Nothing happens if it has none."""
        if self._resizable and self.attached:
            self._storage.resize_(0)
        self.attached = False

    def keep(self) -> bool:
        """Leave the memory where it is from now on, with its values, whether or not it is released; to be called while
        it is attached. Returns whether that is possible: not where the memory is another's.
        """
        self._kept |= self._resizable
        self._resizable = False
        return self._kept

    def let_go(self) -> None:
        """End what ``keep`` began."""
        if self._kept:
            self._resizable, self._kept = True, False
            if not self.attached:
                self._storage.resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this buffer's memory."""
        if tensor.is_meta:
            # No addresses there.
            return self.attached and tensor.untyped_storage() is self._storage
        return self.attached and 0 <= tensor.data_ptr() - self.address < self.nbytes


def view_of(flat: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor over ``flat``'s memory with a version counter of its own, unknown to autograd as a view."""
    return flat.as_strided(shape, stride, flat.storage_offset() + offset).data
