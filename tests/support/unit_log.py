"""What units do, written down as an observer is told it."""

from __future__ import annotations

import polyshard
from parity import root_of
from polyshard.interfaces import Observer, UnitEvent, UnitOperation, UnitSpec
from torch import nn


class Log:
    """Writes down what every unit does, and holds every claim about memory against the units' own storages."""

    def __init__(self, batched: bool = False) -> None:
        """``batched``: units come together: their arrivals are written down, too, and their memory is there at once."""
        self.events: list[str] = []
        self.gathered: set[str] = set()
        self.arrived: set[str] = set()
        self.computing: list[tuple[str, bool]] = []
        self.waiting: list[str] = []
        self.reducing: list[str] = []
        self.nbytes: dict[str, int] = {}
        self.peak = 0
        """Most bytes that were gathered at once."""
        self._batched = batched
        self._model: nn.Module | None = None

    @polyshard.hookimpl
    def after_shard(self, model: nn.Module) -> None:
        self._model = model
        self.nbytes = {unit.spec.name: unit.gathered.nbytes for unit in root_of(model).units}

    @polyshard.hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer:
        return self.observe

    def observe(self, event: UnitEvent) -> None:
        unit, name = event.unit, event.unit.name
        match event.operation, event.begins:
            case UnitOperation.GATHER, True:
                # What an earlier forward left gathered is filled again in place: its master may have changed since.
                self.gathered.add(name)
                self.peak = max(self.peak, sum(self.nbytes[each] for each in self.gathered))
                self.arrived.discard(name)
                self._note("unshard", unit)
            case UnitOperation.GATHER, False:
                assert name in self.gathered
                self.arrived.add(name)
                if self._batched:
                    self._note("unsharded", unit)
            case UnitOperation.COMPUTE, True:
                assert name in self.arrived
                self.computing.append((name, event.backward))
                self._note("backward" if event.backward else "forward", unit)
            case UnitOperation.COMPUTE, False:
                self.computing.remove((name, event.backward))
            case UnitOperation.WAIT, True:
                self.waiting.append(name)
            case UnitOperation.WAIT, False:
                # Nothing is issued for another unit in between.
                assert name == self.waiting.pop()
            case UnitOperation.REDUCE, True:
                # Parameters and reduction buffers are not alive together.
                assert name not in self.gathered
                self.reducing.append(name)
                self._note("reduce", unit)
            case UnitOperation.REDUCE, False:
                # In the order in which they were issued.
                assert name == self.reducing.pop(0)
            case UnitOperation.RELEASE, _:
                self.gathered.remove(name)
                self.arrived.discard(name)
                self._note("reshard", unit)

    def take(self) -> list[str]:
        """The events so far, which are forgotten."""
        events, self.events = self.events, []
        return events

    def _note(self, event: str, unit: UnitSpec) -> None:
        self.events.append(f"{event} {unit.name.removeprefix('blocks.') or 'root'}")
        assert self._model is not None
        for each in () if self._batched else root_of(self._model).units:
            has_memory = each.gathered.buffer.flat.untyped_storage().nbytes() > 0
            assert has_memory == (each.spec.name in self.gathered), f"{each.name} at {self.events[-1]}"


def listed(text: str) -> list[str]:
    """Events, with commas between them."""
    return [event.strip() for event in text.split(",")]
