"""Where values come from that a model or an optimizer is given, and whether a target can be filled from there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .boxes import Box
from .sharded import CheckpointTensor

if TYPE_CHECKING:
    from ..runtime.unit import Unit
    from .places import Holding

_MOST_NAMES = 8

#: By parameter and name of the state, the source's key.
SavedState = Mapping[str, Mapping[str, str]]


class Source(ABC):
    """Values by key, which are described before any is read. A key stands for a path through nested containers."""

    #: Whether all elements of everything are there; not so where one rank of a pretended world saved.
    complete: bool = True
    #: Whether values of a model are converted to its dtypes, instead of refused where they are of others.
    converts: bool = False
    #: Why elements that a target needs may be missing, and what to do.
    remedy: str = "one rank of a pretended world saved it. Load it on the same rank of the same world size."

    @property
    @abstractmethod
    def described(self) -> str:
        """For the middle of an error's sentence."""

    @abstractmethod
    def read(self, targets: dict[str, Any]) -> None:
        """Fill tensors in place and replace other values, by key."""

    @abstractmethod
    def entry(self, key: str) -> Any | None:
        """What is said about ``key``: ``TensorStorageMetadata`` of a tensor; None where there is none."""

    @abstractmethod
    def paths(self, *prefix: str) -> Mapping[str, tuple[Any, ...]]:
        """Each key under ``prefix`` and the path of its value."""

    def mended(
        self, saved: SavedState, groups: Sequence[Sequence[Holding]], units: Sequence[Unit], rank: int
    ) -> SavedState:
        """``saved`` with keys of what is known to be wrong replaced by those of what is right.

        Args:
            saved: What there is of each parameter of the optimizer.
            groups: What each of the optimizer's groups holds.
            units: Of the model.
            rank: For errors.

        Raises:
            ConfigError: it cannot be known what is right.
        """
        return saved


def problem_with(source: Source, key: str, what: str, target: Any, where: str) -> str | None:
    """Why not all of ``target`` can be read from ``source`` under ``key``; None where it can.

    ``what`` names the target, ``where`` the rank.
    """
    entry = source.entry(key)
    if not isinstance(entry, TensorStorageMetadata):
        return f"{what} is no tensor in {source.described} {where}. Load it into the model that it was saved from."
    if tuple(entry.size) != tuple(target.shape):
        return (
            f"{what} has shape {tuple(entry.size)} in {source.described} but {tuple(target.shape)} in the model "
            f"{where}. Load it into the model that it was saved from."
        )
    if entry.properties.dtype != target.dtype and not source.converts:
        return (
            f"{what} is {entry.properties.dtype} in {source.described} but {target.dtype} in the model {where}. "
            f"Convert the model before sharding, by to({entry.properties.dtype}); after loading, it cannot be."
        )
    if sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size):
        return None
    wanted = (
        [chunk.box for chunk in target.chunks]
        if isinstance(target, CheckpointTensor)
        else [Box((0,) * target.ndim, tuple(target.shape))]
    )
    for box in wanted:
        held = sum(_overlap(box, chunk.offsets, chunk.sizes) for chunk in entry.chunks)
        if held != box.numel:
            return (
                f"{opening(source)} holds {held} of the {box.numel} elements of "
                f"{what} from {list(box.offsets)} on {where}: {source.remedy}"
            )
    return None


def _overlap(box: Box, offsets: Iterable[int], sizes: Iterable[int]) -> int:
    return math.prod(
        max(0, min(low + size, start + extent) - max(low, start))
        for low, size, start, extent in zip(box.offsets, box.sizes, offsets, sizes, strict=True)
    )


def opening(source: Source) -> str:
    """``described`` for the beginning of a sentence."""
    return f"{source.described[0].upper()}{source.described[1:]}"


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, quoted."""
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown
