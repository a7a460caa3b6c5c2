"""A whole unit as one parameter, for the optimizer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from ...errors import ParameterChangedError, StateError
from ..transport.buffer import view_of
from .originals import MasterViews, Recipient


class Named(Protocol):
    """What errors need of a unit."""

    @property
    def name(self) -> str:
        """Its name in messages."""


class FlatMaster:
    """One parameter over a unit's whole master, for optimizers that treat all elements alike.

    A step of the optimizer then costs one tensor a unit. Padding stays zero: its gradient is.
    """

    def __init__(self, originals: MasterViews, master: torch.Tensor, unit: Named, rank: int) -> None:
        self._originals = originals
        self._master = master
        self._unit = unit
        self._rank = rank
        self._mixed = False
        if any(original.grad is not None for original in originals.tensors):
            raise StateError(
                f"A parameter of {self._where} has a gradient already, which its flat parameter would not get. "
                "Call flat_parameters() before the first backward, or after zero_grad()."
            )
        with torch.inference_mode(False):
            self.parameter = nn.Parameter(self._whole(), requires_grad=False)
        self.follow_requires_grad()

    @property
    def _where(self) -> str:
        return f"unit '{self._unit.name}' on rank {self._rank}"

    @property
    def recipient(self) -> Recipient:
        """It receives the whole of this rank's gradient."""
        return Recipient(self.parameter, 0, (self._master.numel(),), (1,))

    def follow_requires_grad(self) -> None:
        """Train it where the originals are trained.

        Raises:
            StateError: only some of them are: weight decay and momentum would move the others.
        """
        trained = set(self._originals.trained)
        self._mixed = len(trained) > 1
        if self._mixed:
            raise StateError(
                f"Only some parameters of {self._where} are trained, but its flat parameter is updated as one. Freeze "
                "all of them, freeze them before sharding, or give model.parameters() to the optimizer."
            )
        self.parameter.requires_grad_(trained == {True})

    def take_up_changes(self) -> None:
        """Honour data that the user gave the flat parameter since the last forward.

        Raises:
            ParameterChangedError: of another shape, dtype or device.
            StateError: as ``follow_requires_grad``, until that was mended.
        """
        if self._mixed:
            self.follow_requires_grad()
        given, master = self.parameter.data, self._master
        if given.data_ptr() == master.data_ptr() and given.shape == master.shape and given.dtype == master.dtype:
            return
        if given.shape != master.shape or given.dtype != master.dtype or given.device != master.device:
            raise ParameterChangedError(
                f"The flat parameter of {self._where} was changed to {given.dtype} {tuple(given.shape)} on "
                f"{given.device}; its shard is {master.dtype} {tuple(master.shape)} on {master.device}. Keep shape, "
                "dtype and device."
            )
        master.copy_(given)
        self.parameter.data = self._whole()

    def _whole(self) -> torch.Tensor:
        return view_of(self._master, tuple(self._master.shape), (1,), 0)
