"""What a flat parameter's handle asks of the unit that gathers it."""

from __future__ import annotations

from typing import Protocol

import torch
from polyshard.interfaces import UnitDtypes, UnitSpec


class HandleUnit(Protocol):
    """The engine's unit over the parameters of one handle, as the handle and the functions of ``_runtime_utils`` know
    it. ``_unit.FlatUnit`` is the one kind.
    """

    @property
    def spec(self) -> UnitSpec:
        """What plugins are told of it."""

    @property
    def dtypes(self) -> UnitDtypes:
        """In which it computes and reduces."""

    def take_up_home(self, *, refuse_offload: bool = True) -> None:
        """Make the flat parameter's data the master, where a user moved or cast it."""

    def reduced_gradient(self) -> torch.Tensor | None:
        """This rank's reduced gradient (``[shard_numel]``); None where no parameter has one."""

    def show_views(self) -> None:
        """Let modules see whole parameters; the flat parameter is whole too."""

    def expose_whole(self) -> None:
        """Let the user see whole parameters in the original dtype."""

    def unshard(self) -> None:
        """Gather, unless the parameters are whole."""

    def gather(self) -> None:
        """Issue the gather."""

    def conceal(self) -> None:
        """Let modules see what they see outside of compute."""

    def release(self) -> None:
        """Release the gather buffer."""

    def let_go(self) -> None:
        """Let modules see shards again, and release the gather buffer if there is one."""
