"""The user's own parameters as views of the master, and the changes that users make to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .. import _torch_private
from ..planning.layout import Piece, Slot, product
from .buffers import view_of


@dataclass(frozen=True, slots=True)
class GradientTarget:
    """A parameter whose ``.grad`` is a range of the reduced gradient."""

    parameter: nn.Parameter
    offset: int
    """First element within this rank's shard."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    index: int | None = None
    """Which parameter of the layout it is; None where it stands for all of them."""

    @property
    def numel(self) -> int:
        return product(self.shape)


class MasterViews(ABC):
    """The parameters that the user and the optimizer see of one unit, as views of its master."""

    tensors: list[nn.Parameter]
    """Every such parameter, once."""

    @property
    @abstractmethod
    def gradient_targets(self) -> list[GradientTarget]:
        """The parameters that receive this rank's gradient, in order of offset."""

    @property
    @abstractmethod
    def trained(self) -> list[bool]:
        """Whether each parameter of the layout is trained."""

    @property
    def versions(self) -> Sequence[int]:
        """Numbers that change where a program writes to a parameter. Not seen is what ``.data`` hides."""
        return ()

    @abstractmethod
    def expose(self) -> None:
        """Make them views of the master."""

    @abstractmethod
    def adopt_changes(self) -> bool:
        """Take over the user's changes since the last forward; returns whether any ``requires_grad`` changed."""

    @abstractmethod
    def retrained(self) -> bool:
        """Whether any ``requires_grad`` changed since the last call."""

    def take_trained(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Take over ``requires_grad`` from those of ``leaves``, whole parameters, on which the user changed it.

        Returns whether there are any. For parameters that modules hold outside of compute.
        """
        return False

    @abstractmethod
    def refuse_changes(self, *, held: bool) -> None:
        """Raise for parameters replaced between forward and backward. ``held``: modules hold them now."""


def part_of_master(master: torch.Tensor, slot: Slot, piece: Piece | None, *, whole: bool) -> torch.Tensor:
    """This rank's ``piece`` of the parameter at ``slot``, over the memory of ``master``.

    ``piece``: None where this rank has no element. ``whole``: the master is the whole unit.
    """
    if whole:
        return view_of(master, slot.shape, slot.stride, slot.offset)
    if piece is None:
        shape, _ = slot.shown(0)
        return torch.empty(shape, dtype=master.dtype, device=master.device)
    return view_of(master, *slot.shown(piece.numel), piece.shard_offset)


def become(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give ``parameter`` other data, of any shape and device, without changing which object it is."""
    if not parameter.is_meta:
        parameter.data = data
        return
    # A meta tensor refuses data of another device; swapping the two objects' insides does not.
    replacement = nn.Parameter(data, requires_grad=parameter.requires_grad)
    replacement.__dict__.update(parameter.__dict__)
    _torch_private.swap_tensors(parameter, replacement)
