"""Arguments of collectives: checks that all backends make, views as bytes, and reductions over rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import CollectiveError, WorldSizeError
from polyshard.interfaces import ReduceOp

#: Dtypes that every version of gloo and NCCL knows by itself. Others travel as their bytes.
_KNOWN_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
)

#: Dtypes that both can sum.
GROUP_DTYPES = _KNOWN_DTYPES | {torch.bfloat16}

#: Dtypes that torch can add up on every device.
REDUCIBLE_DTYPES = GROUP_DTYPES | {torch.int16}

dtype_of = attrgetter("dtype")

_TORCH_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MEAN: dist.ReduceOp.AVG,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
}


def torch_op(op: ReduceOp) -> Any:
    """``torch.distributed``'s name for ``op``."""
    return _TORCH_OPS[op]


def own_group(rank_lists: Sequence[Sequence[int]], rank: int, world_size: int) -> tuple[int, ...]:
    """The list with ``rank``; raises ``WorldSizeError`` where the lists do not name each rank exactly once."""
    listed = [member for members in rank_lists for member in members]
    if sorted(listed) != list(range(world_size)):
        raise WorldSizeError(
            f"partition of a group of {world_size} ranks names the ranks {sorted(listed)}, on rank {rank}; list each "
            f"rank from 0 to {world_size - 1} exactly once"
        )
    return next(tuple(members) for members in rank_lists if rank in members)


def check_slices(operation: str, whole: torch.Tensor, part: torch.Tensor, rank: int, world_size: int) -> None:
    """Raise ``CollectiveError`` where ``whole`` does not hold one ``part`` for each rank, both contiguous."""
    if whole.numel() != world_size * part.numel():
        raise CollectiveError(
            f"{operation} on rank {rank}: the whole has {whole.numel()} elements and the slice {part.numel()}; with "
            f"{world_size} ranks the whole must have {world_size * part.numel()}"
        )
    if not (whole.is_contiguous() and part.is_contiguous()):
        raise CollectiveError(f"{operation} on rank {rank}: tensors must be contiguous; pass flat buffers")


def check_gather(out: torch.Tensor, shard: torch.Tensor, rank: int, world_size: int) -> None:
    """Raise ``CollectiveError`` where ``out`` does not hold one ``shard`` for each rank, of one dtype, contiguous."""
    check_slices("all_gather", out, shard, rank, world_size)
    if out.dtype is not shard.dtype:
        raise CollectiveError(
            f"all_gather on rank {rank}: the whole is {out.dtype} and the slice {shard.dtype}; cast before the call"
        )


def check_gathers(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], rank: int, world_size: int) -> None:
    """``check_gather`` of each pair: at C speed, as a launch may have one for each parameter of many units."""
    wholes, parts = zip(*pairs, strict=True)
    sizes = [world_size * numel for numel in map(torch.Tensor.numel, parts)]
    if (
        list(map(torch.Tensor.numel, wholes)) != sizes
        or list(map(dtype_of, wholes)) != list(map(dtype_of, parts))
        or not all(map(torch.Tensor.is_contiguous, chain(wholes, parts)))
    ):
        for whole, part in pairs:
            check_gather(whole, part, rank, world_size)


def check_contiguous(operation: str, tensor: torch.Tensor, rank: int) -> None:
    """Raise ``CollectiveError`` where ``tensor`` is not contiguous."""
    if not tensor.is_contiguous():
        raise CollectiveError(f"{operation} on rank {rank}: the tensor must be contiguous")


def check_blocks(
    out: torch.Tensor,
    out_splits: Sequence[int],
    source: torch.Tensor,
    in_splits: Sequence[int],
    rank: int,
    world_size: int,
) -> None:
    """Raise ``CollectiveError`` where these are not flat blocks of an ``all_to_all``: see the contract."""
    for name, tensor, splits in (("out", out, out_splits), ("input", source, in_splits)):
        if len(splits) != world_size or min(splits) < 0 or sum(splits) != tensor.numel():
            raise CollectiveError(
                f"all_to_all on rank {rank}: {name} has {tensor.numel()} elements and the splits {list(splits)}; give "
                f"{world_size} splits of 0 or more that add up to its elements"
            )
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise CollectiveError(
                f"all_to_all on rank {rank}: {name} has the shape {tuple(tensor.shape)} and the strides "
                f"{tensor.stride()}; pass flat buffers"
            )
    if out_splits[rank] != in_splits[rank]:
        raise CollectiveError(
            f"all_to_all on rank {rank}: its own block has {in_splits[rank]} elements in input and {out_splits[rank]} "
            f"in out; both splits must say the same of rank {rank}"
        )
    if out.dtype is not source.dtype:
        raise CollectiveError(
            f"all_to_all on rank {rank}: out is {out.dtype} and input {source.dtype}; cast before the call"
        )


def check_source(src: int, rank: int, world_size: int) -> None:
    """Raise ``CollectiveError`` where ``src`` is no rank of the group."""
    if not 0 <= src < world_size:
        raise CollectiveError(f"broadcast on rank {rank}: source {src} is not a group rank; use 0 to {world_size - 1}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or, in a dtype that a transport may not know, its bytes."""
    return tensor if tensor.dtype in _KNOWN_DTYPES else tensor.view(torch.uint8)


def carried_blocks(
    tensor: torch.Tensor, splits: Sequence[int], known: Collection[torch.dtype] = _KNOWN_DTYPES
) -> tuple[torch.Tensor, list[int]]:
    """A flat ``tensor`` and its ``splits``, or, in a dtype that is not ``known``, its bytes and how many of them."""
    if tensor.dtype in known:
        return tensor, list(splits)
    nbytes = tensor.element_size()
    return tensor.view(torch.uint8), [nbytes * numel for numel in splits]


def reduce_rows(out: torch.Tensor, rows: torch.Tensor, op: ReduceOp) -> None:
    """``out = op(rows)`` over the first dimension.

    ``rows``: ``[world_size, n]``, overwritten in some cases; ``out``: ``[n]``, of the same or a wider dtype. Sums are
    taken in ``out``'s dtype, but at least in fp32.
    """
    if op is ReduceOp.MEAN and out.dtype is torch.float32:
        # The engine's usual call; the general way below decides the same in more steps.
        torch.mean(rows, 0, dtype=torch.float32, out=out)
    elif op in (ReduceOp.MAX, ReduceOp.MIN):
        out.copy_(rows.amax(0) if op is ReduceOp.MAX else rows.amin(0))
    else:
        # fp16 overflows in a sum that its mean would fit; bf16 loses half of its digits.
        narrow = out.dtype in (torch.float16, torch.bfloat16)
        total = torch.empty(out.shape, dtype=torch.float32, device=out.device) if narrow else out
        if op is ReduceOp.MEAN and total.is_floating_point():
            torch.mean(rows, 0, dtype=total.dtype, out=total)
        else:
            torch.sum(rows, 0, dtype=total.dtype, out=total)
            if op is ReduceOp.MEAN:
                total.div_(rows.shape[0], rounding_mode="trunc")
        if narrow:
            out.copy_(total)


def receive_buffer(full: torch.Tensor, scratch: torch.Tensor | None) -> torch.Tensor:
    """Memory shaped like ``full``: the caller's ``scratch`` (uint8), or new memory."""
    if scratch is None:
        return torch.empty_like(full)
    nbytes = full.numel() * full.element_size()
    if scratch.numel() < nbytes:
        raise CollectiveError(
            f"reduce_scatter was given {scratch.numel()} bytes of scratch and needs {nbytes}; ask scratch_nbytes"
        )
    if scratch.numel() > nbytes:
        scratch = scratch[:nbytes]
    return scratch.view(full.dtype)
