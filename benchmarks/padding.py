"""How much padding each layout leaves in the models that ``peers.py`` trains. Arithmetic: no ranks, no memory.

    python benchmarks/padding.py                   # prints the table
    python benchmarks/padding.py --write           # and puts it into docs/figures-parts.md

Padding is what a rank holds, sends and receives beside parameters, in per cent of these. Units are the model's
embedding, blocks and tail, travelling in bf16. A number in brackets is into how many units a layout divided the blocks,
where that is more than one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pages import markers, tell
from polyshard.interfaces import Layout, ParameterGeometry, PluginContext, UnitGeometry
from polyshard_layouts.layouts import Blocks, Flat, Rows
from workloads import WORKLOADS, LanguageModel

PAGE = Path(__file__).parents[1] / "docs" / "figures-parts.md"
BEGIN, END = markers("padding")
NAMES = ("host", "300m", "1b", "8b")
RANKS = (2, 8, 64, 1024)
_ITEMSIZE = 2
_CONTEXT = PluginContext("padding", torch.device("cpu"))
LAYOUTS: dict[str, Layout] = {
    "flat": Flat(_CONTEXT),
    "rows": Rows(_CONTEXT),
    "blocks": Blocks(_CONTEXT),
    "blocks, tiles of 32 x 32": Blocks(_CONTEXT, size=[32, 32]),
}


def units(name: str, shards: int) -> list[UnitGeometry]:
    """The units of one model, cut for so many ranks."""
    with torch.device("meta"):
        model = LanguageModel(WORKLOADS[name])
    found = []
    for module in model.units:
        parameters = tuple(
            ParameterGeometry(key, tuple(each.shape), tuple(each.stride()), each.dtype, True)
            for key, each in module.named_parameters()
        )
        found.append(UnitGeometry(type(module).__name__, parameters, shards, _ITEMSIZE))
    return found


def padding(layout: Layout, name: str, shards: int) -> tuple[int, int, int]:
    """Elements of padding and of parameters in the whole model, and the most units that one became."""
    held = total = most = 0
    for unit in units(name, shards):
        buffers = layout.arrange(unit)
        held += sum(each.shard_numel for each in buffers) * shards
        total += sum(each.numel for each in unit.parameters)
        most = max(most, len(buffers))
    return held - total, total, most


def table() -> str:
    lines = ["| layout | model | " + " | ".join(f"{ranks} ranks" for ranks in RANKS) + " |"]
    lines.append("|---" * (2 + len(RANKS)) + "|")
    for title, layout in LAYOUTS.items():
        for name in NAMES:
            cells = []
            for shards in RANKS:
                spare, total, most = padding(layout, name, shards)
                cells.append(f"{100 * spare / total:.2f}" + (f" ({most})" if most > 1 else ""))
            lines.append(f"| {title} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(tell(__doc__, table, PAGE, (BEGIN, END)))
