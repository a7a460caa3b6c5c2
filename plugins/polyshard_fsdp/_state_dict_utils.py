"""State dicts of FSDP instances."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import nn

from .api import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType

if TYPE_CHECKING:
    from .fully_sharded_data_parallel import FullyShardedDataParallel


def _register_all_state_dict_hooks(fsdp: FullyShardedDataParallel) -> None:
    """Let the wrapper's state dicts be those of its state dict type."""


def _set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    raise NotImplementedError


def _get_state_dict_type(module: nn.Module) -> StateDictSettings:
    raise NotImplementedError


def _state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> AbstractContextManager[None]:
    raise NotImplementedError
