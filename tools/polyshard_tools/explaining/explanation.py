"""The parts of an explanation."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
from polyshard.config import Source, Strategy


@dataclass(frozen=True, slots=True)
class Value:
    """A setting, or an option of a plugin."""

    name: str
    value: Any
    source: Source


@dataclass(frozen=True, slots=True)
class ExplainedPlugin:
    serves: str
    """The setting that names it (``"listeners[1]"`` for the second listener), ``"blocks.3: precision"`` where a policy
    names it for a unit, or, of an inner one, the name of the plugin that asked for it."""
    group: str
    """Its entry-point group."""
    name: str
    """As it was asked for; of an object that the program gave, its class's."""
    distribution: str
    """The distribution that offers it; empty for an object of the program."""
    version: str
    """Version of the distribution; empty for an object of the program."""
    value: str
    """Where its factory is: ``"module:attribute"``."""
    file: str
    """The file in which its factory is defined; empty where none is known."""
    options: tuple[Value, ...]
    """All that its factory takes, defaults included."""
    inner: tuple[ExplainedPlugin, ...] = ()
    """The plugins that its factory constructed by name."""
    absent: str = ""
    """Why it was not constructed: it needs ranks or a device. Empty where it was."""
    reason: str = ""
    """What collectives choose by themselves, and why; of absent ones, by what they will choose."""

    def walk(self) -> list[ExplainedPlugin]:
        """This one, and all inside of it: an outer one before its inner ones."""
        return [self, *(found for each in self.inner for found in each.walk())]


@dataclass(frozen=True, slots=True)
class ExplainedParameter:
    name: str
    """Its first fully-qualified name."""
    shape: tuple[int, ...]
    offset: int
    """Its first element in the unit's buffer."""
    dim: int
    """The dimension along which ranks cut it."""


@dataclass(frozen=True, slots=True)
class ExplainedUnit:
    """Parameters that are gathered together."""

    name: str
    """Of the unit, ``(root)`` for the outermost module."""
    module_class: str
    """Class of its module."""
    parameters: tuple[ExplainedParameter, ...]
    """In the order in which they lie."""
    elements: int
    """Elements of its parameters."""
    padding: int
    """Elements of its buffer that belong to no parameter."""
    shard_elements: int
    """Elements that each rank holds, padding included."""
    trained: bool
    """Whether its parameters require gradients."""
    master: torch.dtype
    """Of the master, which the optimizer updates."""
    compute: torch.dtype
    """Of parameters in forward and backward."""
    communication: torch.dtype
    """Of gradients while they travel."""
    reduce: torch.dtype
    """In which gradients are accumulated."""
    grad: torch.dtype
    """Of ``.grad``."""
    gather_nbytes: int
    """Bytes that each rank sends when the unit is gathered; 0 where it is not cut."""
    encoded: bool
    """Whether a gather carries something else than the compute dtype."""
    overrides: Mapping[str, Any]
    """Settings that the policy gave to it alone."""
    reason: str
    """The rule that made it a unit."""
    ranks: str
    """The dimensions of the mesh over which it is cut, and replicated; empty where the configuration names none."""
    shards: int
    """How many ranks share it."""
    replicas: int
    """How many ranks hold the same shard."""
    divisor: float
    """What the sum of gradients over these ranks is divided by."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A configuration, explained for a model."""

    model: str
    """Class of the model."""
    world_size: int
    """Number of ranks."""
    shards: int
    """How many of them share each unit that has no mesh of its own."""
    replicas: int
    """How many of them hold the same shard of such a unit."""
    near: int | None
    """How many of them are a group of ``hfsdp`` or ``hpz``; None with other strategies."""
    strategy: Strategy
    """The one in force, which on one rank is ``NO_SHARD`` whatever the setting says."""
    device: torch.device
    """Where each rank computes; index 0 stands for its own."""
    settings: tuple[Value, ...]
    plugins: tuple[ExplainedPlugin, ...]
    """Those of the settings, in their order, and behind them those that the policy named for units."""
    units: tuple[ExplainedUnit, ...]
    """In the order of the model's modules."""

    @property
    def headline(self) -> str:
        """Model, ranks, device, strategy, and into how many parts units are cut, in one line."""
        ranks = f"{self.world_size:,} ranks" if self.world_size > 1 else "one rank"
        cut = f"units in {self.shards:,} shards" if self.shards > 1 else "whole units on each rank"
        copies = f", {self.replicas:,} replicas of each" if self.shards > 1 < self.replicas else ""
        if self.near is not None:
            copies += f", groups of {self.near:,} ranks"
        # No index: each rank has a device of its own.
        where = f"{self.model} on {ranks}, computing on {self.device.type}"
        return f"{where}: {self.strategy.value}, {cut}{copies}"

    @property
    def elements(self) -> int:
        return sum(unit.elements for unit in self.units)

    @property
    def padding(self) -> int:
        return sum(unit.padding for unit in self.units)

    def as_json(self) -> dict[str, Any]:
        """All of it in values that JSON holds. Classes and functions are ``"module:name"``."""
        described: dict[str, Any] = plain(self)
        return described | {"elements": self.elements, "padding": self.padding}


def plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(names := getattr(value, "mesh_dim_names", None), tuple):
        return dict(zip(names, value.mesh.shape, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


#: The longest pattern that is looked for: the units of one block.
_LONGEST = 64
_T = TypeVar("_T")


def folded(items: Sequence[_T], keys: Sequence[Hashable]) -> list[tuple[_T, ...]]:
    """Runs of items with equal ``keys``: neighbours, or the same place of a pattern that is repeated as a whole.

    a b a b a b is two runs of three.
    """
    found: list[tuple[_T, ...]] = []
    start = 0
    while start < len(items):
        period, times = _longest_repetition(keys, start)
        for position in range(start, start + period):
            found.append(tuple(items[position : start + period * times : period]))
        start += period * times
    return found


def _longest_repetition(keys: Sequence[Hashable], start: int) -> tuple[int, int]:
    """Length of the pattern that begins at ``start`` and goes furthest, and how often it comes; (1, 1) for none."""
    best = (1, 1)
    for period in range(1, min(_LONGEST, (len(keys) - start) // 2) + 1):
        pattern = keys[start : start + period]
        times = next(
            number for number in count(1) if keys[start + period * number : start + period * (number + 1)] != pattern
        )
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best
