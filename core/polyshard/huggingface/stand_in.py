"""Tensors without values that remember of which others they were put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError
from ..state.boxes import Box
from .parts import Part, whole

aten = torch.ops.aten


class StandIn(torch.Tensor):
    """A tensor on the meta device of which each element is an element of a named tensor, and it is known which.

    Slicing, ``cat``, ``stack``, ``chunk``, ``transpose`` and their like lead to further stand-ins. What computes, or
    puts elements into rows of another length, raises ``UnsupportedError``.
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> StandIn:
        """The tensor ``name`` itself."""
        return cls.made(tuple(shape), dtype, (whole(name, shape),) if math.prod(shape) else ())

    @classmethod
    def made(cls, shape: tuple[int, ...], dtype: torch.dtype, parts: Iterable[Part]) -> StandIn:
        """One of ``shape`` that is put together of ``parts``."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.parts = tuple(parts)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Follow ``func`` where it only moves elements."""
        follow = _FOLLOWED.get(func)
        if follow is None:
            raise UnsupportedError(
                f"{getattr(func, '__name__', func)} does more than to put tensors together, so which elements of the "
                "files a rank needs is not known. Use slices, cat, stack, chunk, split, transpose and the like."
            )
        return follow(*args, **(kwargs or {}))


def _same(tensor: StandIn, **_: Any) -> StandIn:
    return StandIn.made(tuple(tensor.shape), tensor.dtype, tensor.parts)


def _cast(tensor: StandIn, dtype: torch.dtype | None = None, **_: Any) -> StandIn:
    if dtype not in (None, tensor.dtype):
        raise UnsupportedError(
            f"a conversion made {dtype} of a tensor of {tensor.dtype}. Leave dtypes alone: values are cast to the "
            "model's when they are read."
        )
    return _same(tensor)


def _slice(tensor: StandIn, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> StandIn:
    if step != 1:
        raise UnsupportedError(f"a slice takes every {step}th element. Use slices without a step.")
    low, high, _ = slice(start, end).indices(tensor.shape[dim])
    return _narrow(tensor, dim, low, max(high - low, 0))


def _narrow(tensor: StandIn, dim: int, start: int, length: int) -> StandIn:
    dim %= tensor.ndim
    shape = (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])
    box = Box((*(0,) * dim, start, *(0,) * (tensor.ndim - dim - 1)), shape)
    inside = (part.within(box) for part in tensor.parts)
    return StandIn.made(shape, tensor.dtype, [part.moved(dim, -start) for part in inside if part is not None])


def _select(tensor: StandIn, dim: int, index: int) -> StandIn:
    dim %= tensor.ndim
    return _squeeze(_narrow(tensor, dim, index % tensor.shape[dim], 1), dim)


def _squeeze(tensor: StandIn, dim: int | Sequence[int] | None = None) -> StandIn:
    asked = range(tensor.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for each in sorted({each % tensor.ndim for each in asked} if tensor.ndim else (), reverse=True):
        if tensor.shape[each] == 1:
            shape = tuple(tensor.shape[:each]) + tuple(tensor.shape[each + 1 :])
            tensor = StandIn.made(shape, tensor.dtype, [part.without(each) for part in tensor.parts])
    return tensor


def _unsqueeze(tensor: StandIn, dim: int) -> StandIn:
    dim %= tensor.ndim + 1
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
    return StandIn.made(shape, tensor.dtype, [part.widened(dim) for part in tensor.parts])


def _permute(tensor: StandIn, dims: Sequence[int]) -> StandIn:
    order = [dim % tensor.ndim for dim in dims]
    shape = tuple(tensor.shape[dim] for dim in order)
    return StandIn.made(shape, tensor.dtype, [part.permuted(order) for part in tensor.parts])


def _transpose(tensor: StandIn, first: int, second: int) -> StandIn:
    order = list(range(tensor.ndim))
    first, second = first % tensor.ndim, second % tensor.ndim
    order[first], order[second] = second, first
    return _permute(tensor, order)


def _t(tensor: StandIn) -> StandIn:
    return _permute(tensor, range(tensor.ndim)[::-1])


def _cat(tensors: Sequence[StandIn], dim: int = 0) -> StandIn:
    first = tensors[0]
    for each in tensors:
        if not isinstance(each, StandIn):
            raise UnsupportedError("a conversion joins a tensor of its own with those of the files. Use theirs alone.")
        if each.dtype != first.dtype:
            raise UnsupportedError(f"a conversion joins tensors of {first.dtype} and {each.dtype}.")
    dim %= first.ndim
    parts: list[Part] = []
    extent = 0
    for each in tensors:
        if (*each.shape[:dim], *each.shape[dim + 1 :]) != (*first.shape[:dim], *first.shape[dim + 1 :]):
            raise UnsupportedError(
                f"a conversion joins tensors of shapes {tuple(first.shape)} and {tuple(each.shape)}."
            )
        parts += [part.moved(dim, extent) for part in each.parts]
        extent += each.shape[dim]
    return StandIn.made((*first.shape[:dim], extent, *first.shape[dim + 1 :]), first.dtype, parts)


def _stack(tensors: Sequence[StandIn], dim: int = 0) -> StandIn:
    return _cat([_unsqueeze(each, dim) for each in tensors], dim)


def _split(tensor: StandIn, size: int, dim: int = 0) -> list[StandIn]:
    extent = tensor.shape[dim]
    return [_narrow(tensor, dim, start, min(size, extent - start)) for start in range(0, extent, max(size, 1))]


def _split_with_sizes(tensor: StandIn, sizes: Sequence[int], dim: int = 0) -> list[StandIn]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_narrow(tensor, dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _unbind(tensor: StandIn, dim: int = 0) -> list[StandIn]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _view(tensor: StandIn, size: Sequence[int], **_: Any) -> StandIn:
    known = math.prod(extent for extent in size if extent >= 0)
    shape = tuple(tensor.numel() // known if extent < 0 else extent for extent in size)
    if [extent for extent in shape if extent != 1] != [extent for extent in tensor.shape if extent != 1]:
        raise UnsupportedError(
            f"a conversion makes {shape} of a tensor of shape {tuple(tensor.shape)}: only dimensions of extent 1 may "
            "come and go."
        )
    tensor = _squeeze(tensor)
    for dim, extent in enumerate(shape):
        if extent == 1:
            tensor = _unsqueeze(tensor, dim)
    return tensor


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten._to_copy.default: _cast,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.view.default: _view,
}
