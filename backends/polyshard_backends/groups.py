"""Checks that every backend makes on the arguments of a collective and on a partition of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from polyshard.errors import CollectiveError, WorldSizeError

#: Dtypes that torch can add up on every device.
REDUCIBLE_DTYPES: frozenset[torch.dtype] = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    }
)


def own_group(rank_lists: Sequence[Sequence[int]], rank: int, world_size: int) -> tuple[int, ...]:
    """The list that contains ``rank``, after checking that the lists are disjoint and cover the group.

    Raises:
        WorldSizeError: a rank is missing, listed twice, or outside ``range(world_size)``.
    """
    listed = [member for members in rank_lists for member in members]
    if sorted(listed) != list(range(world_size)):
        raise WorldSizeError(
            f"partition of a group of {world_size} ranks names the ranks {sorted(listed)}, on rank {rank}; list each "
            f"rank from 0 to {world_size - 1} exactly once"
        )
    return next(tuple(members) for members in rank_lists if rank in members)


def check_slices(operation: str, whole: torch.Tensor, part: torch.Tensor, rank: int, world_size: int) -> None:
    """Check that ``whole`` holds one ``part`` for each rank.

    Raises:
        CollectiveError: the sizes do not fit, or a tensor is not contiguous.
    """
    if whole.numel() != world_size * part.numel():
        raise CollectiveError(
            f"{operation} on rank {rank}: the whole has {whole.numel()} elements and the slice {part.numel()}; with "
            f"{world_size} ranks the whole must have {world_size * part.numel()}"
        )
    if not (whole.is_contiguous() and part.is_contiguous()):
        raise CollectiveError(f"{operation} on rank {rank}: tensors must be contiguous; pass flat buffers")


def check_same_dtype(operation: str, whole: torch.Tensor, part: torch.Tensor, rank: int) -> None:
    """Check that both tensors have one dtype.

    Raises:
        CollectiveError: they differ.
    """
    if whole.dtype is not part.dtype:
        raise CollectiveError(
            f"{operation} on rank {rank}: the whole is {whole.dtype} and the slice {part.dtype}; cast before the call"
        )


def check_source(src: int, rank: int, world_size: int) -> None:
    """Check that ``src`` is a rank of the group.

    Raises:
        CollectiveError: it is not.
    """
    if not 0 <= src < world_size:
        raise CollectiveError(f"broadcast on rank {rank}: source {src} is not a group rank; use 0 to {world_size - 1}")
