"""Names, states and small look-ups that the drop-in's files share."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable
from enum import auto
from typing import Any, Protocol, cast

import torch
from polyshard.errors import TrainingStateError
from polyshard.nested import iter_tensors
from polyshard.planning.plan import MODULE_STATE_ATTRIBUTE
from polyshard_plugins.precision import make_input_cast, make_output_cast
from torch import nn

from ._torch_settings import TorchNamed

#: The name under which a wrapper registers the module that it wraps.
FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
#: What the activation checkpoint wrapper of ``torch.distributed`` adds to the names inside it.
CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
#: The name under which the wrapped module registers its unit's one parameter, with ``use_orig_params=False``.
FLAT_PARAM = "_flat_param"
#: Attribute that marks a tensor as part of a flat parameter.
FSDP_FLATTENED = "_fsdp_flattened"
#: Attribute with arguments that win over all others when a function policy wraps the module.
WRAP_OVERRIDES = "_wrap_overrides"


class TrainingState(TorchNamed):
    """Where an FSDP instance is in its step."""

    #: Between steps.
    IDLE = auto()
    #: From the root's forward to the end of backward.
    FORWARD_BACKWARD = auto()
    #: Inside ``summon_full_params``.
    SUMMON_FULL_PARAMS = auto()


class HandleTrainingState(TorchNamed):
    """Where one flat parameter is in its step."""

    #: Between steps.
    IDLE = auto()
    #: Its module's forward runs.
    FORWARD = auto()
    #: Its gather for backward has been asked for.
    BACKWARD_PRE = auto()
    #: Its gradient is being reduced.
    BACKWARD_POST = auto()
    #: Inside ``summon_full_params``.
    SUMMON_FULL_PARAMS = auto()


class FSDPState(Protocol):
    """What a wrapper, and the state of a module sharded in place, have in common."""

    rank: int

    @property
    def training_state(self) -> TrainingState:
        """Where it is in its step."""


def clean_tensor_name(tensor_name: str) -> str:
    """The name of a parameter or buffer without what FSDP and activation checkpoint wrappers add to it."""
    return tensor_name.replace(FSDP_PREFIX, "").replace(CHECKPOINT_PREFIX, "")


def _assert_in_training_states(state: FSDPState, training_states: Collection[TrainingState]) -> None:
    """Raises ``TrainingStateError`` (a ``ValueError``) unless ``state`` is in one of ``training_states``.

    Rank 0 prints it as well: raised inside a backward hook, the exception may reach nobody.
    """
    if state.training_state in training_states:
        return
    message = (
        f"expected to be in states {list(training_states)} but current state is {state.training_state}, on rank "
        f"{state.rank}. Finish what the current state stands for (a backward, or summon_full_params) before this call."
    )
    if state.rank == 0:
        if isinstance(state, nn.Module):
            print(f"Asserting FSDP instance is: {state}")
        print(f"ERROR: {message}")
        traceback.print_stack()
    raise TrainingStateError(message)


def _get_module_fsdp_state(module: nn.Module) -> Any | None:
    """The FSDP instance that ``module`` is, or the state that an in-place sharding left in it; None for others."""
    # The engine's own module states belong to no instance.
    return getattr(module.__dict__.get(MODULE_STATE_ATTRIBUTE), "instance", None)


def _set_fsdp_flattened(tensor: torch.Tensor) -> None:
    """Mark ``tensor`` as part of a flat parameter, so that an outer wrapper leaves it alone."""
    setattr(tensor, FSDP_FLATTENED, True)


def _is_fsdp_flattened(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is marked as part of a flat parameter."""
    return getattr(tensor, FSDP_FLATTENED, False)


def _named_parameters_with_duplicates(module: nn.Module, **kwargs: Any) -> list[tuple[str, nn.Parameter]]:
    """``named_parameters`` with every name of a shared parameter, or with one name where a module's own
    ``named_parameters`` refuses ``remove_duplicate``.

    Raises ``AssertionError`` when ``remove_duplicate`` is passed.
    """
    assert "remove_duplicate" not in kwargs, "duplicates are what this function adds: leave out `remove_duplicate`"
    try:
        return list(module.named_parameters(**kwargs, remove_duplicate=False))
    except (AssertionError, TypeError):
        return list(module.named_parameters(**kwargs))


def _get_param_to_fqns(model: nn.Module, dedup_shared_params: bool = True) -> dict[nn.Parameter, list[str]]:
    """The clean names of each registered parameter of ``model``; a flat parameter has the names of all that it holds.

    ``dedup_shared_params``: give a shared parameter its first name alone, instead of one for every place.
    """
    found: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in _named_parameters_with_duplicates(module, recurse=False):
            inside = cast("Iterable[str]", getattr(parameter, "_fqns", (name,)))
            names = [clean_tensor_name(f"{prefix}.{local}" if prefix else local) for local in inside]
            if parameter not in found:
                found[parameter] = names
            elif not dedup_shared_params:
                found[parameter].extend(names)
    return found


def _get_handle_fqns_from_root(state: Any, handle: Any | None) -> list[str] | None:
    """The clean names, seen from the root of ``state``, of the parameters in ``handle``; None without a handle."""
    if handle is None:
        return None
    return [clean_tensor_name(name) for name in handle.unit.spec.parameter_names]


def _override_module_mixed_precision(
    root: nn.Module,
    module_classes_to_override: Iterable[type[nn.Module]],
    wrap_override_dict: dict[str, Any] | None = None,
) -> set[type[nn.Module]]:
    """Make every module in ``root`` of the given classes compute in float32; return the classes that were found.

    Floating-point inputs of their forwards are cast to float32 and outputs back, so that the modules after them see the
    precision that they expect. ``wrap_override_dict`` (default ``{"mixed_precision": None}``) becomes each module's
    ``_wrap_overrides``.
    """
    overrides = {"mixed_precision": None} if wrap_override_dict is None else wrap_override_dict
    classes = tuple(set(module_classes_to_override))
    chosen = [module for module in root.modules() if isinstance(module, classes)]
    for module in chosen:
        setattr(module, WRAP_OVERRIDES, overrides)
        casts = _Float32Casts()
        module.register_forward_pre_hook(casts.before, with_kwargs=True)
        module.register_forward_hook(casts.after)
    return {type(module) for module in chosen}


class _Float32Casts:
    """The casts before and after one module's forward."""

    def __init__(self) -> None:
        self._cast_inputs = make_input_cast(torch.float32)
        # The dtype of the last floating-point input: outputs and inputs need not pair up, and one must be chosen.
        self._outside = torch.float32

    def before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtypes = [tensor.dtype for tensor in iter_tensors((args, kwargs)) if tensor.is_floating_point()]
        if dtypes:
            self._outside = dtypes[-1]
        return self._cast_inputs(args, kwargs)

    def after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return make_output_cast(self._outside)(output)
