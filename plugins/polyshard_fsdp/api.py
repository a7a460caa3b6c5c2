"""The settings of ``FullyShardedDataParallel``: enums and dataclasses, compared and printed by value.

Those of ``torch.distributed.fsdp`` are taken wherever these are.

The dataclasses are not frozen: scripts written for ``torch.distributed.fsdp`` set fields of a settings object before
they pass it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._torch_settings import TorchNamed

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class ShardingStrategy(TorchNamed):
    """What is cut over the ranks, and when the parameters are whole."""

    #: Parameters, gradients and optimizer state are cut; parameters are freed after each forward and each backward.
    FULL_SHARD = auto()
    #: The same, but parameters stay whole from forward to backward (and under ``no_sync`` after backward as well).
    SHARD_GRAD_OP = auto()
    #: Nothing is cut: every rank holds everything, and gradients are all-reduced.
    NO_SHARD = auto()
    #: ``FULL_SHARD`` over the ranks of one node, replicated over the nodes.
    HYBRID_SHARD = auto()
    #: ``SHARD_GRAD_OP`` over the ranks of one node, replicated over the nodes.
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(TorchNamed):
    """When backward asks for the parameters of the unit that comes after the current one; ``None`` is never ahead."""

    #: Before the current unit's gradients are computed: most overlap, two units whole at a time.
    BACKWARD_PRE = auto()
    #: After they are computed and the current unit is freed: the gather overlaps the reduction alone.
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """Which dtype each kind of tensor has; ``None`` leaves it as it is. Only floating-point tensors are cast."""

    #: Parameters in forward and backward. The shards that the optimizer updates keep their own dtype.
    param_dtype: torch.dtype | None = None
    #: Gradients while they are reduced; ``None`` takes ``param_dtype``.
    reduce_dtype: torch.dtype | None = None
    #: Buffers, from the first forward on.
    buffer_dtype: torch.dtype | None = None
    #: Leave reduced gradients in ``reduce_dtype`` instead of the parameters' own dtype.
    keep_low_precision_grads: bool = False
    #: Cast the inputs of this unit's forward to ``param_dtype``. The root asks the next field instead.
    cast_forward_inputs: bool = False
    #: The same for the root's forward, whatever the field before says.
    cast_root_forward_inputs: bool = True
    #: Modules of these classes become units of their own in full precision, where there is an ``auto_wrap_policy``.
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """What lives in host memory while it is not computed with."""

    #: Parameters and gradients, so that the optimizer steps on the host.
    offload_params: bool = False


class StateDictType(TorchNamed):
    """What ``state_dict`` returns and ``load_state_dict`` takes."""

    #: Whole parameters under their own names, as an unsharded model has them.
    FULL_STATE_DICT = auto()
    #: The local shard of each flat parameter.
    LOCAL_STATE_DICT = auto()
    #: This rank's piece of each parameter, as a distributed tensor under the parameter's own name.
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """Common to all kinds of state dict; use the class of the kind."""

    #: Move the values to host memory.
    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """For ``StateDictType.FULL_STATE_DICT``."""

    #: Only rank 0 gets the values; the others get an empty dict.
    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For ``StateDictType.LOCAL_STATE_DICT``."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For ``StateDictType.SHARDED_STATE_DICT``."""

    #: Values are ``DTensor`` instead of ``ShardedTensor``. Set by the wrapper, not by users.
    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Common to all kinds of optimizer state dict; use the class of the kind."""

    #: Move tensor values to host memory.
    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """For ``StateDictType.FULL_STATE_DICT``."""

    #: Only rank 0 gets the values; the others get an empty dict.
    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For ``StateDictType.LOCAL_STATE_DICT``."""

    #: Local shards stay where they are unless asked otherwise.
    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For ``StateDictType.SHARDED_STATE_DICT``."""

    #: Values are ``DTensor`` instead of ``ShardedTensor``. Set by the wrapper, not by users.
    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The kind of state dict in force, with its settings for the model and for the optimizer."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig
