"""Which modules polyshard has sharded, and what belongs to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from ..engine.planning.plan import STAGE_ATTRIBUTE
from ..engine.step.root import Root, root_of
from ..engine.step.stage import Stage
from ..engine.step.unit import Unit
from ..engine.surface.live_roots import live_roots
from ..errors import StateError


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside of ``torch.compile``'s."""
    found: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return found


def sharded_in(model: nn.Module) -> nn.Module | None:
    """The outermost sharded module that ``model`` is: itself, in ``torch.compile``, or in polyshard's wrapper.

    None where it is none, also where modules inside of it are.
    """
    module = uncompiled(model)
    inner = module._modules.get("module")
    if STAGE_ATTRIBUTE not in module.__dict__ and inner is not None and STAGE_ATTRIBUTE in inner.__dict__:
        module = inner
    stage = module.__dict__.get(STAGE_ATTRIBUTE)
    # Those of the drop-in have no root before their first forward, and are not served.
    return module if type(stage) is Stage and root_of(stage).stages[0] is stage else None


def root_in(module: nn.Module) -> Root:
    """What the units of the sharded ``module`` share; closed or not."""
    return root_of(module.__dict__[STAGE_ATTRIBUTE])


def named_parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's parameters, and the flat ones that stand for those of a unit."""
    yield from model.named_parameters()
    module = sharded_in(model)
    if module is not None:
        yield from ((unit.name, unit.flat.parameter) for unit in root_in(module).units if unit.flat is not None)


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
