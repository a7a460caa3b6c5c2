"""Names, states and small look-ups that the drop-in's files share."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import torch
from polyshard.errors import warn_once
from polyshard.extension import MODULE_STATE_ATTRIBUTE
from torch import nn

#: Warns once a process on every rank, as FSDP does, also of what all ranks see alike.
warn = partial(warn_once, rank=0)

#: The name under which a wrapper registers the module that it wraps.
FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
#: The prefix that the activation checkpoint wrapper of ``torch.distributed`` adds to the names inside it.
CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
#: The name under which the wrapped module registers its unit's one parameter, with ``use_orig_params=False``.
FLAT_PARAM = "_flat_param"
#: Attribute that marks a tensor as part of a flat parameter.
FSDP_FLATTENED = "_fsdp_flattened"


class TrainingState(Enum):
    """Where an FSDP instance is in its step."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class HandleTrainingState(Enum):
    """Where one flat parameter is in its step."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()


def clean_tensor_name(tensor_name: str) -> str:
    """The name of a parameter or buffer without the prefixes of FSDP and activation checkpoint wrappers."""
    return tensor_name.replace(FSDP_PREFIX, "").replace(CHECKPOINT_PREFIX, "")


def _get_module_fsdp_state(module: nn.Module) -> Any | None:
    """The FSDP instance that ``module`` is; None for other modules."""
    # The engine's own module states belong to no instance.
    return getattr(module.__dict__.get(MODULE_STATE_ATTRIBUTE), "instance", None)


def _is_fsdp_flattened(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is part of a flat parameter, so that an outer wrapper leaves it alone."""
    return getattr(tensor, FSDP_FLATTENED, False)


def _get_param_to_fqns(model: nn.Module, dedup_shared_params: bool = True) -> dict[nn.Parameter, list[str]]:
    """The clean names of each registered parameter of ``model``; a flat parameter has the names of all that it holds.

    ``dedup_shared_params``: give a shared parameter its first name alone, instead of one for every place.
    """
    found: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            inside = cast("Iterable[str]", getattr(parameter, "_fqns", (name,)))
            names = [clean_tensor_name(f"{prefix}.{local}" if prefix else local) for local in inside]
            if parameter not in found:
                found[parameter] = names
            elif not dedup_shared_params:
                found[parameter].extend(names)
    return found


def _get_handle_fqns_from_root(state: Any, handle: Any | None) -> list[str] | None:
    """The clean names, seen from the root of ``state``, of the parameters in ``handle``; None without a handle."""
    return None if handle is None else [clean_tensor_name(name) for name in handle.unit.spec.parameter_names]
