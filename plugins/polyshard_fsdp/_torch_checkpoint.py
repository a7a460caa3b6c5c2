"""What the functions of ``torch.distributed.checkpoint.state_dict`` meet in a module of the drop-in.

They know torch's own wrappers, and take any other module for one that is not sharded. ``state_dict`` and
``load_state_dict`` are whole all the same. An optimizer's state is not: each rank would return its own piece of it
under the whole parameter's name, or under one that the wrapper has changed. So what would be wrong is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from polyshard.errors import UnsupportedError
from torch import nn

from . import _torch_private
from ._state import FSDPInstance


class CheckpointGuard:
    """Stands in a module's ``__dict__`` under the name that these functions ask every module for, before they send."""

    def __init__(self, instance: FSDPInstance, module: nn.Module) -> None:
        self._instance = instance
        #: The module's own, where it has one.
        self._own = getattr(module, _torch_private.FQN_MODIFIERS, None)

    @classmethod
    def put(cls, instance: FSDPInstance, module: nn.Module) -> None:
        """Guard ``module``, whose forward is that of ``instance``."""
        module.__dict__[_torch_private.FQN_MODIFIERS] = cls(instance, module)

    def __call__(self) -> Mapping[str, str]:
        """Names that state dicts leave out: none of the drop-in's own.

        Raises:
            UnsupportedError: the function that asks would give or take an optimizer's pieces for the whole, or load
                whole values into shards.
        """
        call = _torch_private.checkpoint_call()
        if call is not None:
            self._refuse(*call)
        own: Mapping[str, str] = {} if self._own is None else self._own()
        return own

    def _refuse(self, function: str, arguments: Mapping[str, Any]) -> None:
        instance, unit = self._instance, self._instance._flat_unit
        where = f"({type(instance._stage.inner).__name__} on rank {instance.rank})"
        options = arguments.get("options")
        whole = [each for each in ("full_state_dict", "broadcast_from_rank0") if getattr(options, each, False)]
        if function.startswith("set_") and whole:
            raise UnsupportedError(
                f"torch.distributed.checkpoint.state_dict.{function} with {whole[0]}=True does not know polyshard_fsdp "
                f"{where}, and would load shards where it needs whole parameters. Leave the option out, or call "
                "model.load_state_dict inside FSDP.state_dict_type."
            )
        optimizers = arguments.get("optimizers") or ()
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = (optimizers,)
        if unit is None:
            return
        given = {parameter for each in optimizers for group in each.param_groups for parameter in group["params"]}
        if not given.isdisjoint(unit.originals.tensors):
            raise UnsupportedError(
                f"torch.distributed.checkpoint.state_dict.{function} does not know polyshard_fsdp {where}, and would "
                "take each rank's piece of the optimizer's state for the whole. Call polyshard_fsdp's "
                "FullyShardedDataParallel.optim_state_dict(model, optimizer) and optim_state_dict_to_load instead, "
                "inside its state_dict_type: what they give and take can be saved and loaded by "
                "torch.distributed.checkpoint. For the model alone, get_model_state_dict and set_model_state_dict work."
            )
