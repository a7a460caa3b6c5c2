"""Which dimensions of a mesh are for data, and how parameters lie on that and on the mesh around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from polyshard.errors import (
    ConfigAssertionError,
    ConfigError,
    ConfigTypeError,
    ParameterError,
    UnsupportedError,
)
from polyshard.extension import (
    ExtensionArguments,
    LeafForm,
    ManagedParameter,
    ParameterPlace,
    Placing,
    TensorPart,
    dtensor_leaf,
    dtensor_spec,
    gathers_itself,
    is_dtensor,
    joined_mesh,
    local_of,
)
from polyshard.interfaces import UnitDtypes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import override

from . import _torch_private
from .policies import DataParallelMeshDims

#: Torch's own is taken by value. Torch 2.11 has none.
_DIMS = (DataParallelMeshDims, getattr(torch_fsdp, "DataParallelMeshDims", DataParallelMeshDims))


@dataclass(frozen=True)
class DataMesh:
    """The ranks that compute with other samples: whom parameters are cut over, and whom they are replicated over."""

    mesh: DeviceMesh
    """``[shard]``, ``[replicate, shard]``, or ``[replicate]`` where nothing is cut."""
    whole: DeviceMesh | None = None
    """The mesh that all parameters are ``DTensor`` on already, of which these are dimensions; None for no such mesh."""
    shard: tuple[str, ...] = ()
    """Names of dimensions of ``whole``, in its order: they are cut over as one."""
    replicate: tuple[str, ...] = ()

    @property
    def cuts(self) -> bool:
        return self.whole is None or bool(self.shard)

    @property
    def shards(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1) if self.cuts else 1

    @property
    def named(self) -> tuple[str, ...]:
        return () if self.whole is None else tuple(self.whole.mesh_dim_names or ())

    @cached_property
    def others(self) -> DeviceMesh | None:
        """The dimensions of ``whole`` that are not for data; None for none."""
        names = tuple(name for name in self.named if name not in self.shard + self.replicate)
        return self.whole[names] if self.whole is not None and names else None

    def placements_on_others(self, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """Of all ``placements`` on ``whole``."""
        pairs = zip(self.named, placements, strict=True)
        return tuple(each for name, each in pairs if name not in self.shard + self.replicate)

    @cached_property
    def joined(self) -> tuple[DeviceMesh, tuple[int | None, ...]]:
        """The mesh of parameters that were cut, and which dimension of ``whole`` each of its own was; None of several.

        That is ``whole`` where one dimension cuts. Several are one dimension, behind that of replicas.
        """
        assert self.whole is not None
        if len(self.shard) < 2:
            return self.whole, tuple(range(self.whole.ndim))
        meshes: list[DeviceMesh] = []
        before: list[int | None] = []
        for index, name in enumerate(self.named):
            if name == self.shard[0]:
                meshes.append(self.mesh)
                before += [None] * self.mesh.ndim
            elif name not in self.shard + self.replicate:
                meshes.append(self.whole[name])
                before.append(index)
        return _joined(meshes), tuple(before)

    def placed(self, dim: int, on_whole: Sequence[Placement], part: TensorPart | None) -> tuple[DeviceMesh, Any]:
        """The mesh and the placements of a parameter that is cut along ``dim``.

        ``on_whole``: its placements before, where it was on ``whole``; ``part``: what it was where it was not.
        """
        if self.whole is not None:
            mesh, before = self.joined
            placements = [Replicate() if index is None else on_whole[index] for index in before]
            at = before.index(None) + self.mesh.ndim - 1 if None in before else -1
            if len(self.shard) == 1:
                at = self.named.index(self.shard[0])
        else:
            mesh = self.mesh if part is None else _joined([self.mesh, part.mesh])
            placements = [*[Replicate()] * self.mesh.ndim, *(() if part is None else part.placements)]
            at = self.mesh.ndim - 1
        return mesh, Placing(mesh, tuple(placements), at if self.cuts else None).cut(dim)


def data_mesh(mesh: DeviceMesh | None, dp_mesh_dims: object) -> DataMesh:
    """The data-parallel dimensions of ``mesh``: all of its one or two, or those that ``dp_mesh_dims`` names.

    Raises:
        ConfigTypeError, ConfigError, ConfigAssertionError: they are none.
        UnsupportedError: others are between those that parameters are cut over.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigTypeError(
            f"fully_shard expects a DeviceMesh as mesh, but got {mesh!r}. Make one with init_device_mesh."
        )
    if dp_mesh_dims is not None:
        return _named_dims(mesh, dp_mesh_dims)
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if not dist.is_initialized():
            dist.init_process_group()
        return DataMesh(init_device_mesh((accelerator or torch.device("cpu")).type, (dist.get_world_size(),)))
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}. Give (shard,) or (replicate, shard), or name "
            "the data-parallel dimensions in dp_mesh_dims."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ConfigAssertionError(
            f"fully_shard got the 2D mesh {mesh} without names. Please init the 2D mesh for HSDP with mesh_dim_names "
            "specified."
        )
    return DataMesh(mesh)


def _named_dims(mesh: DeviceMesh | None, dims: object) -> DataMesh:
    if not isinstance(dims, _DIMS):
        raise ConfigTypeError(f"dp_mesh_dims should be a DataParallelMeshDims, not {dims!r}.")
    if not all(each is None or isinstance(each, (str, tuple, list)) for each in (dims.shard, dims.replicate)):
        raise ConfigTypeError(
            f"dp_mesh_dims should have names of dimensions of the mesh, or tuples of names, not {dims}."
        )
    if not (dims.shard_names or dims.replicate_names):
        raise ConfigError(
            f"dp_mesh_dims names no dimension of the mesh: {dims}. Name one to shard or to replicate over."
        )
    known = () if mesh is None else tuple(mesh.mesh_dim_names or ())
    if mesh is None or not known:
        raise ConfigError(
            f"mesh must have mesh_dim_names when dp_mesh_dims is provided: fully_shard got {mesh}. Make it with "
            "init_device_mesh(..., mesh_dim_names=...)."
        )
    found: list[tuple[str, ...]] = []
    for kind, names in (("shard", dims.shard_names), ("replicate", dims.replicate_names)):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {known}. Give dimensions of the mesh as "
                    f"{kind} of dp_mesh_dims."
                )
        if sorted(set(names), key=known.index) != list(names) or set(names) & set(*found[:1]):
            raise ConfigError(
                f"dp_mesh_dims names the dimensions {names} as {kind} of a mesh of {known}: each dimension counts "
                f"once. Give them in the order of the mesh, and each as shard or as replicate."
            )
        found.append(names)
    shard, replicate = found
    if shard and known.index(shard[-1]) - known.index(shard[0]) >= len(shard):
        raise UnsupportedError(
            f"dp_mesh_dims names {shard} of a mesh of {known}, with other dimensions between them: no dimension of a "
            "DTensor is their place. Make the mesh with these beside each other."
        )
    meshes = [_torch_private.flat_mesh(mesh, names) for names in (replicate, shard) if names]
    return DataMesh(meshes[0] if len(meshes) == 1 else _joined(meshes), mesh, shard, replicate)


@dataclass(frozen=True, slots=True, eq=False)
class WholeMeshLeaf(LeafForm):
    """A ``DTensor`` on a mesh that has data-parallel dimensions, too: there it is replicated."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: frozenset[int]
    """Dimensions of ``mesh`` over which the engine adds up gradients."""

    @override
    def as_leaf(self, local: torch.Tensor) -> torch.Tensor:
        return dtensor_leaf(local, self.mesh, self.placements, self.shape, self.stride)

    @torch.no_grad()
    @override
    def own(self, value: torch.Tensor) -> torch.Tensor:
        placed: Any = value
        wanted = tuple(
            has if index in self.data and has.is_partial() else own
            for index, (has, own) in enumerate(zip(placed.placements, self.placements, strict=True))
        )
        return local_of(placed if wanted == placed.placements else placed.redistribute(self.mesh, wanted))


@dataclass(frozen=True, slots=True, eq=False)
class TypedLeaf(WholeMeshLeaf):
    """A plain tensor with the types that ``spmd_types`` knew of the parameter, which say how its gradient lies."""

    gradient: tuple[Placement, ...]
    """Placements of its gradient on ``mesh``."""
    types: Mapping[Any, Any]
    """By the axes that the program annotated."""
    partition: Any

    @override
    def as_leaf(self, local: torch.Tensor) -> torch.Tensor:
        sys.modules["spmd_types"].assert_type(local, dict(self.types), self.partition)
        return local

    @torch.no_grad()
    @override
    def own(self, value: torch.Tensor) -> torch.Tensor:
        return WholeMeshLeaf.own(self, DTensor.from_local(value, self.mesh, self.gradient, run_check=False))


@dataclass(frozen=True, slots=True)
class ParameterPlacing:
    """How one parameter lies."""

    over: DataMesh
    dim: int
    """Along which it is cut."""
    leaf: WholeMeshLeaf | None = None
    """What computes, where it is on ``over.whole``."""


@dataclass(frozen=True, slots=True)
class Placed:
    """How the parameters of one ``fully_shard`` call lie."""

    placings: Mapping[str, ParameterPlacing]
    """By their names in the module."""
    policy: object
    """The ``MixedPrecisionPolicy`` of the call."""
    called: str = "FSDP parameters"
    """In FSDP2's own sentences, which scripts look for."""
    answers_state_dicts: bool = True
    keeps_whole: bool = True

    def spec_of(self, parameter: ManagedParameter, whole: torch.Tensor) -> Any:
        """The spec of ``parameter``, whose names are still those in the module.

        ``whole``: of its shape and strides, those of its local tensor where tensor parallelism cut it before.
        """
        its, part = self.placings[parameter.names[0]], parameter.part
        known = part if its.leaf is None else its.leaf
        mesh, placements = its.over.placed(its.dim, () if its.leaf is None else its.leaf.placements, part)
        shape, stride = (whole.shape, whole.stride()) if known is None else (known.shape, known.stride)
        return dtensor_spec(mesh, placements, shape, stride, whole.dtype)

    def flat_spec(self, numel: int, dtype: torch.dtype) -> Any:
        # What is in one unit is over one mesh.
        over = next(iter(self.placings.values())).over
        placements: list[Placement] = [Replicate()] * over.mesh.ndim
        if over.cuts:
            placements[-1] = Shard(0)
        return dtensor_spec(over.mesh, placements, (numel,), (1,), dtype)

    def extension_arguments(
        self, parameter: ManagedParameter, kept: torch.dtype, dtypes: UnitDtypes
    ) -> ExtensionArguments:
        mesh = self.placings[parameter.names[0]].over.mesh
        if mesh.ndim == 2:
            assert mesh.mesh_dim_names is not None
            mesh = mesh[mesh.mesh_dim_names[1]]
        return ExtensionArguments(mesh, self.policy)


def _joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Raises ConfigError: they are no slices of one mesh."""
    made: DeviceMesh | None = joined_mesh(meshes)
    if made is None:
        raise ConfigError(
            f"FSDP requires the DP and model parallel TP/EP mesh to have the same parent mesh, but got {meshes}. Make "
            "one mesh with init_device_mesh, and give its slices."
        )
    return made


def placings_of(
    named: Iterable[tuple[str, nn.Parameter]],
    shard_placement_fn: Callable[[nn.Parameter], object] | None,
    over: DataMesh,
) -> dict[str, ParameterPlacing]:
    """How parameters lie, by their names in ``named``. ``over``: of the call.

    Raises:
        UnsupportedError: a parameter is not contiguous, is to be sharded unevenly along another dimension than the
            first, or along that and gathers itself.
        ConfigAssertionError: a parameter has no such dimension.
        ConfigError, ConfigTypeError: ``shard_placement_fn`` answered nothing that is known.
        ParameterError: a parameter is a scalar, not on the mesh whose dimensions were named, or not replicated over
            these.
    """
    if shard_placement_fn is not None and not over.cuts:
        raise ConfigError(
            f"fully_shard got shard_placement_fn, and dp_mesh_dims names no dimension to shard over, {over.replicate} "
            "to replicate over alone. Leave the function out, or name one as shard."
        )
    meshes: dict[int, DataMesh] = {}
    found = {}
    for name, parameter in named:
        if parameter.ndim == 0:
            raise ParameterError(
                f"FSDP doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1. Or pass "
                "it in ignored_params, or shard the model with polyshard.shard."
            )
        if not parameter.is_contiguous():
            raise UnsupportedError(
                f"FSDP does not support non-contiguous parameters yet: '{name}' has shape "
                f"{tuple(parameter.shape)} and strides {parameter.stride()}. Make it contiguous, pass it in "
                "ignored_params, or shard the model with polyshard.shard."
            )
        placement: Any = shard_placement_fn(parameter) if shard_placement_fn is not None else None
        mine = over
        if type(placement).__name__ == "ShardPlacementResult":
            info, placement = placement.mesh_info, placement.placement
            if id(info) not in meshes:
                meshes[id(info)] = _mesh_of_info(info, name)
            mine = meshes[id(info)]
        dim = 0 if placement is None else _dim_of(placement, name, parameter, mine.shards)
        found[name] = ParameterPlacing(mine, dim, _leaf_of(parameter, name, mine))
    return found


def _mesh_of_info(info: Any, name: str) -> DataMesh:
    """The mesh that torch's ``FSDPMeshInfo`` or ``HSDPMeshInfo`` is of."""
    mesh, dims = getattr(info, "mesh", None), getattr(info, "dp_mesh_dims", None)
    where = [getattr(info, f"{kind}_mesh_dim", None) for kind in ("replicate", "shard")]
    if where not in ([None, 0], [0, 1]) or getattr(mesh, "ndim", None) != where[1] + 1:
        raise ConfigTypeError(
            f"shard_placement_fn answered a ShardPlacementResult with the mesh {info!r} for '{name}'. Give a "
            "FSDPMeshInfo of a mesh of one dimension, or a HSDPMeshInfo of (replicate, shard)."
        )
    return data_mesh(mesh if dims is None else info.spmd_mesh, dims)


def _dim_of(placement: object, name: str, parameter: nn.Parameter, ranks: int) -> int:
    if not isinstance(placement, Shard):
        raise ConfigTypeError(
            f"shard_placement_fn answered {placement!r} for '{name}'. Answer None or a Shard of "
            "torch.distributed.tensor, or a ShardPlacementResult."
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
    return dim


def _leaf_of(parameter: nn.Parameter, name: str, over: DataMesh) -> WholeMeshLeaf | None:
    types = _types_of(parameter)
    if over.whole is None:
        if types:
            raise ParameterError(
                f"'{name}' has types of spmd_types, and fully_shard was not told which dimensions are for data. Give "
                "the whole mesh, and dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)."
            )
        return None
    data = frozenset(over.named.index(each) for each in over.shard + over.replicate)
    if types:
        return _typed_leaf(parameter, name, over, data, types)
    if not is_dtensor(parameter):
        raise ParameterError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh: '"
            f"{name}' is a plain tensor. Make it one, as distribute_tensor and distribute_module do."
        )
    placed: Any = parameter
    if placed.device_mesh != over.whole:
        raise ParameterError(
            f"Expected param's DTensor mesh to be the same mesh passed to fully_shard: '{name}' is on "
            f"{placed.device_mesh}, and dp_mesh_dims names dimensions of {over.whole}. Distribute it on that."
        )
    for index in sorted(data):
        if not placed.placements[index].is_replicate():
            raise ParameterError(
                f"Expected Replicate() on the data-parallel dimension '{over.named[index]}' but got "
                f"{placed.placements[index]} for '{name}'. fully_shard shards it there."
            )
    return WholeMeshLeaf(over.whole, placed.placements, tuple(placed.shape), placed.stride(), data)


def _types_of(parameter: nn.Parameter) -> Mapping[Any, Any]:
    """What ``spmd_types`` knows of ``parameter``, by axes of meshes; empty for nothing."""
    package = sys.modules.get("spmd_types")
    found: Mapping[Any, Any] = {} if package is None or is_dtensor(parameter) else package.get_local_type(parameter)
    return found


def _typed_leaf(
    parameter: nn.Parameter, name: str, over: DataMesh, data: frozenset[int], types: Mapping[Any, Any]
) -> TypedLeaf:
    spmd: Any = sys.modules["spmd_types"]
    assert over.whole is not None
    partition = spmd.get_partition_spec(parameter)
    said = {**types, **({} if partition is None else spmd.types.partition_spec_to_shard_types(partition))}
    placements: list[Placement] = []
    gradient: list[Placement] = []
    for index in range(over.whole.ndim):
        axis = spmd.MeshAxis.of(over.whole.get_group(index))
        kind = spmd.R
        if index not in data and over.whole.size(index) > 1:
            if axis not in said:
                raise ParameterError(
                    f"'{name}' has types of spmd_types on {list(said)}, and none on the dimension "
                    f"'{over.named[index]}' of the mesh. Annotate it there, or name that in dp_mesh_dims."
                )
            kind = said.pop(axis)
            if kind is spmd.V:
                raise ParameterError(
                    f"'{name}' is spmd.V on {axis}, which does not say what each rank has. Annotate it as spmd.S(dim)."
                )
        placements.append(spmd.spmd_type_to_dtensor_placement(kind))
        gradient.append(spmd.spmd_type_to_dtensor_placement(kind.backward_type()))
    for axis, kind in said.items():
        if kind is not spmd.R:
            raise ParameterError(
                f"Expected spmd.R on the data-parallel axis {axis} for '{name}' but got {kind}: fully_shard shards it "
                "there, and adds up its gradients."
            )
    everywhere = dict.fromkeys(spmd.current_mesh() or (), spmd.R)
    placed = DTensor.from_local(parameter.detach(), over.whole, placements, run_check=False)
    shape, stride = tuple(placed.shape), placed.stride()
    return TypedLeaf(
        over.whole, tuple(placements), shape, stride, data, tuple(gradient), {**everywhere, **types}, partition
    )


def places_of(
    named: Mapping[str, nn.Parameter], placings: Mapping[str, ParameterPlacing], over: DataMesh
) -> dict[nn.Parameter, ParameterPlace]:
    """What the engine does not know of parameters by itself: dimensions, other meshes than ``over``, forms of leaves.

    Raises ParameterError: one is placed in a way that no unit can hold.
    """
    found = {}
    for name, parameter in named.items():
        its = placings[name]
        place = ParameterPlace(None if its.over.mesh == over.mesh else its.over.mesh, dim=its.dim)
        if its.leaf is not None:
            part, others = None, its.over.others
            if others is not None:
                local = local_of(parameter) if is_dtensor(parameter) else parameter.detach()
                placements = its.over.placements_on_others(its.leaf.placements)
                on_others = dtensor_leaf(local.detach(), others, placements, its.leaf.shape, its.leaf.stride)
                part = TensorPart.of(on_others, name, dist.get_rank())
            place = replace(place, part=part, leaf=its.leaf)
        if place != ParameterPlace():
            found[parameter] = place
    return found
