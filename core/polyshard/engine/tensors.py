"""Finding and replacing tensors in the nested values that forwards take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``: tensors, tuples, lists, dicts and dataclasses of them, nested to any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from iter_tensors(getattr(value, field.name))


def iter_hidden_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the attributes of objects in ``value`` that ``iter_tensors`` does not open.

    A cache of keys and values, a batch: anything with ``__dict__`` or ``__slots__``, and collections of other kinds.
    Modules are not opened.
    """
    yield from _hidden(value, set(), inside=False)


def _hidden(value: Any, seen: set[int], *, inside: bool) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if inside:
            yield value
        return
    if value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, PackedSequence):
        return
    if isinstance(value, (tuple, list)):
        items: Iterable[Any] = value
    elif isinstance(value, dict):
        items = value.values()
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, (Set, deque)):
        items, inside = value, True
    elif callable(value):
        return
    else:
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        items = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
        inside = True
    for item in items:
        yield from _hidden(item, seen, inside=inside)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: T) -> T:
    """``value`` with every tensor replaced by ``function(tensor)``; containers in which none changes are kept."""
    return cast(T, _map(function, value))


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        data = function(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, (tuple, list)):
        items = [_map(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        new_values = {key: _map(function, item) for key, item in value.items()}
        if all(new_values[key] is item for key, item in value.items()):
            return value
        # Item by item: some mappings (transformers' ModelOutput) refuse update().
        copied = copy.copy(value)
        for key, item in new_values.items():
            if item is not value[key]:
                copied[key] = item
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = _map(function, old)
            if new is not old:
                changes[field.name] = new
        return _replace_fields(value, changes) if changes else value
    return value


def _replace_fields(value: Any, changes: dict[str, Any]) -> Any:
    # dataclasses.replace would run __init__ and __post_init__ again, which fails for fields with init=False and may
    # recompute what forward had set. A shallow copy keeps every attribute as it was.
    copied = object.__new__(type(value))
    if hasattr(value, "__dict__"):
        copied.__dict__.update(value.__dict__)
    for name in getattr(type(value), "__slots__", ()):
        if hasattr(value, name):
            object.__setattr__(copied, name, getattr(value, name))
    for name, new in changes.items():
        object.__setattr__(copied, name, new)
    return copied
