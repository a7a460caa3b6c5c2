"""The models that are sharded in this process, for functions of torch that are given their parameters alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..step.root import Root
from ..step.unit import Unit


class Found(NamedTuple):
    """A parameter of a sharded model."""

    root: Root
    unit: Unit
    slot: int | None
    """Index of the parameter in its unit's layout; None of a flat parameter, which stands for all of them."""
    order: tuple[int, int]
    """Of the root and of its unit: the same on every rank, whatever the order in which parameters were given."""


class LiveRoots:
    """Every root that ``polyshard.shard`` or ``fully_shard`` made, for as long as its model lives.

    A step does not touch it: parameters are looked up when somebody asks for one, and gradients lead to their units
    over their parameters.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: How many models were sharded so far. What was found before the latest may be something else now.
        self.changes = 0
        # Places by the parameters' ids: a reference to a parameter may lead to its model, which would then never go.
        self._places: weakref.WeakKeyDictionary[Root, dict[int, tuple[int, int]]] = weakref.WeakKeyDictionary()
        # All of those, and some that were.
        self._known: frozenset[int] = frozenset()
        # Ids of parameters in their modules that are no unit's; of those roots that were asked.
        self._outside: weakref.WeakKeyDictionary[Root, frozenset[int]] = weakref.WeakKeyDictionary()
        #: All of these roots, and some that went; for those who ask at every step.
        self.references: tuple[weakref.ref[Root], ...] = ()
        #: Those whose units an optimizer sees as flat parameters.
        self.flattened: weakref.WeakSet[Root] = weakref.WeakSet()

    def add(self, root: Root) -> None:
        """Know the parameters of ``root`` from now on."""
        places = {
            id(parameter.original): (number, slot)
            for number, unit in enumerate(root.units)
            for slot, parameter in enumerate(unit.parameters)
        }
        with self._lock:
            self._places[root] = places
            self._outside.clear()
            self._known = frozenset(key for each in self._places.values() for key in each)
            self.references = tuple(map(weakref.ref, self._places))
            self.changes += 1

    def roots(self) -> list[Root]:
        """The outermost roots, in the order in which they were made."""
        return [root for root, _ in self._entries()]

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether ``find`` may find ``tensor``, at a fraction of its cost: for what is asked of every new tensor."""
        # Flat parameters are 1-D, and made later.
        return id(tensor) in self._known or (tensor.ndim == 1 and bool(self.flattened))

    def find(self, tensors: Sequence[torch.Tensor]) -> list[Found | None]:
        """For each of ``tensors`` where it lies; None for what is no parameter of a sharded model."""
        found: list[Found | None] = [None] * len(tensors)
        for age, (root, places) in enumerate(self._entries()):
            flats = {id(unit.flat.parameter): number for number, unit in enumerate(root.units) if unit.flat is not None}
            for index, (key, tensor) in enumerate(zip(map(id, tensors), tensors, strict=True)):
                place = places.get(key)
                if place is not None:
                    number, slot = place
                    unit = root.units[number]
                    # An id outlives its object.
                    if unit.parameters[slot].original is tensor:
                        found[index] = Found(root, unit, slot, (age, number))
                elif key in flats:
                    number = flats[key]
                    found[index] = Found(root, root.units[number], None, (age, number))
        return found

    def around(self, tensors: Sequence[torch.Tensor]) -> Root | None:
        """The first root whose model has one of ``tensors`` outside of its units; None where none has."""
        asked = set(map(id, tensors))
        for root, places in self._entries():
            outside = self._outside.get(root)
            if outside is None:
                # A walk that a wrap need not pay for.
                outside = frozenset(map(id, root.stages[0].module.parameters())) - places.keys()
                self._outside[root] = outside
            may_be = not asked.isdisjoint(outside)
            # An id outlives its object.
            if may_be and not asked.isdisjoint(map(id, root.stages[0].module.parameters())):
                return root
        return None

    def _entries(self) -> list[tuple[Root, dict[int, tuple[int, int]]]]:
        with self._lock:
            entries = list(self._places.items())
        # A root whose units went to a larger one is on its way out.
        return [(root, places) for root, places in entries if all(unit.step is root for unit in root.units)]


#: Torch's functions are one for the whole process, and so is what they must know.
live_roots = LiveRoots()
