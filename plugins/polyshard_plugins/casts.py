"""Casting what goes into and comes out of a forward, through nested containers."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from polyshard.interfaces import InputCast, OutputCast

from .dtypes import COMPUTABLE


def make_input_cast(dtype: torch.dtype) -> InputCast:
    """A cast of every floating-point tensor in a forward's ``(args, kwargs)`` to ``dtype``.

    Looks into tuples, named tuples, lists, dicts and dataclasses. Integer, bool, complex and 8-bit floating-point
    tensors pass as they are. Every object in which nothing is cast is returned itself, not a copy. Differentiable:
    gradients of inputs come back in the inputs' own dtype.
    """
    castable = _castable_to(dtype)

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Nearly every call in a step has inputs that are tensors in the right dtype already, and ends in this loop.
        for value in (*args, *kwargs.values()) if kwargs else args:
            if value is not None and (type(value) is not torch.Tensor or value.dtype in castable):
                break
        else:
            return args, kwargs
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            return (args[0].to(dtype),), kwargs
        tree = _Cast(dtype, castable)
        return tree.value(args), tree.value(kwargs)

    return cast


def make_output_cast(dtype: torch.dtype) -> OutputCast:
    """The same for a forward's output, which may be one tensor or nested containers of them."""
    castable = _castable_to(dtype)

    def cast(output: Any) -> Any:
        if type(output) is torch.Tensor:
            return output.to(dtype) if output.dtype in castable else output
        return _Cast(dtype, castable).value(output)

    return cast


def _castable_to(dtype: torch.dtype) -> frozenset[torch.dtype]:
    # 8-bit floats are left out: they mean something only with scales, which travel beside them.
    return frozenset(COMPUTABLE) - {dtype}


class _Cast:
    """One cast of one tree. A tensor that occurs twice stays one tensor, which attention modules look at."""

    def __init__(self, dtype: torch.dtype, castable: frozenset[torch.dtype]) -> None:
        self._dtype = dtype
        self._castable = castable
        self._done: dict[int, torch.Tensor] = {}

    def value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if value.dtype in self._castable else value
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, list):
            return self._list(value)
        if isinstance(value, dict):
            return self._dict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        done = self._done.get(id(tensor))
        if done is None:
            done = self._done[id(tensor)] = tensor.to(self._dtype)
        return done

    def _tuple(self, old: tuple[Any, ...]) -> tuple[Any, ...]:
        new = [self.value(item) for item in old]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return old
        make = getattr(type(old), "_make", type(old))
        made: tuple[Any, ...] = make(new)
        return made

    def _list(self, old: list[Any]) -> list[Any]:
        new = [self.value(item) for item in old]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return old
        made = copy.copy(old)
        made[:] = new
        return made

    def _dict(self, old: dict[Any, Any]) -> dict[Any, Any]:
        changed = {key: new for key, item in old.items() if (new := self.value(item)) is not item}
        if not changed:
            return old
        # A copy and not a new dict: subclasses keep their class, order, default factory and attributes.
        made = copy.copy(old)
        for key, item in changed.items():
            made[key] = item
        return made

    def _dataclass(self, old: Any) -> Any:
        changed = {}
        for field in dataclasses.fields(old):
            # A field without init may never have been set.
            item = getattr(old, field.name, None)
            if (new := self.value(item)) is not item:
                changed[field.name] = new
        if not changed:
            return old
        # Not dataclasses.replace: that runs __init__ again, which rejects fields without init and repeats validation.
        made = copy.copy(old)
        for name, item in changed.items():
            object.__setattr__(made, name, item)
        return made
