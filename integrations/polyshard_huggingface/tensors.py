"""The tensors of a sharded model under all of their names, with the elements of each that this rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from polyshard.errors import ConfigError
from polyshard.inspect import ShardedModel, ShardedUnit
from polyshard.io.boxes import Box, Chunk
from polyshard.state.contents import names_within, outside_units
from polyshard.state.sharded import of_piece


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or persistent buffer of the model."""

    names: tuple[str, ...]
    """All of its fully-qualified names; more than one where it is tied."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    """In which ranks keep it."""
    chunks: tuple[Chunk, ...]
    """This rank's elements, as views of its memory."""
    unit: ShardedUnit | None = None
    """The unit that it is sharded with; None where every rank has it whole."""
    writes: bool = True
    """Whether this rank writes its elements, of which ranks with other parts of the model may have copies."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self.numel * self.dtype.itemsize

    def of(self, whole: torch.Tensor) -> ModelTensor:
        """The same, all of it in the memory of ``whole``."""
        return replace(self, chunks=(Chunk(Box.whole(self.shape), whole),) if self.numel else ())


def tensors_of(sharded: ShardedModel) -> list[ModelTensor]:
    """Every parameter and persistent buffer, those of units first, in their order; last what packed ones have beside.

    Raises ParameterChangedError: modules moved, so that a name is another parameter's now.
    """
    sharded.refuse_moved()
    return [*(each for unit in sharded.units for each in of_shard(unit, unit.master)), *_outside(sharded)]


def of_shard(unit: ShardedUnit, shard: torch.Tensor, shard_rank: int | None = None) -> list[ModelTensor]:
    """The parameters of ``unit``, with the elements in ``shard`` (``[shard_numel]``).

    ``shard_rank``: whose shard it is; None for this rank's.
    """
    held = unit.layout.pieces(unit.shard_rank if shard_rank is None else shard_rank)
    pieces, found = {piece.slot: piece for piece in held}, []
    for index, parameter in enumerate(unit.parameters):
        piece = pieces.get(index)
        chunks: tuple[Chunk, ...] = ()
        if piece is not None and piece.numel:
            chunks = of_piece(parameter, piece, shard.detach().narrow(0, piece.shard_offset, piece.numel)).chunks
        found.append(ModelTensor(parameter.names, parameter.shape, shard.dtype, chunks, unit, parameter.first))
    return found


def shared_out(tensor: ModelTensor) -> ModelTensor:
    """The part that this rank writes, where other ranks hold the same elements."""
    if not tensor.writes:
        return replace(tensor, chunks=())
    replicate = tensor.unit.replicate if tensor.unit is not None else None
    if replicate is None:
        return tensor
    chunks = []
    for chunk in tensor.chunks:
        dim = max(range(len(chunk.box.sizes)), key=lambda dim: chunk.box.sizes[dim], default=None)
        if dim is None:
            chunks += [chunk] if replicate.rank == 0 else []
            continue
        size = chunk.box.sizes[dim]
        begin, end = (size * number // replicate.world_size for number in (replicate.rank, replicate.rank + 1))
        if begin < end:
            part = chunk.box.narrowed(dim, begin, end - begin)
            chunks.append(Chunk(part, chunk.view.narrow(dim, begin, end - begin)))
    return replace(tensor, chunks=tuple(chunks))


def refuse_hollow(tensors: Iterable[ModelTensor], rank: int) -> None:
    """Raise ConfigError where something has no memory to be read into, or to be written from."""
    hollow = [f"'{each.names[0]}'" for each in tensors if any(chunk.view.is_meta for chunk in each.chunks)]
    if hollow:
        raise ConfigError(
            f"{', '.join(hollow)} are on the meta device (rank {rank}): shard() was told to leave them alone, so there "
            "is nothing to read into. Give each memory before shard(), by module.name = "
            "torch.nn.Parameter(torch.empty_like(module.name, device='cpu'))."
        )


def _outside(sharded: ShardedModel) -> Iterator[ModelTensor]:
    names = names_within(sharded, sharded.module)
    for name, tensor in outside_units(sharded).items():
        chunk = Chunk(Box.whole(tensor.shape), tensor)
        yield ModelTensor(names[name], tuple(tensor.shape), tensor.dtype, (chunk,) if tensor.numel() else ())


def joined(path: str, name: str) -> str:
    """The name of what is ``name`` in the module ``path``."""
    return f"{path}.{name}" if path else name
