"""What ``fully_shard`` is given, checked, as a configuration of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from glob import escape

import torch
import torch.distributed.fsdp as torch_fsdp
from polyshard.config import PluginChoice, ShardConfig, Strategy
from polyshard.errors import ConfigError, ConfigTypeError, UnsupportedError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ._meshes import DataMesh
from .policies import CPUOffloadPolicy, OffloadPolicy

#: From torch 2.15 on a ``reduce_dtype`` of None is the parameters' own dtype, and ``param_dtype`` before.
_REDUCES_IN_OWN = hasattr(torch_fsdp.MixedPrecisionPolicy(), "param_dtype_override_fn")


def config_for(
    over: DataMesh,
    reshard_after_forward: bool | int | None,
    mp_policy: object,
    offload_policy: object,
    named: Mapping[str, nn.Parameter],
) -> ShardConfig:
    """The engine's settings. ``named``: parameters and their names.

    Raises:
        ConfigError, ConfigTypeError: an argument is of the wrong type, or a value that it cannot take.
        UnsupportedError: parameters are to be offloaded in an own way.
    """
    releases = _releases(reshard_after_forward, over.shards)
    strategy, mesh = Strategy.FULL_SHARD, over.mesh
    if mesh.size() == 1 or not over.cuts:
        strategy = Strategy.NO_SHARD
        if mesh.ndim == 2 and mesh.mesh_dim_names is not None:
            mesh = mesh[mesh.mesh_dim_names[1]]
    elif mesh.ndim == 2:
        strategy = Strategy.HYBRID_SHARD
    return ShardConfig(
        mesh=mesh,
        strategy=strategy,
        reshard_after_forward=releases,
        precision=_precision(mp_policy, named),
        offload=_offload(offload_policy),
        device=_device(mesh),
        # Here modules are units because the program says so, and others are not.
        split_root=False,
    )


def _releases(reshard_after_forward: bool | int | None, shards: int) -> bool | int | None:
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if not isinstance(reshard_after_forward, int):
        raise ConfigError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
            f"{reshard_after_forward!r}. Give True, False or None."
        )
    if reshard_after_forward < 1 or shards % reshard_after_forward:
        raise ConfigError(
            f"If passing reshard_after_forward as an int, it should be a factor of {shards}, not "
            f"{reshard_after_forward}. Give True, False or None."
        )
    return reshard_after_forward


def _precision(policy: object, named: Mapping[str, nn.Parameter]) -> PluginChoice:
    if not isinstance(policy, torch_fsdp.MixedPrecisionPolicy):
        raise ConfigTypeError(f"mp_policy should be a MixedPrecisionPolicy, not {policy!r}.")
    return {
        "name": "mixed",
        "param": policy.param_dtype,
        "reduce": policy.reduce_dtype,
        "reduce_in_master": _REDUCES_IN_OWN,
        "keep": [escape(name) for name, parameter in named.items() if _keeps_dtype(policy, name, parameter)],
        "output": policy.output_dtype,
        "cast_inputs": policy.cast_forward_inputs,
        "cast_root_inputs": policy.cast_forward_inputs,
    }


def _keeps_dtype(policy: object, name: str, parameter: nn.Parameter) -> bool:
    # Torch's own has it from 2.15 on.
    chooses, cast_to = getattr(policy, "param_dtype_override_fn", None), getattr(policy, "param_dtype", None)
    dtype = None if chooses is None else chooses(parameter)
    if dtype is None:
        return False
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"param_dtype_override_fn must return a torch.dtype or None but got {type(dtype)} for '{name}'. Return the "
            "parameter's own dtype, or None for param_dtype."
        )
    if dtype not in (cast_to, parameter.dtype):
        raise ConfigError(
            "param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype but got "
            f"{dtype} for '{name}' with dtype {parameter.dtype} and param_dtype {cast_to}."
        )
    return dtype != cast_to


def _offload(policy: object) -> PluginChoice:
    if isinstance(policy, CPUOffloadPolicy):
        return {"name": "cpu", "pin_memory": policy.pin_memory}
    if policy is None or type(policy) is OffloadPolicy:
        return "none"
    if isinstance(policy, OffloadPolicy):
        raise UnsupportedError(
            f"fully_shard does not know the offload policy {type(policy).__name__}, and would offload nothing. Give "
            "CPUOffloadPolicy, or shard with polyshard.shard and an offload manager of your own."
        )
    raise ConfigTypeError(f"offload_policy should be an OffloadPolicy, not {policy!r}.")


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
