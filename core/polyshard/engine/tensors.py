"""Tensors in the attributes of what a forward returns, beside those in containers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..nested import PLAIN, distinct_tensors, items_of, iter_tensors, map_tensors, slots_of

__all__ = ["distinct_tensors", "iter_hidden_tensors", "iter_tensors", "map_tensors"]


def iter_hidden_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the attributes of objects in ``value`` that ``iter_tensors`` does not open.

    A cache of keys and values, a batch: anything with ``__dict__`` or ``__slots__``, and collections of other kinds.
    Modules are not opened.
    """
    # Held: what is made as it is asked for must not die and leave its id to the next.
    seen: dict[int, Any] = {}
    waiting = [(value, False)]
    while waiting:
        value, inside = waiting.pop()
        if isinstance(value, torch.Tensor):
            if inside:
                yield value
            continue
        if value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.nn.Module)):
            continue
        if isinstance(value, PackedSequence) or id(value) in seen:
            continue
        seen[id(value)] = value
        items: Iterable[Any] | None = items_of(value)
        if items is None:
            inside = True
            items = _attributes_of(value)
        waiting.extend([(item, inside) for item in items if type(item) not in PLAIN][::-1])


def _attributes_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (Set, deque)):
        return value
    if callable(value):
        return ()
    slots = [getattr(value, name, None) for name in slots_of(type(value)) if name != "__dict__"]
    return [*getattr(value, "__dict__", {}).values(), *slots]
