"""A whole tensor as ``torch.distributed.checkpoint`` sees it: its shape, and the boxes of it that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import StateError
from ..planning.layout import Piece, Slot
from .boxes import Box, inverse, range_boxes, storage_order

#: A FileSystemWriter that is given brings a stager of its own, which makes whole tensors to copy into.
_STAGER = (
    " In torch's async_save, give checkpoint_id alone, or async_stager=DefaultStager(...) with a storage_writer that "
    "copies by itself."
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of the whole tensor, and this rank's memory for it."""

    box: Box
    view: torch.Tensor
    """Shape ``box.sizes``; a view: reading a checkpoint into it changes what it views."""


class CheckpointTensor(torch.Tensor):
    """Stands for a whole tensor of which this rank holds some chunks, possibly none.

    It has the whole tensor's shape, dtype and device and the memory of one element; computing with it raises. The
    planners of ``torch.distributed.checkpoint`` look for a tensor with the three dunder methods below, by which
    ``DTensor`` too tells them about its chunks: a plain object with these methods would be written but not found again.
    """

    #: None for a stand-in that ``torch.distributed.checkpoint.async_save`` makes, and gives those of its copy.
    chunks: tuple[Chunk, ...] = ()

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, chunks: Iterable[Chunk]
    ) -> CheckpointTensor:
        """A stand-in for a tensor of ``shape``."""
        with torch.inference_mode(False), torch.no_grad():
            stand_in = torch.empty((), dtype=dtype, device=device).expand(tuple(shape)).as_subclass(cls)
        stand_in.chunks = tuple(chunks)
        return stand_in

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What the tensor is like may be asked; its values are not there."""
        if func not in _DESCRIPTIONS:
            hint = _STAGER if func is torch.Tensor.copy_ else ""
            raise StateError(
                f"A tensor of a sharded state dict cannot be used in {getattr(func, '__name__', func)}(): this rank "
                "holds a part of it. Pass the state dict to torch.distributed.checkpoint.save or load, or read whole "
                f"parameters inside polyshard.unsharded(model).{hint}"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Through chunks, which travel to a process of ``async_save`` in shared memory."""
        return CheckpointTensor, (tuple(self.shape), self.dtype, self.device, self.chunks)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, dtype and chunks."""
        boxes = ", ".join(f"{list(chunk.box.offsets)}+{list(chunk.box.sizes)}" for chunk in self.chunks)
        return f"CheckpointTensor(shape={tuple(self.shape)}, dtype={self.dtype}, chunks=[{boxes}])"

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """What this rank can write. Ranks that hold the same chunk offer it alike, and one of them writes it."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_described(chunk.box), properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank wants to read."""
        return [_described(chunk.box) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of the chunk at ``index.offset``."""
        for chunk in self.chunks:
            if chunk.box.offsets == tuple(index.offset or ()):
                return chunk.view
        raise StateError(f"This rank holds no chunk of '{index.fqn}' at {index.offset}.")


_DESCRIPTIONS: frozenset[Any] = frozenset(
    {
        # Asked by debuggers, and by whoever explores a state dict.
        torch.Tensor.__dir__,
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.element_size,
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.device.__get__,
        torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        # What the stager of torch's async_save copies a tensor by, before it copies the tensor's attributes.
        torch.Tensor.data_ptr,
        torch.Tensor.new_empty,
        torch.Tensor.set_,
        torch.Tensor.storage_offset,
        torch.Tensor.stride,
        torch.Tensor.untyped_storage,
    }
)


def _described(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def of_piece(slot: Slot, piece: Piece | None, flat: torch.Tensor) -> CheckpointTensor:
    """The parameter of ``slot``, or a tensor of its geometry, of which this rank holds ``piece``.

    Args:
        slot: The whole parameter.
        piece: The range of its elements that this rank holds; None for none.
        flat: Shape ``[piece.numel]``, contiguous: these elements in storage order.
    """
    # Empty parameters lie in no shard, and would be missing from the checkpoint if nobody wrote them.
    if slot.numel == 0:
        return whole(flat.new_empty(slot.shape))
    chunks = []
    if piece is not None:
        order = storage_order(slot.shape, slot.stride)
        back = inverse(order)
        cursor = 0
        for box in range_boxes([slot.shape[dim] for dim in order], piece.start, piece.stop):
            part = flat.narrow(0, cursor, box.numel).view(box.sizes).permute(back)
            chunks.append(Chunk(box.permuted(back), part))
            cursor += box.numel
    return CheckpointTensor(slot.shape, flat.dtype, flat.device, chunks)


def of_rows(slot: Slot, piece: Piece | None, rows: torch.Tensor) -> CheckpointTensor:
    """As ``of_piece``, of a piece that is whole rows: ``rows``, shape ``(rows, ...)``, with any strides."""
    if slot.numel == 0:
        return whole(rows.new_empty(slot.shape))
    chunks = []
    if piece is not None:
        first = piece.start * slot.shape[0] // slot.numel
        chunks.append(Chunk(Box((first, *(0 for _ in slot.shape[1:])), tuple(rows.shape)), rows))
    return CheckpointTensor(slot.shape, rows.dtype, rows.device, chunks)


def whole(tensor: torch.Tensor) -> CheckpointTensor:
    """A tensor that this rank holds whole, with any strides."""
    box = Box((0,) * tensor.ndim, tuple(tensor.shape))
    return CheckpointTensor(tensor.shape, tensor.dtype, tensor.device, [Chunk(box, tensor.detach())])
