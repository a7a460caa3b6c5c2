"""What an operation asks of a device: multiplications, additions, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ._torch_private import argument, tree_leaves
from .recording import Recorder, Unit

#: Operations that give memory and launch nothing.
_SILENT = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "detach",
        "lift_fresh",
        "alias",
        "_unsafe_view",
        "_reshape_alias",
        "resize_",
    }
)


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> int:
    """Of fused attention's forward, for ``[batch, heads, length, width]``: two products, half of them where causal."""
    batch, heads, length, width = query.shape
    whole = 2 * batch * heads * length * key.shape[2] * (width + value.shape[3])
    return whole // 2 if causal else whole


def note_operation(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    """Record what ``func`` launched, if anything.

    Bytes are those of its operands, each read or written once. Views launch nothing.
    """
    packet = func.overloadpacket
    name = packet.__name__
    if name in _SILENT or func.is_view:
        return
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
    if not read and not written:
        return
    nbytes = _nbytes(read) + _nbytes(written)
    itemsize = max(tensor.itemsize for tensor in (*read, *written))
    if name.startswith("_scaled_dot_product"):
        backward = name.endswith("backward")
        query, key, value = read[1:4] if backward else read[:3]
        flops = attention_flops(query, key, value, bool(argument(func, "is_causal", args, kwargs, False)))
        # Backward makes five products of the forward's two.
        flops = flops * 5 // 2 if backward else flops
        recorder.kernel(name, Unit.ATTENTION, flops, nbytes, query.itemsize)
        return
    formula: Callable[..., int] | None = flop_registry.get(packet)
    if formula is None:
        recorder.kernel(name, Unit.NONE, 0, nbytes, itemsize)
        return
    flops = int(formula(*args, **kwargs, out_val=out))
    recorder.kernel(name, Unit.MATMUL, flops, nbytes, read[0].itemsize if read else itemsize)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    # An expanded operand is read as often as it has memory, not elements.
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)
