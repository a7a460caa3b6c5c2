"""A stage that no policy chose, and how it goes back to the one around it.

Which modules become parts, and why, stands in ``planning/parts.py``. A part must not change what a forward may do:
where another module computes with its parameters, the stand-ins under their names give it back, and from then on the
*host*, the stage that it was taken from, owns its units.
"""

from __future__ import annotations

from functools import partial

from ...errors import UnshardedUseError
from .stage import Stage, show_whole
from .unit import Unit


def lend(stage: Stage, host: Stage) -> None:
    """Let the units of ``stage`` go back to ``host`` as soon as somebody else computes with them."""
    for unit in stage.units:
        unit.lender = partial(_give_back, stage, host)


def _give_back(stage: Stage, host: Stage, unit: Unit, parameter: str) -> None:
    """Somebody else computes with ``parameter`` of ``unit``: from now on ``host`` owns all units of ``stage``.

    Raises:
        UnshardedUseError: outside of a forward and of a backward of the host.
    """
    if not (host.entered or host.in_backward):
        raise UnshardedUseError(
            f"The parameter '{parameter}' was used while it is sharded, outside of the forward of "
            f"'{host.label}' (rank {stage.rank}). Compute with it inside that forward, or name the "
            "method that does with polyshard.register_forward_method."
        )
    moved = stage.units
    stage.own(())
    if moved:
        host.own((*host.units, *moved))
        show_whole(moved, host.module.training, recomputes=False)
    else:
        # In backward, where autograd kept a stand-in.
        unit.unshard()
        unit.wait()
