"""Links of machines that were measured, or whose rates their makers state."""

from __future__ import annotations

from pathlib import Path

from ..config import did_you_mean
from ..errors import ConfigError
from .links import Link, LinkModel, Operation, read_links

_GATHERS = "benchmarks/results/gathers.json (b28b9f8, torch 2.11.0+cu130, NCCL 2.28.9)"


def _h200(ranks: int, gather: tuple[float, float, float], reduction: tuple[float, float, float]) -> tuple[Link, ...]:
    """Microseconds of latency, GB/s and interference, of each."""
    return tuple(
        Link(operation, ranks, latency * 1e-6, rate * 1e9, member_s=member * 1e-6, interference=delays)
        for operation, (latency, rate, delays), member in (
            # Several gathers in one launch take some 20 microseconds more for each further one: docs/figures-archive.md,
            # "Failed ideas".
            (Operation.ALL_GATHER, gather, 20.0),
            (Operation.REDUCE_SCATTER, reduction, 0.0),
        )
    )


# ``fitted`` over the sizes of the source: gathers into registered memory, and reductions of bf16 that add up in fp32.
# Interference is the median of "gemm_cost" over sizes.
_INSIDE = (
    *_h200(2, (36.4, 349.8, 0.24), (82.0, 221.7, 0.46)),
    *_h200(3, (31.4, 345.3, 0.23), (55.6, 237.6, 0.39)),
    *_h200(4, (34.7, 348.8, 0.40), (93.4, 293.8, 0.30)),
)

# 400 Gb/s of each GPU's own adapter, the line rate; latencies and interference as inside a host. Not measured.
_NDR = tuple(
    Link(each.operation, 16, each.latency_s, 50e9, each.member_s, each.interference)
    for each in _INSIDE
    if each.ranks == 4
)

_ALL = (
    LinkModel("h200-nvlink", f"{_GATHERS}: one host, up to 4 GPUs", 8, _INSIDE),
    LinkModel(
        "h200-ndr",
        f"inside a host {_GATHERS}; between hosts the line rate of one 400 Gb/s adapter a GPU, not measured",
        8,
        _INSIDE,
        _NDR,
    ),
)

#: By name.
LINKS = {links.name: links for links in _ALL}


def find_links(name: str) -> LinkModel:
    """Those called ``name``, or in a file of that name.

    Raises:
        ConfigError: neither is there.
    """
    if name in LINKS:
        return LINKS[name]
    if "/" in name or name.endswith(".json") or Path(name).is_file():
        return read_links(name)
    raise ConfigError(
        f"No links are called {name!r}, and no file.{did_you_mean(name, list(LINKS))} Named ones: "
        f"{', '.join(sorted(LINKS))}."
    )
