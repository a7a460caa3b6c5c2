"""The sharded models of this process, found by their parameters: for functions of torch that get parameters alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ..errors import UnsupportedError
from ..planning.layout import product
from ..planning.parts import TensorPart, is_dtensor
from ..runtime.root import Root
from ..runtime.unit import Unit

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
            assert self.unit.flat is not None
            return self.unit.flat.parameter
        return self.unit.parameters[self.slot].original

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """What computes in its place, gathered; nothing before the first forward."""
        leaves = self.unit.leaves
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
        #: How many models were sharded so far. Locations found before the latest may have changed.
        self.changes = 0
        # Unit and slot by the parameters' ids: a reference to a parameter may keep its model alive for ever.
        self._places: weakref.WeakKeyDictionary[Root, dict[int, tuple[int, int]]] = weakref.WeakKeyDictionary()
        # The ids of all these parameters, and some of former models.
        self._known: frozenset[int] = frozenset()
        #: All of these roots, and some whose models are gone; for uses in every step.
        self.references: tuple[weakref.ref[Root], ...] = ()
        #: Roots whose units an optimizer sees as flat parameters.
        self.flattened: weakref.WeakSet[Root] = weakref.WeakSet()

    def add(self, root: Root) -> None:
        places = {
            id(held): (number, slot)
            for number, unit in enumerate(root.units)
            for slot in range(len(unit.parameters))
            for held in unit.held_for(slot)
        }
        with self._lock:
            self._places[root] = places
            self._known = frozenset(key for each in self._places.values() for key in each)
            self.references = tuple(map(weakref.ref, self._places))
            self.changes += 1

    def roots(self) -> list[Root]:
        """The outermost roots, in the order in which they were made."""
        return [root for root, _ in self._entries()]

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether ``find`` may find ``tensor``, at a fraction of its cost: for calls on every new tensor."""
        # Flat parameters are 1-D, and made later.
        return id(tensor) in self._known or (tensor.ndim == 1 and bool(self.flattened))

    def find(self, tensors: Sequence[torch.Tensor]) -> list[ParameterLocation | None]:
        """The location of each of ``tensors``; None for a tensor that is no parameter of a sharded model."""
        found: list[ParameterLocation | None] = [None] * len(tensors)
        for age, (root, places) in enumerate(self._entries()):
            flats = {id(unit.flat.parameter): number for number, unit in enumerate(root.units) if unit.flat is not None}
            for index, (key, tensor) in enumerate(zip(map(id, tensors), tensors, strict=True)):
                place = places.get(key)
                if place is not None:
                    number, slot = place
                    unit = root.units[number]
                    # An id outlives its object.
                    if any(held is tensor for held in unit.held_for(slot)):
                        found[index] = ParameterLocation(root, unit, slot, (age, number))
                elif key in flats:
                    number = flats[key]
                    found[index] = ParameterLocation(root, root.units[number], None, (age, number))
        return found

    def find_pieces(self, tensors: Sequence[torch.Tensor]) -> list[ParameterLocation | None]:
        """As ``find``, but None for a ``DTensor``, which torch's functions are right for by themselves."""
        found = self.find(tensors)
        return [
            None if each is not None and is_dtensor(tensor) else each
            for each, tensor in zip(found, tensors, strict=True)
        ]

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
        return [(root, places) for root, places in entries if all(unit.step is root for unit in root.units)]


#: One for the process, as torch's functions are.
live_roots = LiveRoots()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the elements of a parameter lie."""

    shape: tuple[int, ...]
    """Shape of the whole parameter; of this rank's part of it, beside tensor or expert parallelism."""
    stride: tuple[int, ...]
    """Strides of the whole parameter, in elements."""
    start: int
    """First element that this rank holds, counted in the memory order that ``stride`` gives the whole parameter."""
    stop: int
    """One past the last; equal to ``start`` where it holds none."""
    unit: str | None
    """Name of the unit that the parameter is gathered with; None where it is not sharded."""
    shard: int = 0
    """Which of ``pieces`` this rank holds: its index among the ranks that share the unit."""
    pieces: tuple[tuple[int, int], ...] = ()
    """``(start, stop)`` of each of those ranks, in their order; ``(0, 0)`` for none. One where nothing is cut."""
    rows: tuple[int, int] | None = None
    """First and one past the last index of dimension 0 that this rank holds, where the layout cuts between them only;
    the parameter's own shape is then ``(rows, ...)``. None elsewhere."""
    ranks: str = ""
    """The dimensions of the mesh that the unit is cut over, and replicated; empty where no mesh was given."""
    part: TensorPart | None = None
    """The part of a larger tensor that all of the above is about: mesh, placements and shape of its ``DTensor``, with
    the part's offset and sizes. None for a parameter that was no ``DTensor``."""


def placement(parameter: torch.Tensor) -> Placement:
    """Which elements of ``parameter`` this rank holds, and what shape the whole has.

    A sharded parameter is a 1-D tensor, or ``(rows, ...)`` where the layout cuts between rows only, and empty on ranks
    without a part of it: what is decided by shape, such as which parameters decay, is to be decided by
    ``placement(parameter).shape``. Nothing is communicated. A parameter that is not sharded lies here as a whole. A
    flat parameter is that of its unit's padded elements.
    """
    (found,) = live_roots.find((parameter,))
    if found is None:
        numel = parameter.numel()
        return Placement(tuple(parameter.shape), tuple(parameter.stride()), 0, numel, None, 0, ((0, numel),))
    unit, layout = found.unit, found.unit.layout
    shard = unit.ranks.shard_rank
    if found.slot is None:
        size = layout.shard_numel
        pieces = tuple((rank * size, (rank + 1) * size) for rank in range(layout.world_size))
        return Placement((layout.padded_numel,), (1,), *pieces[shard], unit.name, shard, pieces)
    slot = layout.slots[found.slot]
    if slot.dim:
        raise UnsupportedError(
            f"placement() of '{found.name}' (rank {found.root.rank}), which is cut along dimension {slot.dim}: its "
            "pieces are no ranges of elements. Ask the DTensor for its placements."
        )
    pieces = tuple(layout.range_of(found.slot, rank) for rank in range(layout.world_size))
    start, stop = pieces[shard]
    row = product(slot.shape[1:])
    rows = (start // row, stop // row) if slot.by_rows and row else None
    part = unit.parameters[found.slot].part
    return Placement(slot.shape, slot.stride, start, stop, unit.name, shard, pieces, rows, unit.ranks.label, part)


def as_dtensor(parameter: torch.Tensor) -> DTensor:
    """The whole ``parameter`` as a ``DTensor`` with placement ``Shard(0)`` over this rank's piece, which is not copied.

    For code that computes with DTensors. It is detached: gradients arrive in ``parameter.grad``. Every rank calls it,
    in the same order.

    Raises:
        UnsupportedError: ranks hold other rows of it than ``Shard(0)`` would give them, or it is not sharded.
    """
    (found,) = live_roots.find((parameter,))
    placed = placement(parameter)
    if found is None or found.slot is None or found.unit.ranks.owner is None:
        raise UnsupportedError(
            f"as_dtensor() needs a parameter of which each rank holds a piece, but this one, of shape {placed.shape}, "
            "is whole here, or flat. Use it as it is."
        )
    if placed.part is not None:
        raise UnsupportedError(
            f"as_dtensor() of '{found.name}' (rank {found.root.rank}): tensor or expert parallelism cut it before, so "
            "that its pieces are no Shard(0) of the whole. Use it inside of 'with polyshard.unsharded(model)', where "
            "it is a DTensor over its own mesh."
        )
    shard = found.unit.ranks.owner
    where = f"'{found.name}' (rank {found.root.rank})"
    row = product(placed.shape[1:])
    each = -(-placed.shape[0] // shard.world_size) * row if placed.shape else 0
    numel = product(placed.shape)
    even = [(min(rank * each, numel), min((rank + 1) * each, numel)) for rank in range(shard.world_size)]
    if placed.rows is None or [_range(*piece) for piece in placed.pieces] != [_range(*piece) for piece in even]:
        raise UnsupportedError(
            f"The ranks do not hold of {where} what Shard(0) would give them: the ranges are {placed.pieces}. Shard it "
            "with layout='rows' as a unit of its own, with a number of rows that the number of ranks divides."
        )
    # Imported late: it takes longer to import than everything here.
    from torch.distributed.tensor import DTensor, Shard

    from ..planning.device_mesh import mesh_over

    mesh = mesh_over(shard, parameter.device.type)
    return DTensor.from_local(
        parameter.detach(), mesh, [Shard(0)], run_check=False, shape=torch.Size(placed.shape), stride=placed.stride
    )


def _range(start: int, stop: int) -> tuple[int, int]:
    return (start, stop) if stop > start else (0, 0)
