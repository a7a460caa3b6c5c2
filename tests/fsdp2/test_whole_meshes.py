"""Parameters that are ``DTensor`` on a whole mesh, of which ``fully_shard`` is told the dimensions for data."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from fsdp2_models import Mlps, beside_torch, copied, mesh_of, seen
from processes import KeptRanks
from torch import nn
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


def whole(face: ModuleType, which: str, hidden: int = 16, **settings: Any) -> Mlps:
    sizes, shard, replicate = MESHES[which]
    torch.manual_seed(0)
    model = Mlps(hidden).double()
    mesh = mesh_of(tuple(sizes.values()), tuple(sizes))
    for name, parameter in list(model.named_parameters()):
        dim = CUTS.get(".".join(name.split(".")[-2:]))
        placements = [Replicate() if each != "tensor" or dim is None else Shard(dim) for each in sizes]
        holder, _, key = name.rpartition(".")
        placed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        setattr(model.get_submodule(holder), key, placed)
    dims = face.DataParallelMeshDims(shard=shard, replicate=replicate)
    for module in (*model.blocks, model):
        face.fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **settings)
    return model


def batch(which: str, step: int) -> DTensor:
    sizes, *_ = MESHES[which]
    mesh = mesh_of(tuple(sizes.values()), tuple(sizes))
    random = torch.Generator().manual_seed(step)
    placements = [Replicate() if name == "tensor" else Shard(0) for name in sizes]
    return distribute_tensor(torch.randn(8, 12, generator=random, dtype=torch.float64), mesh, placements)


def square_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _shown(face: ModuleType, which: str) -> Any:
    model = whole(face, which, 16 if "tensor" in which else 15)
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


@pytest.mark.parametrize("which", MESHES)
def test_all_is_as_torch_has_it(ranks: KeptRanks, which: str) -> None:
    number = 1
    for size in MESHES[which][0].values():
        number *= size
    ranks.run(number, beside_torch, _shown, which)
