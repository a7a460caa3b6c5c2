"""Parameters that are ``DTensor`` on a whole mesh, of which ``fully_shard`` is told the dimensions for data."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard_fsdp2
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from fsdp2_models import Mlps, beside_torch, carried, copied, mesh_of, seen
from processes import KeptRanks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="torch's FSDP2 has no DataParallelMeshDims"
)

#: By name: sizes of the mesh, and the dimensions to shard and to replicate over.
MESHES: dict[str, tuple[dict[str, int], Any, Any]] = {
    "shard": ({"dp": 2}, "dp", None),
    "shard, tensor": ({"dp": 2, "tensor": 2}, "dp", None),
    "tensor, shard": ({"tensor": 2, "dp": 2}, "dp", None),
    "shard of one, tensor": ({"dp": 1, "tensor": 2}, "dp", None),
    "replicate, shard": ({"rep": 2, "dp": 2}, "dp", "rep"),
    "replicate, shard of one, tensor": ({"rep": 2, "dp": 1, "tensor": 2}, "dp", "rep"),
    "shard over two": ({"dp": 2, "cp": 2}, ("dp", "cp"), None),
    "shard over two, tensor": ({"dp": 2, "cp": 1, "tensor": 2}, ("dp", "cp"), None),
    "replicate, shard over two": ({"rep": 2, "dp": 2, "cp": 1}, ("dp", "cp"), "rep"),
    "replicate": ({"rep": 2}, None, "rep"),
    "replicate, tensor": ({"rep": 2, "tensor": 2}, None, "rep"),
    "replicate over two": ({"rep": 2, "dp": 2}, None, ("rep", "dp")),
}
#: How tensor parallelism cuts ``Mlps``.
CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "head.weight": 0, "head.bias": 0}


def whole(package: ModuleType, which: str, hidden: int = 16, seed: int = 0, **settings: Any) -> Mlps:
    sizes, shard, replicate = MESHES[which]
    torch.manual_seed(seed)
    model = Mlps(hidden).double()
    mesh = mesh_of(tuple(sizes.values()), tuple(sizes))
    for name, parameter in list(model.named_parameters()):
        dim = CUTS.get(".".join(name.split(".")[-2:]))
        placements = [Replicate() if each != "tensor" or dim is None else Shard(dim) for each in sizes]
        holder, _, key = name.rpartition(".")
        placed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        setattr(model.get_submodule(holder), key, placed)
    dims = package.DataParallelMeshDims(shard=shard, replicate=replicate)
    for module in (*model.blocks, model):
        package.fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **settings)
    return model


def batch(which: str, step: int) -> DTensor:
    sizes, *_ = MESHES[which]
    mesh = mesh_of(tuple(sizes.values()), tuple(sizes))
    random = torch.Generator().manual_seed(step)
    placements = [Replicate() if name == "tensor" else Shard(0) for name in sizes]
    return distribute_tensor(torch.randn(8, 12, generator=random, dtype=torch.float64), mesh, placements)


def square_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _shown(package: ModuleType, which: str) -> Any:
    model = whole(package, which, 16 if "tensor" in which else 15)
    found: list[Any] = [seen(model)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss = square_of(model, batch(which, step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        found += [loss.full_tensor().item(), copied(norm.full_tensor()), seen(model, optimizer)]
        optimizer.step()
        found.append(seen(model, optimizer))
        optimizer.zero_grad()
    return found


def _marks(which: str) -> list[pytest.MarkDecorator]:
    if which == "replicate, shard of one, tensor":
        # Others have two of its three dimensions at a time, and another has three with replicas.
        return [pytest.mark.nightly]
    return [pytest.mark.slow] if which != "shard, tensor" else []


@pytest.mark.parametrize("which", [pytest.param(each, marks=_marks(each)) for each in MESHES])
def test_all_is_as_torch_has_it(ranks: KeptRanks, which: str) -> None:
    number = 1
    for size in MESHES[which][0].values():
        number *= size
    ranks.run(number, beside_torch, _shown, which)


def _carried(rank: int, which: str, folder: str) -> None:
    def trained(package: ModuleType, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = whole(package, which, seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            square_of(model, batch(which, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    carried(folder, trained)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["shard over two, tensor"])
def test_each_loads_what_the_other_saved(ranks: KeptRanks, tmp_path: Path, which: str) -> None:
    ranks.run(4, _carried, which, str(tmp_path))


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group, each of which computes the same with it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Typed(nn.Module):
    """Two layers that ranks of ``tensor`` have halves of, and what they all have: of which gradients differ, or not."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        parts = mesh["tensor"].size() if "tensor" in (mesh.mesh_dim_names or ()) else 1
        place = mesh["tensor"].get_local_rank() if parts > 1 else 0
        self.group = mesh.get_group("tensor") if parts > 1 else None
        torch.manual_seed(0)
        whole = {"scale": torch.randn(12), "up": torch.randn(15 * 2, 12), "down": torch.randn(12, 15 * 2)}
        whole["bias"] = torch.randn(12)
        self.scale, self.bias = (nn.Parameter(whole[name]) for name in ("scale", "bias"))
        self.up = nn.Parameter(whole["up"].chunk(parts)[place].clone())
        self.down = nn.Parameter(whole["down"].chunk(parts, 1)[place].contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh((x * self.scale) @ self.up.T)
        out = hidden @ self.down.T
        made: torch.Tensor = (out if self.group is None else _Sum.apply(out, self.group)) + self.bias
        return made


def typed(package: ModuleType, which: str, **settings: Any) -> nn.Sequential:
    """With types of ``spmd_types`` on the axis ``tensor``, and on none for data."""
    import spmd_types as spmd

    sizes, shard, replicate = MESHES[which]
    mesh = mesh_of(tuple(sizes.values()), tuple(sizes))
    model = nn.Sequential(Typed(mesh), Typed(mesh)).double()
    for module in model:
        for name, kind in (("scale", spmd.R), ("bias", spmd.I), ("up", spmd.S(0)), ("down", spmd.S(1))):
            axes = {axis: spmd.R for axis in sizes if axis != "tensor" and name == "up"}
            if "tensor" in sizes:
                axes["tensor"] = kind
            else:
                axes = dict.fromkeys(sizes, spmd.R)
            groups = {spmd.MeshAxis.of(mesh.get_group(axis)): each for axis, each in axes.items()}
            spmd.assert_type(getattr(module, name), groups)
    dims = package.DataParallelMeshDims(shard=shard, replicate=replicate)
    with spmd.set_current_mesh(mesh):
        for module in (*model, model):
            package.fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **settings)
    return model


def _typed(package: ModuleType, which: str) -> Any:
    model = typed(package, which)
    found: list[Any] = [seen(model)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tensor = MESHES[which][0].get("tensor", 1)
    random = torch.Generator().manual_seed(dist.get_rank() // tensor)
    for _ in range(2):
        x = torch.randn(8, 12, generator=random, dtype=torch.float64)
        loss = square_of(model, x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        found += [loss.item(), copied(norm.full_tensor()), seen(model, optimizer)]
        optimizer.step()
        found.append(seen(model, optimizer))
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch's FSDP2 knows no spmd_types before 2.14")
@pytest.mark.parametrize("which", ["shard", "shard, tensor", "replicate, shard of one, tensor"])
def test_parameters_with_types(ranks: KeptRanks, which: str) -> None:
    pytest.importorskip("spmd_types")
    ranks.run(2 if which == "shard" else 4, beside_torch, _typed, which)


#: Dimensions, and what is said of them; parameters are ``DTensor`` on a mesh of ``("dp", "tensor")``.
WRONG_DIMS: list[tuple[Any, type[Exception], str]] = [
    ({"shard": "ep"}, ValueError, "'ep' not found in mesh.mesh_dim_names .*Give dimensions of the mesh as shard"),
    ({"shard": ()}, ValueError, r"names no dimension of the mesh: .*Name one to shard"),
    ({"shard": 0}, TypeError, "should have names of dimensions of the mesh, or tuples"),
    ({"shard": ("tensor", "dp")}, ValueError, "Give them in the order of the mesh"),
    ({"shard": "dp", "replicate": "dp"}, ValueError, "each dimension counts once"),
    (
        {"shard": "tensor"},
        ValueError,
        r"Expected Replicate\(\) on the data-parallel dimension 'tensor' but got S.*'up.weight'",
    ),
    ("dp", TypeError, "dp_mesh_dims should be a DataParallelMeshDims, not 'dp'"),
]


def _refused(rank: int) -> None:
    mesh = mesh_of((1, 2), ("dp", "tensor"))
    torch.manual_seed(0)
    model = Mlps(16).double().blocks[0]
    x = torch.ones(2, 12, dtype=torch.float64)
    wanted = model(x)
    plain = polyshard_fsdp2.DataParallelMeshDims(shard="dp")
    with pytest.raises(ValueError, match=r"all parameters must be DTensors on the full SPMD mesh: 'up.weight' is"):
        polyshard_fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=plain)
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1), ("down.bias", None)):
        holder, _, key = name.partition(".")
        own = getattr(model.get_submodule(holder), key).detach()
        placed = distribute_tensor(own, mesh, [Replicate(), Replicate() if dim is None else Shard(dim)])
        setattr(model.get_submodule(holder), key, nn.Parameter(placed))
    before = dict(model.named_parameters())
    for dims, kind, words in WRONG_DIMS:
        chosen = polyshard_fsdp2.DataParallelMeshDims(**dims) if isinstance(dims, dict) else dims
        with pytest.raises(kind, match=words):
            polyshard_fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=chosen)
        assert dict(model.named_parameters()) == before
    with pytest.raises(ValueError, match="mesh must have mesh_dim_names when dp_mesh_dims is provided"):
        polyshard_fsdp2.fully_shard(model, dp_mesh_dims=plain)
    other = mesh_of((1, 2), ("rows", "columns"))
    with pytest.raises(ValueError, match="Expected param's DTensor mesh to be the same mesh passed to fully_shard"):
        polyshard_fsdp2.fully_shard(model, mesh=other, dp_mesh_dims=polyshard_fsdp2.DataParallelMeshDims(shard="rows"))
    polyshard_fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=plain)
    found = model(distribute_tensor(x, mesh, [Replicate(), Replicate()]))
    torch.testing.assert_close(found.full_tensor(), wanted)


def test_dimensions_that_are_none_are_refused_and_leave_the_model(ranks: KeptRanks) -> None:
    ranks.run(2, _refused)
