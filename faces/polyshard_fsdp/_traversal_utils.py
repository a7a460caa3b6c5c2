"""FSDP instances inside a module: wrappers, and modules that were sharded in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._common_utils import _get_module_fsdp_state


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[Any], list[nn.Module]]:
    """Each FSDP state in ``module`` once, in the order of ``module.modules()``, and the module that has it.

    A wrapper is its own state. Modules that share a state are represented by the first of them.
    """
    owners: dict[Any, nn.Module] = {}
    for submodule in module.modules():
        state = _get_module_fsdp_state(submodule)
        if state is not None:
            owners.setdefault(state, submodule)
    return list(owners), list(owners.values())


def _get_fsdp_states(module: nn.Module) -> list[Any]:
    """The first of the two lists of ``_get_fsdp_states_with_modules``."""
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_handles(module: nn.Module) -> list[Any]:
    """The flat parameters' handles in ``module``; an instance without parameters of its own has none."""
    return [state._handle for state in _get_fsdp_states(module) if state._handle is not None]
