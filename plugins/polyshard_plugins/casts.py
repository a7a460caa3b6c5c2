"""Casting what goes into and comes out of a forward, through nested containers."""

from __future__ import annotations

from typing import Any

import torch
from polyshard.interfaces import InputCast, OutputCast
from polyshard.nested import map_tensors

from .dtypes import COMPUTABLE


def make_input_cast(dtype: torch.dtype) -> InputCast:
    """A cast of every floating-point tensor in a forward's ``(args, kwargs)`` to ``dtype``.

    Looks into tuples, named tuples, lists, dicts and dataclasses. Integer, bool, complex and 8-bit floating-point
    tensors pass as they are. A tensor at several places stays one tensor, as attention modules ask. Every object in
    which nothing is cast is returned itself, not a copy. Differentiable: gradients of inputs come back in the inputs'
    own dtype.
    """
    castable = _castable_to(dtype)

    def cast_tensor(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in castable else tensor

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Nearly every call in a step has inputs that are tensors in the right dtype already, and ends in this loop.
        for value in (*args, *kwargs.values()) if kwargs else args:
            if value is not None and (type(value) is not torch.Tensor or value.dtype in castable):
                break
        else:
            return args, kwargs
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            return (args[0].to(dtype),), kwargs
        return map_tensors(cast_tensor, (args, kwargs))

    return cast


def make_output_cast(dtype: torch.dtype) -> OutputCast:
    """The same for a forward's output, which may be one tensor or nested containers of them."""
    castable = _castable_to(dtype)

    def cast_tensor(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in castable else tensor

    def cast(output: Any) -> Any:
        if type(output) is torch.Tensor:
            return output.to(dtype) if output.dtype in castable else output
        return map_tensors(cast_tensor, output)

    return cast


def _castable_to(dtype: torch.dtype) -> frozenset[torch.dtype]:
    # 8-bit floats are left out: they mean something only with scales, which travel beside them.
    return frozenset(COMPUTABLE) - {dtype}
