"""``budget``: units no larger than memory allows, and no smaller than the link between ranks wants them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from polyshard.errors import ConfigError, did_you_mean
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy, bytes_of, resolve_classes
from torch import nn
from typing_extensions import override

from .division import STACK, Division, Homes
from .module_class import UNCALLED

#: Half of the time in latency, half in bytes.
_SHARE = 0.5
#: Units that a message lists.
_LISTED = 8


class Budget(WrapPolicy):
    """``budget``: units from the memory that they may take while gathered, and from a model of the link.

    Memory is the upper limit: a unit takes at most ``unit_bytes``. ``gather_bytes`` limits all units that are gathered
    at once instead: the unit that computes, ``prefetch`` others ahead of it, and the units around these (``Room``).
    The link is the lower limit: in a gather of latency * bandwidth * W / (W - 1) bytes over W ranks, half of the time
    passes before a byte moves (``Link``). If the limits contradict each other, memory wins. Between them, the layers of
    a stack become units (``division.Division``). Bytes are those of parameters, without padding.

    Modules without a forward of their own, and plain ``nn.Sequential``, become no units: nothing may call them. A
    module that is too large and cannot be divided is a unit all the same, and named in a ``UserWarning``.
    """

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        unit_bytes: int | str | None = None,
        gather_bytes: int | str | None = None,
        prefetch: int | None = None,
        link: Mapping[str, float] | None = None,
        share: float | None = None,
        itemsize: int | None = None,
        force_leaf: type | str | Iterable[type | str] = (nn.MultiheadAttention,),
        exclude: type | str | Iterable[type | str] = UNCALLED,
    ) -> None:
        """Options. One of ``unit_bytes`` and ``gather_bytes``, an int or text such as ``"256 MiB"``, must be there.

        ``prefetch``: units that are gathered ahead, for ``gather_bytes``: 1 where it is left out, as in
        ``ShardConfig``.
        ``link``: a table of ``latency_s`` and ``bandwidth_bytes_per_s``; without one, no unit is too small.
        ``share``: the part of a gather's time in which bytes move, at the least, above 0 and below 1; 0.5 where it is
        left out.
        ``itemsize``: bytes of an element while it is gathered: 2 with ``precision="bf16"``. Where it is left out, as
        parameters are stored.
        ``force_leaf``: classes of modules that stay in one piece. ``exclude``: classes of modules that do not become
        units themselves; what is inside them may. Given as such or as ``"package.module:Name"``.

        Raises ``ConfigError`` for values that these cannot take.
        """
        where = f"policy {context.name!r}"
        self._where = where
        self._room = room_of(unit_bytes, gather_bytes, prefetch, where)
        self._link = None if link is None else link_of(link, f"link of {where}")
        if share is not None and self._link is None:
            raise ConfigError(f"share of {where} is {share!r}, which changes nothing without a link. Give one.")
        self._share = _SHARE if share is None else _share_of(share, where)
        if itemsize is not None and (isinstance(itemsize, bool) or not isinstance(itemsize, int) or itemsize < 1):
            raise ConfigError(f"itemsize of {where} is {itemsize!r}. Give bytes of an element: 2 for bf16.")
        self._itemsize = itemsize
        self._whole = resolve_classes(force_leaf, f"force_leaf of {where}")
        self._exclude = resolve_classes(exclude, f"exclude of {where}")
        self._reasons: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    @override
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Warns of units that are larger than they may be, and cannot be divided."""
        homes = Homes(root, context, self._itemsize)
        least = 0.0 if self._link is None else self._link.least_nbytes(self._share, context.shards)
        most, division = self._divide(homes, least)
        units = homes.owned(division.chosen)
        self._warn_of_large(homes, units, most, context)
        self._reasons.clear()
        for module in division.chosen:
            self._reasons[module] = self._reason(module, homes, units[module], most, division, context.shards)
        return {module: {} for module in root.modules() if module in division.chosen}

    @override
    def reason(self, module: nn.Module, name: str) -> str:
        return self._reasons.get(module, "")

    def _divide(self, homes: Homes, least: float) -> tuple[int, Division]:
        """The largest size of a unit with which all fit, and the model divided by it."""
        tried = []
        for most in self._room.sizes():
            division = Division(homes, least, most, self._whole, self._exclude)
            units = homes.owned(division.chosen)
            if self._room.fits(homes, units):
                return most, division
            tried.append((self._room.at_once(homes, units), most, division))
        _, most, division = min(tried, key=lambda each: each[0])
        return most, division

    def _reason(
        self,
        module: nn.Module,
        homes: Homes,
        own: Collection[nn.Parameter],
        most: int,
        division: Division,
        shards: int,
    ) -> str:
        numel, nbytes = sum(each.numel() for each in own), homes.total(own)
        alike = division.alike[module]
        layer = f"one of {alike} {type(module).__name__} side by side, " if alike >= STACK else ""
        text = f"{layer}{_figure(numel, 'parameters')}: "
        if self._link is None or shards == 1:
            return f"{text}{_figure(nbytes, 'B')} gathered, of the {_figure(most, 'B')} that a unit may take"
        spent = self._link.share(nbytes, shards)
        return f"{text}its gather of {_figure(nbytes, 'B')} takes {spent:.2f} of its time in bandwidth at {self._link}"

    def _warn_of_large(
        self, homes: Homes, units: Mapping[nn.Module, Collection[nn.Parameter]], most: int, context: PolicyContext
    ) -> None:
        if self._room.gather_nbytes is not None and self._room.fits(homes, units):
            return
        names = {module: name for name, module in homes.root.named_modules()}
        large = [
            f"'{names[module] or '(root)'}' ({type(module).__name__}, {_figure(homes.total(own), 'B')})"
            for module, own in units.items()
            if homes.total(own) > most
        ]
        if self._room.gather_nbytes is not None:
            text = (
                f"may gather {_figure(self._room.gather_nbytes, 'B')} at once, but what it can divide the model into "
                f"takes {_figure(self._room.at_once(homes, units), 'B')}: units that lie in each other"
            )
            text += f", and such as cannot be divided, {_listed(large)}" if large else ""
        elif large:
            text = f"may give a unit {_figure(most, 'B')}, but cannot divide {_listed(large)}"
        else:
            return
        context.warn(
            f"{self._where} {text}. Gathers will take more memory: allow more, or divide these modules in the model."
        )


def _listed(units: Sequence[str]) -> str:
    more = f" and {len(units) - _LISTED} more" if len(units) > _LISTED else ""
    return f"{', '.join(units[:_LISTED])}{more}"


def _share_of(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError(f"share of {where} is {value!r}. Give a part of the time, above 0 and below 1.")
    return float(value)


def _figure(value: int, unit: str) -> str:
    """``value`` in thousands, millions or billions, with one decimal."""
    for size, parameters, factor in ((10**9, "B", "G"), (10**6, "M", "M"), (10**3, "k", "k")):
        if value >= size:
            return f"{value / size:.1f} {factor}B" if unit == "B" else f"{value / size:.1f} {parameters} {unit}"
    return f"{value} {unit}"


#: One unit ahead of the one that computes, as the engine has it by default.
_PREFETCH = 1
#: How many units around the one that computes, the outermost module's among them, room is made for.
_DEEPEST = 3


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for one unit, or for all that are gathered at once."""

    unit_nbytes: int | None
    gather_nbytes: int | None
    prefetch: int = _PREFETCH
    """Units that are gathered ahead of the one that computes."""

    def sizes(self) -> tuple[int, ...]:
        """Sizes of one unit to try, the largest first, until everything fits.

        One unit computes, and others are ahead; the units around each are gathered, too, the outermost module's own
        always. How many these are depends on the division of the model.
        """
        if self.gather_nbytes is None:
            assert self.unit_nbytes is not None
            return (self.unit_nbytes,)
        return tuple(self.gather_nbytes // (1 + self.prefetch + around) for around in range(_DEEPEST + 1))

    def fits(self, homes: Homes, units: Mapping[nn.Module, Collection[nn.Parameter]]) -> bool:
        """Whether ``units``, each with its parameters, are gathered in the memory there is."""
        return self.gather_nbytes is None or self.at_once(homes, units) <= self.gather_nbytes

    def at_once(self, homes: Homes, units: Mapping[nn.Module, Collection[nn.Parameter]]) -> int:
        """Bytes that are gathered at once, at the most: a unit, those around it, and those ahead."""
        nbytes = {module: homes.total(own) for module, own in units.items()}
        deepest = nbytes[homes.root]
        for module, own in units.items():
            if own and module is not homes.root:
                around = [each for each in homes.chains[next(iter(own))] if each in nbytes]
                deepest = max(deepest, sum(nbytes[each] for each in around))
        inner = sorted((size for module, size in nbytes.items() if module is not homes.root), reverse=True)
        return deepest + sum(inner[: self.prefetch])


def room_of(unit_bytes: object, gather_bytes: object, prefetch: int | None, where: str) -> Room:
    """The room that the options of ``where`` give. Raises ``ConfigError`` for values that they cannot take."""
    if (unit_bytes is None) == (gather_bytes is None):
        raise ConfigError(
            f"{where} takes one of unit_bytes and gather_bytes. Give unit_bytes = '256 MiB', what one unit may take "
            "while it is gathered, or gather_bytes = '2 GiB', what all may take at once."
        )
    if gather_bytes is None:
        if prefetch is not None:
            raise ConfigError(
                f"prefetch of {where} is {prefetch!r}, which changes nothing beside unit_bytes. Leave it out."
            )
        return Room(_nbytes(unit_bytes, "unit_bytes", where), None)
    ahead = _PREFETCH if prefetch is None else prefetch
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise ConfigError(f"prefetch of {where} is {prefetch!r}. Give a number of units, 0 or more.")
    return Room(None, _nbytes(gather_bytes, "gather_bytes", where), ahead)


def _nbytes(value: object, option: str, where: str) -> int:
    nbytes = bytes_of(value)
    if nbytes is None or nbytes <= 0:
        raise ConfigError(
            f"{option} of {where} must be bytes above 0, a number or text such as '256 MiB', not {value!r}."
        )
    return nbytes


_KEYS = ("latency_s", "bandwidth_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Link:
    """The link between the ranks that share a unit.

    A gather of a unit of ``S`` bytes over ``W`` ranks takes

        t(S) = latency + S * (W - 1) / W / bandwidth

    since a rank has its own part already. This is Hockney's model of a message, r_inf and n_1/2 (R. W. Hockney, "The
    communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994), with the latency and
    the bandwidth of a whole gather in their place: ``benchmarks/gathers.py`` measures bandwidth in this sense.
    """

    latency_s: float
    """Seconds that a gather takes however small it is."""
    bandwidth_bytes_per_s: float
    """Bytes that each rank receives in a second of a large one."""

    def seconds(self, nbytes: float, shards: int) -> float:
        """Time of a gather of ``nbytes`` over ``shards`` ranks; 0 where one rank has it all."""
        return self.latency_s + self._moving_s(nbytes, shards) if shards > 1 else 0.0

    def share(self, nbytes: float, shards: int) -> float:
        """The part of that time in which bytes move, from 0 to 1; 1 where nothing has to."""
        seconds = self.seconds(nbytes, shards)
        return self._moving_s(nbytes, shards) / seconds if seconds else 1.0

    def least_nbytes(self, share: float, shards: int) -> float:
        """The smallest unit in whose gather bytes move for ``share``, below 1, of the time.

        ``share(S) >= s`` solved for S: latency * bandwidth * W / (W - 1) * s / (1 - s). 0 where one rank has it all.
        """
        if shards == 1:
            return 0.0
        half = self.latency_s * self.bandwidth_bytes_per_s * shards / (shards - 1)
        return half * share / (1.0 - share)

    @override
    def __str__(self) -> str:
        return f"{self.bandwidth_bytes_per_s / 1e9:g} GB/s and {self.latency_s * 1e6:g} µs"

    def _moving_s(self, nbytes: float, shards: int) -> float:
        return nbytes * (shards - 1) / shards / self.bandwidth_bytes_per_s


def link_of(value: object, where: str) -> Link:
    """The link that a table of ``latency_s`` and ``bandwidth_bytes_per_s`` describes.

    ``where`` names the setting in messages. Raises ``ConfigError`` for anything else.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}. Give a table: {{latency_s = 12e-6, bandwidth_bytes_per_s = 450e9}}.")
    for key in value:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS) or f" It has: {', '.join(_KEYS)}."
            raise ConfigError(f"{where} has no {key!r}.{hint}")
    for key in _KEYS:
        number = value.get(key)
        least = 0.0 if key == "latency_s" else math.nextafter(0.0, 1.0)
        if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number < math.inf:
            raise ConfigError(f"{key} of {where} is {number!r}. Give a number of {key.rpartition('_')[2]} units.")
    return Link(float(value["latency_s"]), float(value["bandwidth_bytes_per_s"]))
