"""States of optimizers in blocks of a few bits, each with a scale of its own: who has them, and what they are made of.

torchao's optimizers count blocks from the beginning of a rank's part of a parameter. Where that is not a whole number
of blocks behind the parameter's beginning, other elements share a scale than on the unsharded model, and a warning says
so. The package is not imported here.

[Note: parts of a state]
A state in blocks is several tensors: *codes*, one for each element or for a few elements in one byte; *scales*, one for
each block; and *tables* of what codes mean, the same for every block. They are in a subclass of ``Tensor``, which gives
them by ``__tensor_flatten__``: a parameter's ``exp_avg`` is told as ``exp_avg:codes``, ``exp_avg:scale`` and
``exp_avg:qmap``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError, warn_once
from ..planning.parts import is_dtensor
from ..runtime.live_roots import ParameterLocation
from ..runtime.unit import Unit

#: Between the name of a state and that of a tensor inside of it.
_INSIDE = ":"


class Role(enum.Enum):
    ELEMENTS = "elements"
    """A number for each element, or its code; or a byte of several codes."""
    SCALES = "scales"
    """A number for each block."""
    TABLE = "table"
    """What codes mean."""


_ROLES = {
    "codes": Role.ELEMENTS,
    "scale": Role.SCALES,
    "qmap": Role.TABLE,
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """How an optimizer divides a tensor."""

    size: int
    """Elements of a block."""
    smallest: int
    """Elements of a tensor below which its state is in full precision, as that of one that is not made of blocks."""

    def divides(self, numel: int) -> bool:
        """Whether a tensor of ``numel`` elements has its state in blocks."""
        return numel >= self.smallest and not numel % self.size

    def differ(self, unit: Unit, slot: int) -> bool:
        """Whether blocks of a parameter's pieces, on any rank, are not those of the whole parameter.

        Pieces that are too small to be divided are more exact than the whole, and do not count.
        """
        ranges = [unit.layout.range_of(slot, rank) for rank in range(unit.ranks.shard_size)]
        first, *others = [stop - start for start, stop in ranges if start < stop] or [0]
        where = unit.layout.slots[slot]
        # Of pieces that are cut along another dimension than the first, rows are shorter.
        if where.dim or not self.divides(where.numel):
            return any(map(self.divides, (first, *others)))
        # All but the last are as large as the first.
        return bool(others) and first % self.size != 0 and first >= self.smallest


def _packages_of(optimizer: torch.optim.Optimizer) -> set[str]:
    return {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}


def blocks_of(optimizer: torch.optim.Optimizer) -> Blocks | None:
    """The blocks of ``optimizer``; None where it treats all elements of a tensor alike."""
    size = getattr(optimizer, "block_size", None) if "torchao" in _packages_of(optimizer) else None
    # torchao's optimizer that only rounds has a single block.
    return Blocks(int(size), 4096) if size and math.isfinite(size) else None


def role_of(name: str) -> Role | None:
    """The role of the tensor told as ``name``; None of an ordinary state."""
    return _ROLES.get(name.partition(_INSIDE)[2])


def state_name_of(name: str) -> str:
    """The name of the state that the tensor ``name`` is a part of: the one that it has in full precision."""
    return name.partition(_INSIDE)[0]


def taken_apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` of one parameter with the tensors of those in blocks; others are themselves, and in their order."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        inner = _inner(value)
        found.update({name: value} if inner is None else {f"{name}{_INSIDE}{each}": inner[each] for each in inner})
    return found


def put_together(parts: Mapping[str, Any], like: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    """The state of ``shape`` that was ``taken_apart``, in the classes of ``like``, another of its optimizer's."""
    found: dict[str, Any] = {}
    inner: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in parts.items():
        outer, _, inside = name.partition(_INSIDE)
        if inside:
            found.setdefault(outer, None)
            inner.setdefault(outer, {})[inside] = value
        else:
            found[name] = value
    for name, tensors in inner.items():
        model: Any = like[name]
        context = _of_shape(model.__tensor_flatten__()[1], tuple(model.shape), tuple(shape))
        size = torch.Size(shape)
        found[name] = type(model).__tensor_unflatten__(
            tensors, context, size, torch.empty(size, device="meta").stride()
        )
    return found


def _inner(value: object) -> dict[str, torch.Tensor] | None:
    """The tensors inside of a state in blocks; None for others, and for those of which some are not known."""
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        return None
    names: Sequence[str] = flatten()[0]
    if not {"codes", "scale"} <= set(names) <= _ROLES.keys():
        return None
    return {name: getattr(value, name) for name in names}


def _of_shape(context: Any, known: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """``context`` of a tensor of the shape ``known`` for one of ``shape``: codes of half a byte do not tell it."""
    if isinstance(context, list | tuple) and not isinstance(context, torch.Size):
        if all(isinstance(each, int) for each in context) and tuple(context) == known:
            return type(context)(shape)
        return type(context)(_of_shape(each, known, shape) for each in context)
    return torch.Size(shape) if isinstance(context, torch.Size) and tuple(context) == known else context


def refuse_plain_kernels(optimizer: torch.optim.Optimizer, found: Iterable[ParameterLocation]) -> None:
    """Raise UnsupportedError where bitsandbytes' kernels would get a ``DTensor``, which they cannot take."""
    if "bitsandbytes" not in _packages_of(optimizer):
        return
    for each in found:
        if is_dtensor(each.parameter):
            raise UnsupportedError(
                f"{type(optimizer).__name__} of bitsandbytes cannot step the DTensor '{each.name}' (rank "
                f"{each.root.rank}): its kernels take plain tensors alone. Use torchao.optim, which takes both."
            )


def warn_of_cut_blocks(optimizer: torch.optim.Optimizer, found: Iterable[ParameterLocation]) -> None:
    """Warn where the result differs from the unsharded model's. ``found``: its parameters in units that are cut."""
    blocks = blocks_of(optimizer)
    if blocks is None:
        return
    # Rank 0 alone warns.
    for each in (each for each in found if each.root.rank == 0):
        kind = f"{type(optimizer).__name__} keeps its state in blocks of {blocks.size} elements"
        if each.slot is None:
            if each.unit.layout.shard_numel >= blocks.smallest:
                warn_once(
                    f"{kind}, and divides the flat parameter of unit '{each.unit.name}' otherwise than each of its "
                    "parameters (rank 0): the result differs slightly from the unsharded model's. Give the optimizer "
                    "model.parameters().",
                    rank=0,
                )
                return
        elif blocks.differ(each.unit, each.slot):
            warn_once(
                f"{kind}, and what ranks have of '{each.name}' is divided otherwise than the whole of it (rank 0): the "
                "result differs slightly from the unsharded model's. It does not where each rank's rows are a multiple "
                f"of {blocks.size} elements, and {blocks.smallest} or more. Filter this warning if that is fine.",
                rank=0,
            )
            return
