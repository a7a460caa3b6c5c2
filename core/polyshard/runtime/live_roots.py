"""The sharded models of this process, found by their parameters: for functions of torch that get parameters alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from .root import Root
from .unit import Unit


class ParameterLocation(NamedTuple):
    """A parameter of a sharded model."""

    root: Root
    unit: Unit
    slot: int | None
    """Index of the parameter in its unit's layout; None of a flat parameter, which stands for all of them."""
    order: tuple[int, int]
    """Numbers of the root and of its unit: the same on every rank, in whatever order parameters were asked for."""

    @property
    def parameter(self) -> nn.Parameter:
        if self.slot is None:
            assert self.unit.held.flat is not None
            return self.unit.held.flat.parameter
        return self.unit.parameters[self.slot].original

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """What computes in its place, gathered; nothing before the first forward."""
        leaves = self.unit.gathered.leaves
        return leaves if self.slot is None else leaves[self.slot : self.slot + 1]

    @property
    def name(self) -> str:
        """Its first name; the unit's for a flat parameter."""
        return self.unit.name if self.slot is None else self.unit.parameters[self.slot].names[0]


class LiveRoots:
    """Every root that ``polyshard.shard`` or ``fully_shard`` made, for as long as its model lives.

    Steps do not touch it: parameters are looked up on request, and gradients by the parameters that hold them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Unit and slot by the parameters' ids: a reference to a parameter may keep its model alive for ever.
        self._places: weakref.WeakKeyDictionary[Root, dict[int, tuple[int, int]]] = weakref.WeakKeyDictionary()
        #: All of these roots, and some whose models are gone; for uses in every step.
        self.references: tuple[weakref.ref[Root], ...] = ()

    def add(self, root: Root) -> None:
        places = {
            id(parameter.original): (number, slot)
            for number, unit in enumerate(root.units)
            for slot, parameter in enumerate(unit.parameters)
        }
        with self._lock:
            self._places[root] = places
            self.references = tuple(map(weakref.ref, self._places))

    def roots(self) -> list[Root]:
        """The outermost roots, in the order in which they were made."""
        return [root for root, _ in self._entries()]

    def find(self, tensors: Sequence[torch.Tensor]) -> list[ParameterLocation | None]:
        """The location of each of ``tensors``; None for a tensor that is no parameter of a sharded model."""
        found: list[ParameterLocation | None] = [None] * len(tensors)
        for age, (root, places) in enumerate(self._entries()):
            flats = {
                id(unit.held.flat.parameter): number
                for number, unit in enumerate(root.units)
                if unit.held.flat is not None
            }
            for index, (key, tensor) in enumerate(zip(map(id, tensors), tensors, strict=True)):
                place = places.get(key)
                if place is not None:
                    number, slot = place
                    unit = root.units[number]
                    # An id outlives its object.
                    if unit.parameters[slot].original is tensor:
                        found[index] = ParameterLocation(root, unit, slot, (age, number))
                elif key in flats:
                    number = flats[key]
                    found[index] = ParameterLocation(root, root.units[number], None, (age, number))
        return found

    def around(self, tensors: Sequence[torch.Tensor]) -> Root | None:
        """The first root whose model has one of ``tensors`` outside of its units; None for no such root."""
        asked = set(map(id, tensors))
        for root, places in self._entries():
            if not asked.difference(places).isdisjoint(map(id, root.module_states[0].module.parameters())):
                return root
        return None

    def _entries(self) -> list[tuple[Root, dict[int, tuple[int, int]]]]:
        with self._lock:
            entries = list(self._places.items())
        # A root whose units joined a larger one is about to be freed.
        return [(root, places) for root, places in entries if all(unit.root is root for unit in root.units)]


#: One for the process, as torch's functions are.
live_roots = LiveRoots()
