"""What of a sharded model this rank holds, by the names that the unsharded model has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..errors import ConfigError
from ..functions.whole import state_dicts_of_pieces
from ..planning.layout import Piece
from ..runtime.root import Root
from ..runtime.unit import Unit
from ..state.boxes import Box
from ..state.sharded import Chunk, of_piece


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or persistent buffer of the model."""

    names: tuple[str, ...]
    """All of its fully-qualified names; more than one where it is tied."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    """In which ranks keep it."""
    chunks: tuple[Chunk, ...]
    """What of it is here, as views of this rank's memory."""
    unit: Unit | None = None
    """What it is sharded with; None where every rank has it whole."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


def held_in(root: Root) -> list[Held]:
    """Every parameter and persistent buffer, those of units first, in their order.

    Raises:
        ParameterChangedError: modules moved, so that a name is another parameter's now.
    """
    root.refuse_moved()
    return [*(held for unit in root.units for held in of_shard(unit, unit.master)), *_others(root)]


def of_shard(unit: Unit, shard: torch.Tensor, shard_rank: int | None = None) -> list[Held]:
    """The parameters of ``unit``, with what ``shard`` (``[shard_numel]``) has of them.

    ``shard_rank``: whose shard it is; None for this rank's.
    """
    pieces = unit.pieces if shard_rank is None else unit.layout.pieces(shard_rank)
    return _of_pieces(unit, shard, {piece.slot: piece for piece in pieces})


def of_whole(unit: Unit, flat: torch.Tensor) -> list[Held]:
    """The parameters of ``unit`` out of all its elements, ``flat`` (``[padded_numel]``)."""
    slots = enumerate(unit.layout.slots)
    return _of_pieces(unit, flat, {index: Piece(index, 0, slot.numel, slot.offset) for index, slot in slots})


def _of_pieces(unit: Unit, flat: torch.Tensor, pieces: dict[int, Piece]) -> list[Held]:
    found = []
    for index, (parameter, slot) in enumerate(zip(unit.parameters, unit.layout.slots, strict=True)):
        piece = pieces.get(index)
        chunks: Sequence[Chunk] = ()
        if piece is not None and piece.numel:
            chunks = of_piece(slot, piece, flat.detach().narrow(0, piece.shard_offset, piece.numel)).chunks
        found.append(Held(parameter.names, slot.shape, flat.dtype, tuple(chunks), unit))
    return found


def shared_out(held: Held) -> Held:
    """What of it this rank writes, where other ranks hold the same."""
    replicate = held.unit.grid.replicate if held.unit is not None else None
    if replicate is None:
        return held
    chunks = []
    for chunk in held.chunks:
        dim = max(range(len(chunk.box.sizes)), key=lambda dim: chunk.box.sizes[dim], default=None)
        if dim is None:
            chunks += [chunk] if replicate.rank == 0 else []
            continue
        size = chunk.box.sizes[dim]
        begin, end = (size * number // replicate.world_size for number in (replicate.rank, replicate.rank + 1))
        if begin < end:
            offsets = (*chunk.box.offsets[:dim], chunk.box.offsets[dim] + begin, *chunk.box.offsets[dim + 1 :])
            sizes = (*chunk.box.sizes[:dim], end - begin, *chunk.box.sizes[dim + 1 :])
            chunks.append(Chunk(Box(offsets, sizes), chunk.view.narrow(dim, begin, end - begin)))
    return replace(held, chunks=tuple(chunks))


def refuse_hollow(held: Iterable[Held], rank: int) -> None:
    """Raise ConfigError where something has no memory to be read into, or to be written from."""
    hollow = [f"'{each.names[0]}'" for each in held if any(chunk.view.is_meta for chunk in each.chunks)]
    if hollow:
        raise ConfigError(
            f"{', '.join(hollow)} are on the meta device (rank {rank}): shard() was told to leave them alone, so there "
            "is nothing to read into. Give each memory before shard(), by module.name = "
            "torch.nn.Parameter(torch.empty_like(module.name, device='cpu'))."
        )


def _others(root: Root) -> Iterator[Held]:
    module = root.module_states[0].module
    managed = {id(parameter.original) for unit in root.units for parameter in unit.parameters}
    with state_dicts_of_pieces():
        persistent = module.state_dict().keys()
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in _named(module):
        if id(tensor) not in managed and name in persistent:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        chunk = Chunk(Box((0,) * len(shape), shape), tensor.detach())
        yield Held(tuple(names[key]), shape, tensor.dtype, (chunk,) if tensor.numel() else ())


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
