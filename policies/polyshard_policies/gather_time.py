"""How long a gather takes over a link: latency, then bytes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from polyshard.errors import ConfigError

_KEYS = ("latency_s", "bandwidth_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the ranks that share a unit.

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
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has: {', '.join(_KEYS)}."
            raise ConfigError(f"{where} has no {key!r}. {hint}")
    for key in _KEYS:
        number = value.get(key)
        least = 0.0 if key == "latency_s" else math.nextafter(0.0, 1.0)
        if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number < math.inf:
            raise ConfigError(f"{key} of {where} is {number!r}. Give a number of {key.rpartition('_')[2]} units.")
    return Link(float(value["latency_s"]), float(value["bandwidth_bytes_per_s"]))
