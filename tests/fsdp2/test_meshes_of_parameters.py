"""Parameters with a mesh of their own within one ``fully_shard`` call: experts within that of their block."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard_fsdp2
import pytest
import torch
import torch.distributed as dist
from fsdp2_models import beside_torch, carried, copied, mesh_of, seen
from processes import KeptRanks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_meshes
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytestmark = pytest.mark.skipif(
    not hasattr(torch_meshes, "ShardPlacementResult"), reason="torch's FSDP2 has no ShardPlacementResult"
)
WIDTH, EXPERTS = 6, 4


class Mixed(nn.Module):
    """A layer, and experts of which each rank computes with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        hidden = torch.tanh(self.up(x))
        made: torch.Tensor = self.down(hidden + torch.einsum("bw,ewv->bv", hidden, experts))
        return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed() for _ in range(2))
        self.blocks[0].down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _info(mesh: DeviceMesh) -> Any:
    if mesh.ndim == 1:
        return torch_meshes.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return torch_meshes.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


#: By name: the mesh of the call, that of experts, and whether these are parts of whole ones by a ``DTensor``.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {
    "over half of the ranks": ((4,), (2, 2), True),
    "over half, no DTensors": ((4,), (2, 2), False),
    "on one rank each": ((2,), (1, 2), True),
    "over replicas": ((2, 2), (2, 1, 2), True),
}


def mixed(package: ModuleType, case: str, dim: int = 0, seed: int = 0, **settings: Any) -> Model:
    call, sizes, placed = CASES[case]
    mesh = mesh_of(call, ("replicate", "shard")[-len(call) :])
    sparse = mesh_of(sizes, ("replicate", "efsdp", "ep")[-len(sizes) :])
    torch.manual_seed(seed)
    model = Model().double()
    over = sparse["replicate", "efsdp"] if len(sizes) > 2 else sparse["efsdp"]
    infos = {True: _info(over), False: _info(mesh)}
    for block in model.blocks:
        experts = distribute_tensor(block.experts.detach(), sparse["ep"], [Shard(0)])
        block.experts = nn.Parameter(experts if placed else experts.to_local().clone())

        def answer(each: nn.Parameter, own: nn.Parameter = block.experts) -> Any:
            mine = each is own
            return torch_meshes.ShardPlacementResult(placement=Shard(dim if mine else 0), mesh_info=infos[mine])

        package.fully_shard(block, mesh=mesh, shard_placement_fn=answer, **settings)
    package.fully_shard(model, mesh=mesh, **settings)
    return model


def inputs(steps: int = 1) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(3, WIDTH, generator=random, dtype=torch.float64) for _ in range(steps)]


def _shown(package: ModuleType, case: str, dim: int) -> Any:
    model = mixed(package, case, dim)
    found: list[Any] = [seen(model)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in inputs(2):
        loss = model(x).square().mean()
        loss.backward()
        for parameters in ([b.experts for b in model.blocks], [b.up.weight for b in model.blocks]):
            found.append(copied(torch.nn.utils.clip_grad_norm_(parameters, 1e-2)))
        found += [loss.item(), seen(model, optimizer)]
        optimizer.step()
        found.append(seen(model, optimizer))
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("case", "dim"),
    [
        ("over half of the ranks", 0),
        *(pytest.param(case, 0, marks=pytest.mark.slow) for case in list(CASES)[1:]),
        pytest.param("over half of the ranks", 1, marks=pytest.mark.slow),
    ],
)
def test_all_is_as_torch_has_it(ranks: KeptRanks, case: str, dim: int) -> None:
    ranks.run(2 if case == "on one rank each" else 4, beside_torch, _shown, case, dim)


def _carried(rank: int, folder: str) -> None:
    def trained(package: ModuleType, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mixed(package, "over half of the ranks", seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x in inputs(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    carried(folder, trained)


@pytest.mark.slow
def test_each_loads_what_the_other_saved(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(4, _carried, str(tmp_path))


def _refused(rank: int) -> None:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).double()
    x = inputs()[0]
    wanted = model(x)
    swapped = torch_meshes.HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1)
    for info in (mesh, swapped, torch_meshes.FSDPMeshInfo(mesh, shard_mesh_dim=0)):
        answer = torch_meshes.ShardPlacementResult(placement=Shard(0), mesh_info=info)
        with pytest.raises(TypeError, match=r"for 'weight'. Give a FSDPMeshInfo of a mesh of one dimension, or a HSDP"):
            polyshard_fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=lambda each, answer=answer: answer)
    part = torch_meshes.ShardPlacementResult(placement=Shard(0), mesh_info=torch_meshes.FSDPMeshInfo(mesh["shard"], 0))
    with pytest.raises(RuntimeError, match=r"Ranks \[1\] are about to shard differently"):
        polyshard_fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=lambda each: part if rank == 1 else None)
    polyshard_fsdp2.fully_shard(model, mesh=mesh)
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.slow
def test_meshes_that_are_none_are_refused_and_leave_the_model(ranks: KeptRanks) -> None:
    ranks.run(4, _refused)
