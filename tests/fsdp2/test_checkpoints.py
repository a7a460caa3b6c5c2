"""Checkpoints of ``fully_shard`` between meshes, cut along any dimension and by tensor parallelism: bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp2_models import OURS, PACKAGES, inputs, parallel, same, square_of
from parity import chain, draw
from polyshard import checkpoint
from polyshard import state as states
from polyshard.errors import UnsupportedError
from processes import KeptRanks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

#: Ranks, a mesh of them as ``parallel`` takes it, and whether matrices are cut by columns.
CUTS: dict[str, tuple[int, tuple[int, ...], bool]] = {
    "rows": (2, (2,), False),
    "uneven rows": (3, (3,), False),
    "columns": (4, (4,), True),
    "replicas of columns": (4, (2, 2), True),
    "tensor": (4, (0, 2, 2), False),
    "columns, tensor": (4, (0, 2, 2), True),
}
Made = tuple[nn.Module, torch.optim.Optimizer]


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 else None


def made(package: ModuleType, cut: str, seed: int, steps: int = 0, flat: bool = False) -> Made:
    _, mesh, columns = CUTS[cut]
    model = parallel(package, *mesh, seed=seed, **({"shard_placement_fn": by_columns} if columns else {}))
    optimizer = torch.optim.AdamW(polyshard.flat_parameters(model) if flat else model.parameters(), lr=1e-2)
    for x in inputs(model, steps) if steps else ():
        square_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By torch's own gathers of ``DTensor``."""
    one, other = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return {"model": one, "state": other["state"]}


def saved(rank: int, cut: str, folder: str) -> dict[str, Any]:
    model, optimizer = made(OURS, cut, seed=1, steps=2)
    checkpoint.save(Path(folder, "own"), 1, model, optimizer)
    one, other = states.get_state_dict(model, optimizer)
    dcp.save({"model": one, "optimizer": other}, checkpoint_id=f"{folder}/stock")
    one, other = states.get_state_dict(model, optimizer, states.StateOptions(form="full"))
    found = whole(model, optimizer)
    same({"model": one, "state": other["state"]}, found, rtol=0, atol=0)
    return found


def loaded(rank: int, cut: str, folder: str, wanted: dict[str, Any]) -> None:
    model, optimizer = made(OURS, cut, seed=2)
    checkpoint.load(Path(folder, "own", "step-00000001"), model, optimizer)
    same(whole(model, optimizer), wanted, rtol=0, atol=0)
    model, optimizer = made(OURS, cut, seed=2)
    checkpoint.load_dcp(Path(folder, "stock"), model, optimizer)
    same(whole(model, optimizer), wanted, rtol=0, atol=0)
    # Over flat parameters, of which torch tells no state.
    model, optimizer = made(OURS, cut, seed=2, flat="tensor" not in cut)
    checkpoint.load(Path(folder, "own", "step-00000001"), model, optimizer)
    checkpoint.save(Path(folder, f"again of {cut}"), 1, model, optimizer)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("tensor", "replicas of columns", marks=pytest.mark.nightly),
        pytest.param("columns, tensor", "uneven rows", marks=pytest.mark.nightly),
        ("rows", "columns, tensor"),
    ],
)
def test_between_cuts(ranks: KeptRanks, tmp_path: Path, one: str, other: str) -> None:
    wanted = ranks.run(CUTS[one][0], saved, one, str(tmp_path))[0]
    ranks.run(CUTS[other][0], loaded, other, str(tmp_path), wanted)
    for directory in (tmp_path / "own", tmp_path / f"again of {other}"):
        read = checkpoint.read(directory / "step-00000001")
        same({"model": read["model"], "state": read["optimizer"]["state"]}, wanted, rtol=0, atol=0)


def saved_by_torch(rank: int, cut: str, folder: str) -> dict[str, Any]:
    model, optimizer = made(PACKAGES[0], cut, seed=1, steps=2)
    one, other = get_state_dict(model, optimizer)
    dcp.save({"model": one, "optimizer": other}, checkpoint_id=f"{folder}/stock")
    return whole(model, optimizer)


def carried(rank: int, cut: str, folder: str, wanted: dict[str, Any]) -> None:
    model, optimizer = made(OURS, cut, seed=2)
    checkpoint.load_dcp(Path(folder, "stock"), model, optimizer)
    same(whole(model, optimizer), wanted, rtol=0, atol=0)
    checkpoint.save(Path(folder, "ours"), 1, model, optimizer)


def loaded_by_torch(rank: int, cut: str, folder: str, wanted: dict[str, Any]) -> None:
    model, optimizer = made(PACKAGES[0], cut, seed=2, steps=1)
    one, other = get_state_dict(model, optimizer)
    dcp.load({"model": one, "optimizer": other}, checkpoint_id=f"{folder}/ours/step-00000001")
    set_state_dict(model, optimizer, model_state_dict=one, optim_state_dict=other)
    same(whole(model, optimizer), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("columns, tensor", "rows"), pytest.param("uneven rows", "columns", marks=pytest.mark.nightly)]
)
def test_directories_of_torchs(ranks: KeptRanks, tmp_path: Path, theirs: str, ours: str) -> None:
    wanted = ranks.run(CUTS[theirs][0], saved_by_torch, theirs, str(tmp_path))[0]
    ranks.run(CUTS[ours][0], carried, ours, str(tmp_path), wanted)
    ranks.run(CUTS[theirs][0], loaded_by_torch, theirs, str(tmp_path), wanted)


class Experts(nn.Module):
    """Of each the same samples: where they lie makes no difference to what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        return (x @ up).sum(0)


def mixture(ep: int, *, named: bool = True) -> Made:
    """Experts over ``ep`` groups of ranks, as parts of a whole or, not ``named``, as parameters of their own."""
    torch.manual_seed(0)
    model = chain(first=nn.Linear(4, 4).double(), experts=Experts())
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // ep, ep), mesh_dim_names=("edp", "ep"))
    if ep > 1:
        up = distribute_tensor(model.experts.up.detach(), mesh["ep"], [Shard(0)])
        model.experts.up = nn.Parameter(up if named else up.to_local()[:1].clone())
        OURS.fully_shard(model.experts, mesh=mesh["edp"])
    OURS.fully_shard(model, mesh=mesh["edp", "ep"]._flatten("dp"))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def experts_saved(rank: int, folder: str) -> dict[str, Any]:
    model, optimizer = mixture(2)
    for turn in range(2):
        model(torch.full((2, 4), 1.0 + turn + rank, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(Path(folder), 1, model, optimizer)
    found = whole(model, optimizer)
    unnamed, _ = mixture(2, named=False)
    for call in (lambda: checkpoint.save(Path(folder), 2, unnamed), lambda: states.get_model_state_dict(unnamed)):
        with pytest.raises(UnsupportedError, match=r"'experts.up' belongs to 2 of 4 ranks.*DTensor.from_local"):
            call()
    return found


def experts_loaded(rank: int, folder: str, wanted: dict[str, Any]) -> None:
    model, optimizer = mixture(1)
    checkpoint.load(Path(folder, "step-00000001"), model, optimizer)
    same(whole(model, optimizer), wanted, rtol=0, atol=0)


def test_experts_with_a_mesh_of_their_own(ranks: KeptRanks, tmp_path: Path) -> None:
    wanted = ranks.run(4, experts_saved, str(tmp_path))[0]
    ranks.run(2, experts_loaded, str(tmp_path), wanted)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, turns: range) -> None:
    # Otherwise torchao compiles its steps.
    with torch.compiler.set_stance("force_eager"):
        for turn in turns:
            model(draw(4, 8, turn=turn).float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
