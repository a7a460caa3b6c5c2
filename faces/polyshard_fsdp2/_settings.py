"""What ``fully_shard`` is given, checked, as a configuration of the engine, and the layout of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from polyshard.config import PluginChoice, ShardConfig, Strategy
from polyshard.errors import ConfigAssertionError, ConfigError, ConfigTypeError, UnsupportedError
from polyshard.extension import gathers_itself
from polyshard.interfaces import Arrangement, Layout, ParameterGeometry, UnitGeometry
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

#: Torch's own are taken by value: a program may import them from there and ``fully_shard`` from here.
_PRECISIONS = (MixedPrecisionPolicy, torch_fsdp.MixedPrecisionPolicy)
_ON_HOST = (CPUOffloadPolicy, torch_fsdp.CPUOffloadPolicy)
_NOWHERE = (OffloadPolicy, torch_fsdp.OffloadPolicy)


def mesh_for(mesh: DeviceMesh | None, dp_mesh_dims: object) -> DeviceMesh:
    """``mesh``, or one over all ranks.

    Raises:
        UnsupportedError: ``dp_mesh_dims`` is given.
        ConfigTypeError, ConfigError, ConfigAssertionError: ``mesh`` is none of one or of two named dimensions.
    """
    if dp_mesh_dims is not None:
        raise UnsupportedError(
            f"fully_shard got dp_mesh_dims={dp_mesh_dims}, for parameters that are DTensors on a mesh of several "
            "parallelisms, which the engine does not shard. Leave it out, and give the one or two data-parallel "
            "dimensions as mesh."
        )
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if not dist.is_initialized():
            dist.init_process_group()
        return init_device_mesh((accelerator or torch.device("cpu")).type, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ConfigTypeError(
            f"fully_shard expects a DeviceMesh as mesh, but got {mesh!r}. Make one with init_device_mesh."
        )
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}. Give (shard,) or (replicate, shard)."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ConfigAssertionError(
            f"fully_shard got the 2D mesh {mesh} without names. Please init the 2D mesh for HSDP with mesh_dim_names "
            "specified."
        )
    return mesh


def config_for(
    mesh: DeviceMesh,
    reshard_after_forward: bool | int | None,
    mp_policy: object,
    offload_policy: object,
    dims: Mapping[str, int],
) -> ShardConfig:
    """The engine's settings. ``dims``: of ``dims_of``.

    Raises:
        ConfigError, ConfigTypeError: an argument is of the wrong type, or a value that it cannot take.
        UnsupportedError: parameters are to be offloaded in an own way.
    """
    releases = _releases(reshard_after_forward, mesh.size(mesh.ndim - 1))
    strategy, over = Strategy.FULL_SHARD, mesh
    if mesh.size() == 1:
        strategy = Strategy.NO_SHARD
        if mesh.ndim == 2 and mesh.mesh_dim_names is not None:
            over = mesh[mesh.mesh_dim_names[1]]
    elif mesh.ndim == 2:
        strategy = Strategy.HYBRID_SHARD
    return ShardConfig(
        mesh=over,
        strategy=strategy,
        reshard_after_forward=releases,
        precision=_precision(mp_policy),
        offload=_offload(offload_policy),
        layout=RowsOfEach(dims),
        device=_device(mesh),
        # Here modules are units because the program says so, and others are not.
        split_root=False,
    )


class RowsOfEach(Layout):
    """Each parameter in a segment of its own: rank ``k`` holds rows ``[k * each, (k + 1) * each)``, ``each`` being the
    number of rows over that of ranks, rounded up. Some may be cut along another dimension, evenly.

    So every piece is the local tensor of a ``DTensor`` with ``Shard(0)``. What has no rows that lie together is cut
    anywhere; ``fully_shard`` refuses it.
    """

    api_version = 1

    def __init__(self, dims: Mapping[str, int] = MappingProxyType({})) -> None:
        """``dims``: the dimension along which a parameter is cut, by its name, where that is not 0."""
        self._dims = dict(dims)

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        return tuple(self._alone(unit, index, each) for index, each in enumerate(unit.parameters))

    def _alone(self, unit: UnitGeometry, index: int, parameter: ParameterGeometry) -> Arrangement:
        dim = self._dims.get(parameter.name, 0)
        if dim:
            return Arrangement((index,), (0,), parameter.numel // unit.shards, exact=True, dim=dim)
        return _rows(unit, index, parameter)


def _rows(unit: UnitGeometry, index: int, parameter: ParameterGeometry) -> Arrangement:
    row = parameter.row_numel
    if row is None:
        return Arrangement((index,), (0,), unit.aligned_slice(-(-parameter.numel // unit.shards)))
    # Of nothing, too, a slice has an element.
    each = max(1, -(-parameter.shape[0] // unit.shards) * row)
    return Arrangement((index,), (0,), each, frozenset({index}), exact=True)


def dims_of(
    named: Iterable[tuple[str, nn.Parameter]],
    shard_placement_fn: Callable[[nn.Parameter], object] | None,
    ranks: int,
) -> dict[str, int]:
    """The dimensions along which parameters are cut over so many ``ranks``, where not along the first.

    ``named``: parameters and their names.

    Raises:
        UnsupportedError: a parameter is not contiguous, is to be sharded over another mesh, or unevenly along another
            dimension than the first, or along that and gathers itself.
        ConfigAssertionError: a parameter has no such dimension.
        ConfigTypeError: ``shard_placement_fn`` answered nothing that is known.
    """
    dims = {}
    for name, parameter in named:
        if not parameter.is_contiguous():
            raise UnsupportedError(
                f"FSDP does not support non-contiguous parameters yet: '{name}' has shape "
                f"{tuple(parameter.shape)} and strides {parameter.stride()}. Make it contiguous, pass it in "
                "ignored_params, or shard the model with polyshard.shard."
            )
        placement = shard_placement_fn(parameter) if shard_placement_fn is not None else None
        if placement is None:
            continue
        if type(placement).__name__ == "ShardPlacementResult":
            raise UnsupportedError(
                f"shard_placement_fn answered a mesh of its own for '{name}'. All parameters of one call lie on one "
                "mesh: call fully_shard with that mesh on their module."
            )
        if not isinstance(placement, Shard):
            raise ConfigTypeError(
                f"shard_placement_fn answered {placement!r} for '{name}'. Answer None or a Shard of "
                "torch.distributed.tensor."
            )
        dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < parameter.ndim:
            raise ConfigAssertionError(
                f"Shard dim {dim} is invalid for {parameter.ndim}D tensor: '{name}' has shape {tuple(parameter.shape)}"
                ". Answer one of its dimensions in shard_placement_fn."
            )
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if dim and local.shape[dim] % ranks:
            raise UnsupportedError(
                f"FSDP does not support uneven sharding on dim {dim}: '{name}' has shape {tuple(local.shape)}, and "
                f"there are {ranks} ranks. Answer Shard(0), or a dimension that they divide, in shard_placement_fn."
            )
        if dim and gathers_itself(local):
            raise UnsupportedError(
                f"shard_placement_fn answered Shard({dim}) for '{name}', a {type(local).__name__} with "
                "fsdp_pre_all_gather, which is cut along dimension 0 alone. Answer Shard(0)."
            )
        if dim:
            dims[name] = dim
    return dims


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


def _precision(policy: object) -> PluginChoice:
    if not isinstance(policy, _PRECISIONS):
        raise ConfigTypeError(f"mp_policy should be a MixedPrecisionPolicy, not {policy!r}.")
    # Torch's own has it from 2.15 on.
    if getattr(policy, "param_dtype_override_fn", None) is not None:
        raise UnsupportedError(
            "MixedPrecisionPolicy.param_dtype_override_fn: parameters of one call compute in one dtype. Leave it out, "
            "and call fully_shard on modules that compute in another dtype with a policy of their own."
        )
    return {
        "name": "mixed",
        "param": policy.param_dtype,
        "reduce": policy.reduce_dtype,
        "output": policy.output_dtype,
        "cast_inputs": policy.cast_forward_inputs,
        "cast_root_inputs": policy.cast_forward_inputs,
    }


def _offload(policy: object) -> PluginChoice:
    if isinstance(policy, _ON_HOST):
        return {"name": "cpu", "pin_memory": policy.pin_memory}
    if policy is None or type(policy) in _NOWHERE:
        return "none"
    if isinstance(policy, _NOWHERE):
        raise UnsupportedError(
            f"fully_shard does not know the offload policy {type(policy).__name__}, and would offload nothing. Give "
            "CPUOffloadPolicy, or shard with polyshard.shard and an offload manager of your own."
        )
    raise ConfigTypeError(f"offload_policy should be an OffloadPolicy, not {policy!r}.")


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
