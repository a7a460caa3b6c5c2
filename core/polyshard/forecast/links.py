"""How long collectives take: latency and bandwidth, by operation and number of ranks."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError


class Operation(enum.Enum):
    """What ranks do together."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"

    def received_nbytes(self, nbytes: int, ranks: int) -> int:
        """Of a whole buffer of ``nbytes``, what comes to each rank: (N-1)/N of it, twice for an all-reduce."""
        part = nbytes * (ranks - 1) // ranks
        return 2 * part if self is Operation.ALL_REDUCE else part


@dataclass(frozen=True, slots=True)
class Span:
    """A group of ranks, as far as links are concerned."""

    ranks: int
    first: int = 0
    """Its first rank, counted over all."""
    stride: int = 1
    """From one of its ranks to the next."""

    def hosts(self, ranks_per_host: int) -> int:
        """Over how many hosts of ``ranks_per_host`` ranks it reaches."""
        last = self.first + (self.ranks - 1) * self.stride
        if self.stride >= ranks_per_host:
            return self.ranks
        return last // ranks_per_host - self.first // ranks_per_host + 1


@dataclass(frozen=True, slots=True)
class Link:
    """One operation among one number of ranks: ``latency_s + received / bandwidth``."""

    operation: Operation
    ranks: int
    latency_s: float
    """Of a launch, whatever it carries."""
    bandwidth: float
    """Bytes a second that each rank receives."""
    member_s: float = 0.0
    """What each further collective of a launch adds."""
    interference: float = 0.0
    """By which part of its own time it delays compute beside it."""

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"A link of {self.operation.value} is among {self.ranks} ranks; it takes 2 or more.")
        for name in ("latency_s", "member_s", "interference"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"{name} of {self.operation.value} among {self.ranks} ranks is {value!r}; give 0 or more."
                )
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(
                f"bandwidth of {self.operation.value} among {self.ranks} ranks is {self.bandwidth!r}; give bytes a "
                "second, above 0."
            )

    def seconds(self, received: int, ranks: int, members: int) -> float:
        """For ``received`` bytes among ``ranks``.

        Beyond the ranks that it is of, latency grows with the logarithm of their number, as that of trees does.
        """
        steps = max(1.0, math.log2(ranks) / math.log2(self.ranks))
        return steps * (self.latency_s + (members - 1) * self.member_s) + received / self.bandwidth


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The links of a machine, or of several alike."""

    name: str
    source: str
    """Where the figures come from."""
    ranks_per_host: int
    inside: tuple[Link, ...]
    """Among ranks of one host."""
    between: tuple[Link, ...] = ()
    """Among ranks of several hosts; ``ranks`` counts ranks. None: it is not known."""

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1:
            raise ConfigError(f"links {self.name!r}: ranks_per_host is {self.ranks_per_host}; give 1 or more.")

    def link(self, operation: Operation, span: Span) -> Link:
        """The one of the nearest number of ranks, measured over hosts where ``span`` reaches over several.

        Raises:
            ConfigError: there is none.
        """
        hosts = span.hosts(self.ranks_per_host)
        among = self.between if hosts > 1 else self.inside
        found = [link for link in among if link.operation is operation]
        if not found and operation is Operation.ALL_REDUCE:
            # A reduction and a gather of slices: both directions at the slower one's rate.
            found = [link for link in among if link.operation is Operation.REDUCE_SCATTER]
        if not found:
            where = f"{hosts} hosts of {self.ranks_per_host} ranks" if hosts > 1 else f"{span.ranks} ranks of one host"
            raise ConfigError(
                f"The links {self.name!r} say nothing of {operation.value} among {where}. Measure them there with "
                "'polyshard bench-links', or name others by --links."
            )
        return min(found, key=lambda link: (abs(math.log2(link.ranks / span.ranks)), link.ranks))

    def seconds(self, operation: Operation, nbytes: int, span: Span, members: int = 1) -> float:
        """Time of collectives over whole buffers of ``nbytes`` together."""
        if span.ranks == 1:
            return 0.0
        received = operation.received_nbytes(nbytes, span.ranks)
        return self.link(operation, span).seconds(received, span.ranks, members)

    def to_json(self) -> str:
        """As ``read_links`` reads it."""
        plain = asdict(self)
        for key in ("inside", "between"):
            for link in plain[key]:
                link["operation"] = link["operation"].value
        return json.dumps(plain, indent=1) + "\n"

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str) -> LinkModel:
        """From a parsed file; ``source`` names it in messages.

        Raises:
            ConfigError: a key is missing, unknown, or of another type.
        """
        try:
            kinds = {key: _links_of(mapping.get(key, ())) for key in ("inside", "between")}
            return cls(**{**mapping, **kinds})
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{source} holds no links: {error}. 'polyshard bench-links --out FILE' writes such a file."
            ) from error


def _links_of(rows: Iterable[Mapping[str, Any]]) -> tuple[Link, ...]:
    return tuple(Link(**{**row, "operation": Operation(row["operation"])}) for row in rows)


def read_links(path: str | Path) -> LinkModel:
    """The links that ``LinkModel.to_json`` wrote to ``path``.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        mapping = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the links in {str(path)!r}: {error.strerror}. 'polyshard bench-links --out FILE' writes them."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{str(path)!r} holds no links, but a {type(mapping).__name__}.")
    return LinkModel.from_mapping(mapping, repr(str(path)))


def fitted(operation: Operation, ranks: int, timings: Sequence[tuple[int, float]]) -> Link:
    """The latency and bandwidth nearest to ``timings``: bytes of whole buffers, and seconds of one collective.

    Least squares of relative errors, so that small buffers count as much as large ones; a latency that would come out
    below 0 is 0.

    Raises:
        ConfigError: there are fewer than two sizes, or time does not grow with them.
    """
    received = [operation.received_nbytes(nbytes, ranks) for nbytes, _ in timings]
    if len(set(received)) < 2:
        raise ConfigError(
            f"{operation.value} among {ranks} ranks was timed at {len(set(received))} sizes; it takes two."
        )
    # Minimise sum(((a + b x - t) / t)^2).
    weights = [1 / seconds**2 for _, seconds in timings]
    total = math.fsum(weights)
    mean_x = math.fsum(w * x for w, x in zip(weights, received, strict=True)) / total
    mean_t = math.fsum(w * t for w, (_, t) in zip(weights, timings, strict=True)) / total
    spread = math.fsum(w * (x - mean_x) ** 2 for w, x in zip(weights, received, strict=True))
    slope = (
        math.fsum(w * (x - mean_x) * (t - mean_t) for w, x, (_, t) in zip(weights, received, timings, strict=True))
        / spread
    )
    latency = mean_t - slope * mean_x
    if latency < 0:
        latency = 0.0
        slope = math.fsum(w * x * t for w, x, (_, t) in zip(weights, received, timings, strict=True)) / math.fsum(
            w * x * x for w, x in zip(weights, received, strict=True)
        )
    if slope <= 0:
        raise ConfigError(
            f"{operation.value} among {ranks} ranks did not take longer for more bytes: latency hides them. Time "
            "larger buffers."
        )
    return Link(operation, ranks, latency, 1 / slope)
