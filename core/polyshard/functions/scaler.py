"""Loss scaling where gradients are over several meshes, in host memory, or spread over the stages of a pipeline.

``torch.amp.GradScaler`` looks for infinities as the first gradient lies, over its mesh alone: ranks with other parts
would step while these skip. Its copies to host memory are not waited for: [Note: scales that arrive late]. An optimizer
whose gradients are so is refused where torch's own scaler steps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from typing_extensions import override

from ..errors import ConfigError
from ..interfaces import ReduceOp
from ..planning.parts import gradient_of
from ..runtime.live_roots import ParameterLocation, live_roots
from ..runtime.root import Root
from .norms import readable_scales

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose ranks agree on whether a step is skipped, whatever meshes gradients are over.

    Arguments, methods and errors are those of torch's.
    """

    @override
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Called by ``unscale_``, and by ``step`` where the optimizer unscales by itself.

        Raises ConfigError: gradients are fp16, which torch does not unscale; on all ranks.
        """
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = [each for each in live_roots.find(given) if each is not None]
        root = found[0].root if found else live_roots.around(given)
        if root is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for stepping in {each.root.backward_step for each in found}:
            if stepping is not None:
                stepping.before_change("GradScaler")
        for each in found if not allow_fp16 else ():
            if each.unit.dtypes.grad == torch.float16:
                raise ConfigError(
                    f"GradScaler does not unscale fp16 gradients, which unit '{each.unit.name}' has (rank "
                    f"{each.root.rank}). Keep the model in fp32 and shard it with precision='fp16'."
                )
        inv_scale, found_inf = readable_scales(inv_scale, given), readable_scales(found_inf, given)
        device = root.collectives.device
        worst = torch.zeros((), dtype=torch.float32, device=device)
        for gradients in _by_place(given):
            finding, scale = found_inf.to(gradients[0].device), inv_scale.to(gradients[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, finding, scale)
            worst = torch.maximum(worst, finding.reshape(()).to(device))
        # For parameters outside of units alone, too: one scale serves these and the model's other optimizers.
        units = list(dict.fromkeys(each.unit for each in found)) or root.units[:1]
        groups = dict.fromkeys(group for unit in units for group in unit.ranks.everyone)
        with root.meeting("findings of a GradScaler", groups):
            for group in groups:
                group.all_reduce(worst, op=ReduceOp.MAX).wait()
        beside = _find_infinities([root, *(each.root for each in found)])
        if beside is not None:
            worst = torch.maximum(worst, beside.to(device))
        # One finding alone: fused optimizers get the sum over devices, and skip a step where that is 1.
        return {device: worst}


def _by_place(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """This rank's gradients of ``parameters``, by device and dtype."""
    places: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is not None:
            places.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(places.values())


def _find_infinities(roots: Iterable[Root]) -> torch.Tensor | None:
    """1 where a gradient of a model that steps with ``roots`` is no finite number, else 0; None where none does."""
    asking = [root.find_infinities for root in dict.fromkeys(roots) if root.find_infinities is not None]
    return torch.stack([ask() for ask in asking]).amax() if asking else None


def refuse_torch_scaler(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found: Iterable[ParameterLocation]
) -> None:
    """Raise where ``scaler``, if it is torch's own, which is about to step ``optimizer``, cannot know what ranks must.

    ``found``: its parameters of sharded models, in its order.

    Raises ConfigError: naming a parameter, and what to use.
    """
    if isinstance(scaler, GradScaler):
        return
    # Torch makes one finding of all gradients of a dtype, and reduces it as the first of them lies.
    first: dict[torch.dtype, DTensor] = {}
    for each in found:
        placed, unit = cast("DTensor", each.parameter), each.unit
        if placed.grad is None:
            continue
        before = first.setdefault(unit.dtypes.grad, placed)
        if unit.offloaded and unit.spec.device.type != "cpu":
            why = "is in host memory"
        elif each.root.find_infinities is not None:
            why = "is of one stage of a pipeline"
        elif each.slot is None and any(parameter.part for parameter in unit.parameters):
            why = "has parts of larger tensors"
        elif placed.device_mesh != before.device_mesh:
            why = "is over another mesh than the first one"
        elif any(
            known.is_replicate() and not own.is_replicate()
            for own, known in zip(placed.placements, before.placements, strict=True)
        ):
            why = "is cut where the first one is replicated"
        else:
            continue
        raise ConfigError(
            f"torch.amp.GradScaler steps {type(optimizer).__name__}, and the gradient of '{each.name}' {why} (rank "
            f"{each.root.rank}): ranks would not skip alike. Use polyshard.GradScaler, which has its arguments."
        )
