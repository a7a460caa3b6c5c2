"""Which modules polyshard has sharded, and what belongs to them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from ..errors import StateError
from ..functions.lookup import live_roots
from ..planning.plan import MODULE_STATE_ATTRIBUTE
from ..runtime.root import Root, root_of
from ..runtime.unit import Unit
from ..trainers import sharded as trainers


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside of ``torch.compile``'s."""
    found: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return found


def sharded_in(model: nn.Module) -> nn.Module | None:
    """The outermost sharded module that ``model`` is: itself, in ``torch.compile``, or in polyshard's wrapper.

    None where it is none, also where modules inside of it are.
    """
    module = trainers.sharded_in(uncompiled(model))
    return module if module is not None and root_in(module).module_states[0].module is module else None


def root_in(module: nn.Module) -> Root:
    """What the units of the sharded ``module`` share; closed or not."""
    return root_of(module.__dict__[MODULE_STATE_ATTRIBUTE])


def refuse_unreduced(parameters: Iterable[torch.Tensor], call: str) -> None:
    """Raise where gradients of ``parameters`` wait for a backward that reduces them.

    Raises:
        StateError: naming the unit.
    """
    units: dict[Unit, None] = {}
    for found in live_roots.find(list(parameters)):
        if found is not None:
            units.setdefault(found.unit)
    for unit in units:
        if unit.gradients.unreduced:
            raise StateError(
                f"{call} came while gradients of unit '{unit.name}' wait for the last backward of an accumulation "
                f"(rank {unit.grid.world.rank}): there is nothing to clip yet. Call it under "
                "`if accelerator.sync_gradients:`."
            )


def refuse_flat(parameters: Iterable[torch.Tensor], call: str) -> None:
    """Raise where ``parameters`` have no gradients of their own, because flat parameters have them.

    Raises:
        StateError: naming the unit.
    """
    for found in live_roots.find(list(parameters)):
        if found is not None and found.slot is not None and found.unit.flat is not None:
            raise StateError(
                f"{call} got parameters of unit '{found.unit.name}', whose gradients are in its flat parameter (rank "
                f"{found.unit.grid.world.rank}). Give it what polyshard.flat_parameters returned."
            )
