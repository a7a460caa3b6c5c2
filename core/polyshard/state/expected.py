"""State that an optimizer has not made yet, found out on stand-ins for its parameters.

Which state an optimizer keeps it says by no more than making it, in its first step.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

#: Optimizers that keep something else of large parameters do so from 4,096 elements on.
_MOST = 1 << 16


def expected_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter, Mapping[str, Any]]]:
    """What ``optimizer`` would keep: a parameter of its own, what stood for it in a step, and the state after that.

    Of each group the largest parameter of each number of dimensions, cut to 65,536 elements. Nothing of torch's own
    optimizers, whose state is known to be of parameters' shapes, and nothing of those that cannot step so: what was
    wrong with these they say in their first step. Neither ``optimizer`` nor random states change.
    """
    if _is_known(optimizer):
        return
    for group in optimizer.param_groups:
        largest: dict[int, nn.Parameter] = {}
        for parameter in group["params"]:
            known = largest.get(parameter.ndim)
            if parameter.requires_grad and (known is None or parameter.numel() > known.numel()):
                largest[parameter.ndim] = parameter
        for parameter in largest.values():
            if parameter.numel() and not parameter.is_meta and not optimizer.state.get(parameter):
                stand_in = _stand_in(parameter)
                yield parameter, stand_in, _state_after_a_step(optimizer, group, stand_in)


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    # Of those that exchange parameters, and of those that let others step, a copy would not step by itself.
    together = hasattr(kind, "keeps_at_owners")
    around = any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())
    return kind.__module__.startswith("torch.optim.") or together or around


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    shape = list(parameter.shape)
    while shape and torch.Size(shape).numel() > _MOST:
        longest = shape.index(max(shape))
        shape[longest] = max(1, shape[longest] * _MOST // torch.Size(shape).numel())
    with torch.inference_mode(False):
        stand_in = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
        stand_in.grad = torch.zeros_like(stand_in)
    return stand_in


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], stand_in: nn.Parameter
) -> Mapping[str, Any]:
    # Not copy.copy, which asks the class for less than it needs to step.
    copied: Any = object.__new__(type(optimizer))
    copied.__dict__.update(vars(optimizer))
    copied.state = defaultdict(dict)
    copied.param_groups = [
        {key: value for key, value in group.items() if key != "param_names"} | {"params": [stand_in]}
    ]
    copied._optimizer_step_pre_hooks, copied._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    devices = [stand_in.device] if stand_in.device.type == "cuda" else []
    try:
        # Some compile their steps, which takes longer than one does. The class's own: schedulers put others around.
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            type(optimizer).step(copied)
    except Exception:
        return {}
    found: Mapping[str, Any] = copied.state.get(stand_in, {})
    return found
