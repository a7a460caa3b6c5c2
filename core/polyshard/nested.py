"""Tensors in nested values, as forwards take and return them: in tuples, lists, dicts, dataclasses and attributes.

Nothing here recurses: values may be nested as deep as memory allows, and contain themselves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["distinct_tensors", "iter_hidden_tensors", "iter_tensors", "map_tensors"]
T = TypeVar("T")
#: Types of most values that are no tensors: found without asking for every kind of container.
PLAIN = frozenset((type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size))
#: Stands for a field without a value.
_UNSET = object()


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, in order. What a container holds is given once, wherever that container occurs."""
    # Held, not only named by id: a container that is made as it is asked for must not die and leave its id to the next.
    opened: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
            continue
        items = None if id(value) in opened else items_of(value)
        if items:
            opened[id(value)] = value
            # A list of thousands of numbers is gone through at C speed, nearly.
            waiting.extend([item for item in reversed(items) if type(item) not in PLAIN])


def distinct_tensors(value: Any, wanted: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """The tensors in ``value`` that are ``wanted``, each once, in order."""
    return list({id(tensor): tensor for tensor in iter_tensors(value) if wanted(tensor)}.values())


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: T) -> T:
    """``value`` with every tensor replaced by ``function(tensor)``; containers in which none changes are kept.

    ``function`` is called once for each tensor, so that a tensor at several places is one tensor at all of them after
    it: attention modules ask whether query, key and value are the same. Containers, too, are copied once.
    """
    if isinstance(value, torch.Tensor):
        return cast(T, function(value))
    return cast(T, _Copy(function, value).result)


class _Copy:
    """A copy of those containers of one value that hold, at any depth, a tensor that changes.

    Containers that can change are copied first and filled last; tuples are made between, each after those in it. So
    values that contain themselves can be copied: every way back to a tuple leads through something that can change.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> None:
        # By the id of what was there. Keys' objects are held by ``_opened`` and ``_tensors``.
        self._new: dict[int, Any] = {}
        self._opened: dict[int, Any] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._holders: dict[int, list[int]] = {}
        changed = self._open(function, value)
        if changed:
            self._rebuild(self._holding(changed))
        self.result = self._new.get(id(value), value)

    def _open(self, function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> list[int]:
        changed = []
        waiting = [(value, 0)]
        while waiting:
            value, holder = waiting.pop()
            key = id(value)
            if isinstance(value, torch.Tensor):
                if key not in self._tensors:
                    self._tensors[key] = value
                    new = function(value)
                    if new is not value:
                        self._new[key] = new
                        changed.append(key)
                self._holders.setdefault(key, []).append(holder)
            elif key in self._opened:
                self._holders[key].append(holder)
            else:
                items = items_of(value)
                if items:
                    self._opened[key] = value
                    self._holders[key] = [holder]
                    waiting.extend([(item, key) for item in reversed(items) if type(item) not in PLAIN])
        return changed

    def _holding(self, changed: list[int]) -> list[Any]:
        """The containers that hold any of ``changed``, outer and inner ones in no particular order."""
        found: dict[int, Any] = {}
        waiting = list(changed)
        while waiting:
            for holder in self._holders[waiting.pop()]:
                if holder not in found and holder in self._opened:
                    found[holder] = self._opened[holder]
                    waiting.append(holder)
        return list(found.values())

    def _rebuild(self, containers: list[Any]) -> None:
        tuples = {id(value): value for value in containers if isinstance(value, tuple)}
        others = [value for value in containers if not isinstance(value, tuple)]
        for value in others:
            self._new[id(value)] = copy.copy(value)
        waiting = list(tuples.values())
        while waiting:
            value = waiting[-1]
            inside = () if id(value) in self._new else items_of(value) or ()
            first = [item for item in inside if id(item) in tuples and id(item) not in self._new]
            if first:
                waiting += first
                continue
            waiting.pop()
            if id(value) not in self._new:
                self._new[id(value)] = self._tuple(value)
        for value in others:
            self._fill(self._new[id(value)], value)

    def _of(self, item: Any) -> Any:
        return self._new.get(id(item), item)

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=self._of(value.data))
        make = getattr(type(value), "_make", type(value))
        return make([self._of(item) for item in value])

    def _fill(self, new: Any, value: Any) -> None:
        if isinstance(value, list):
            new[:] = [self._of(item) for item in value]
        elif isinstance(value, dict):
            # Item by item: some mappings (transformers' ModelOutput) refuse update().
            for key, item in value.items():
                if id(item) in self._new:
                    new[key] = self._of(item)
        else:
            for name, item in fields_of(value).items():
                if id(item) in self._new:
                    object.__setattr__(new, name, self._of(item))


class CopiedContainers:
    """The containers of one value of which a function got copies, with other tensors in the places of some.

    What it writes into a copy belongs into what was copied: a block appends its loss to a list that it is given.
    """

    def __init__(self, given: Any, passed: Any) -> None:
        """``given``: tuples, in which any container stands in ``passed`` as it is or as a copy."""
        # What was copied, the copy, and what that held at first.
        self._copies: list[tuple[Any, Any, dict[Any, Any]]] = []
        # What stood in the place of a tensor or of a container of the copies, by its id.
        self._originals: dict[int, Any] = {}
        waiting = [(given, passed)]
        while waiting:
            value, new = waiting.pop()
            if value is new or id(new) in self._originals:
                continue
            self._originals[id(new)] = value
            held = None if isinstance(value, torch.Tensor) else _items_by_key(value)
            if held is None:
                continue
            copies = _items_by_key(new) or {}
            if not isinstance(value, tuple):
                self._copies.append((value, new, copies))
            waiting.extend((item, copies[key]) for key, item in held.items() if key in copies)

    def __bool__(self) -> bool:
        return bool(self._copies)

    def write_back(self) -> None:
        """Change what was copied as its copies were changed since."""
        for value, new, before in self._copies:
            now = _items_by_key(new) or {}
            if len(now) == len(before) and all(key in now and now[key] is item for key, item in before.items()):
                continue
            items = {key: self._originals.get(id(item), item) for key, item in now.items()}
            if isinstance(value, list):
                value[:] = items.values()
                continue
            for key in before.keys() - now.keys():
                if isinstance(value, dict):
                    del value[key]
                else:
                    object.__delattr__(value, key)
            for key, item in items.items():
                if key in before and before[key] is now[key]:
                    continue
                if isinstance(value, dict):
                    value[key] = item
                else:
                    object.__setattr__(value, key, item)


def _items_by_key(value: Any) -> dict[Any, Any] | None:
    """What the container ``value`` holds, by position, key or field; None for anything else."""
    if type(value) in PLAIN or isinstance(value, PackedSequence):
        return None
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {**getattr(value, "__dict__", {}), **fields_of(value)}
    return None


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


def items_of(value: Any) -> Sequence[Any] | None:
    """What the container ``value`` holds, in order; None for anything else. Fields that are not set are left out."""
    if type(value) in PLAIN:
        return None
    if isinstance(value, PackedSequence):
        return (value.data,)
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, dict):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return list(fields_of(value).values())
    return None


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of the dataclass instance ``value`` that are set, by name."""
    found = ((field.name, getattr(value, field.name, _UNSET)) for field in dataclasses.fields(value))
    return {name: item for name, item in found if item is not _UNSET}


def slots_of(kind: type) -> list[str]:
    """The names of all slots of instances of ``kind``, as attributes: those of base classes too, and mangled."""
    names = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            owner = base.__name__.lstrip("_")
            names.append(f"_{owner}{name}" if private and owner else name)
    return names


def differ(these: list[Any], those: list[Any]) -> bool:
    """Whether two lists of lists or dicts hold other tensors, compared at C speed: identical tensors are equal."""
    try:
        return these != those
    except RuntimeError:
        # Two tensors were compared, so they are not the same.
        return True
