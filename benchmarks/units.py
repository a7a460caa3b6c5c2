"""Which units ``budget`` makes of the models that ``peers.py`` trains, beside ``transformer``'s. Arithmetic: no ranks.

    python benchmarks/units.py                     # prints the table
    python benchmarks/units.py --write             # and puts it into benchmarks/figures-parts.md

Models are on the meta device, units travel in bf16, and bytes are those of parameters, without padding. "At once" is
what is gathered at most with one unit ahead (``Room``). "In latency" is the part of all gathers of one forward,
one after the other, in which no byte moves (``Link``). The links are assumed, not measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pages import markers, tell
from polyshard.interfaces import PluginContext, PolicyContext, WrapPolicy
from polyshard.planning.plan import plan_modules
from polyshard_policies.budget import Budget, Link, Room
from polyshard_policies.division import Homes
from polyshard_policies.module_class import Transformer
from torch import nn
from workloads import WORKLOADS, Block, LanguageModel

PAGE = Path(__file__).with_name("figures-parts.md")
BEGIN, END = markers("units")
NAMES = ("host", "300m", "1b", "8b")
_ITEMSIZE = 2
_CONTEXT = PluginContext("units", torch.device("cpu"))
#: Ranks that share a unit, and what connects them.
LINKS = ((8, Link(12e-6, 450e9)), (64, Link(60e-6, 25e9)))
GATHER_BYTES = ("256 MiB", "2 GiB")


@dataclass(frozen=True, slots=True)
class Row:
    """One policy's units of one model."""

    nbytes: Sequence[int]
    """Of each unit that has parameters."""
    at_once: int
    """What is gathered at the same time, at the most."""
    seconds: float
    """Of all gathers, one after the other."""
    latency_s: float
    """Of that, before bytes move."""
    warned: bool
    """Whether the policy said that something is too large."""


def row(model: nn.Module, policy: WrapPolicy, shards: int, link: Link) -> Row:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = policy.plan(model, PolicyContext(shards=shards))
    # As the engine does: the root's embedding and head are units of their own where no policy chose them.
    inner = {stage.module for stage in plan_modules(model, plan, divides=True)} - {model}
    homes = Homes(model, PolicyContext(), _ITEMSIZE)
    owned = homes.owned(inner)
    gathered = [homes.total(own) for own in owned.values() if own]
    return Row(
        gathered,
        Room(None, 0).at_once(homes, owned),
        sum(link.seconds(nbytes, shards) for nbytes in gathered),
        link.latency_s * len(gathered),
        bool(told),
    )


def table() -> str:
    lines = ["| model | ranks, link | policy | units | largest | at once | in latency |", "|---" * 7 + "|"]
    for name in NAMES:
        with torch.device("meta"):
            model = LanguageModel(WORKLOADS[name])
        for shards, link in LINKS:
            table_link = {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
            policies: dict[str, WrapPolicy] = {"`transformer`": Transformer(_CONTEXT, layers=Block)}
            for nbytes in GATHER_BYTES:
                policies[f"`budget`, {nbytes}"] = Budget(
                    _CONTEXT, gather_bytes=nbytes, link=table_link, itemsize=_ITEMSIZE
                )
            for title, policy in policies.items():
                found = row(model, policy, shards, link)
                mark = " (1)" if found.warned else ""
                lines.append(
                    f"| {name} | {shards}, {link} | {title}{mark} | {len(found.nbytes)} | "
                    f"{max(found.nbytes) / 1e6:.1f} MB | {found.at_once / 1e6:.1f} MB | "
                    f"{100 * found.latency_s / found.seconds:.1f} % |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(tell(__doc__, table, PAGE, (BEGIN, END)))
