"""FSDP instances inside a module."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._common_utils import _get_module_fsdp_state


def _get_fsdp_states(module: nn.Module) -> list[Any]:
    """Each FSDP instance in ``module``, itself included, in the order of ``module.modules()``."""
    return [each for each in module.modules() if _get_module_fsdp_state(each) is not None]


def _get_fsdp_handles(module: nn.Module) -> list[Any]:
    """The flat parameters' handles in ``module``; an instance without parameters of its own has none."""
    return [state._handle for state in _get_fsdp_states(module) if state._handle is not None]
