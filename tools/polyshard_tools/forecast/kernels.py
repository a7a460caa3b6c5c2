"""The kernels of an operation: multiplications, additions, bytes, and operations that CUDA fuses.

While a step is traced, tensors on the meta device take the way of those on CUDA: the kernels, the tensors that autograd
saves, and how often memory is read depend on it. Other devices' tensors are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from ._torch_private import argument, attention, tree_leaves
from .recording import Bound, StepRecorder

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


def note_operation(recorder: StepRecorder, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
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
        recorder.kernel(name, Bound.ATTENTION, flops, nbytes, query.itemsize)
        return
    formula: Callable[..., int] | None = flop_registry.get(packet)
    if formula is None:
        recorder.kernel(name, Bound.NONE, 0, nbytes, itemsize)
        return
    flops = int(formula(*args, **kwargs, out_val=out))
    recorder.kernel(name, Bound.MATMUL, flops, nbytes, read[0].itemsize if read else itemsize)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    # An expanded operand is read as often as it has memory, not elements.
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


_HALVES = (torch.bfloat16, torch.float16)
#: The widest head that flash attention takes.
_WIDEST_HEAD = 256


@contextmanager
def fused_as_on_cuda(recorder: StepRecorder, branched: Callable[[], None]) -> Iterator[None]:
    """Attention and RMS norms on the meta device are one kernel forward and one backward inside.

    A branch on a tensor, which has no value there, takes the way of True, and ``branched`` is called: models ask
    whether all of a mask is set, and where they ask for numbers they are refused.
    """

    def is_nonzero(tensor: torch.Tensor) -> bool:
        branched()
        return True

    def rms_norm(
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        normed: torch.Tensor = _RmsNorm.apply(input, weight, len(normalized_shape), recorder)  # type: ignore[no-untyped-call]
        return normed

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    stand_ins = {"scaled_dot_product_attention": _attention, "rms_norm": rms_norm, "is_nonzero": is_nonzero}
    for name, stand_in in stand_ins.items():
        library.impl(name, stand_in, "AutogradMeta")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        # Its registrations end with it.
        del library


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is None and query.dtype in _HALVES and query.shape[-1] <= _WIDEST_HEAD and query.ndim == 4:
        return attention("flash", query, key, value, None, dropout_p, is_causal, scale)
    # Other kernels take every head of keys and values by itself, and a mask of floats.
    heads = query.shape[-3]
    if enable_gqa and key.shape[-3] != heads:
        key, value = (each.repeat_interleave(heads // each.shape[-3], -3) for each in (key, value))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    if query.ndim != 4:
        return attention("math", query, key, value, attn_mask, dropout_p, is_causal, scale)
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
    return attention("efficient", query, key, value, bias, dropout_p, is_causal, scale)


class _RmsNorm(torch.autograd.Function):
    """``rms_norm`` as one CUDA kernel, which saves its input, the weight, and fp32 reciprocals of the rows' roots."""

    @staticmethod
    @override
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, dimensions: int, recorder: StepRecorder
    ) -> torch.Tensor:
        rows = input.shape[: input.ndim - dimensions]
        reciprocals = input.new_empty((*rows, *([1] * dimensions)), dtype=torch.float32)
        normed = torch.empty_like(input, memory_format=torch.contiguous_format)
        ctx.save_for_backward(input, weight, reciprocals)
        ctx.recorder = recorder
        recorder.kernel("rms_norm", Bound.NONE, 0, input.nbytes + normed.nbytes, input.itemsize)
        return normed

    @staticmethod
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        input, weight, _ = ctx.saved_tensors
        of_input = torch.empty_like(input, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        nbytes = 2 * input.nbytes + gradient.nbytes
        ctx.recorder.kernel("rms_norm_backward", Bound.NONE, 0, nbytes, input.itemsize)
        if of_weight is not None:
            # A second kernel adds the weight's gradient up over rows.
            ctx.recorder.kernel("rms_norm_backward", Bound.NONE, 0, input.nbytes + gradient.nbytes, input.itemsize)
        return of_input, of_weight, None, None
