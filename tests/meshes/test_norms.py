"""What ranks of several groups agree on: norms, skipped steps, copies, batches, and whose program raised."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import meshes
import polyshard
import pytest
import torch
from meshed_models import Shape
from meshes import Plan, coordinate_of, expected, meshed, run
from parity import local
from polyshard.errors import ConfigError, RankMismatchError
from processes import run_script

pytestmark = pytest.mark.slow

ORDERS = [2.0, 1.0, 3.0, math.inf]
PARTS = Plan((2, 2), ("dp", "tp"), Shape(sequence=True), ("dp",), steps=0)
EXPERTS: dict[str, Any] = {"names": ("edp", "ep"), "shard": ("edp", "ep"), "experts": ("edp",), "steps": 0}
#: Two experts on some ranks and one on the others; one on each rank but the last.
UNEVEN = Plan((2, 2), shape=Shape(experts=3, kept="dtensor"), **EXPERTS)
SINGLE = Plan((1, 4), shape=Shape(experts=3, kept="dtensor"), **EXPERTS)


def trained(plan: Plan, rank: int) -> Any:
    """The sharded model of one rank, behind one backward."""
    with meshed(plan, rank) as (model, mesh):
        polyshard.shard(model, meshes.config_of(plan, mesh))
        model(plan.batch(0, plan.data_rank(coordinate_of(mesh)), 0)).backward()
    return model


def norms_of(rank: int, plan: Plan, flat: bool) -> list[tuple[float, float | str]]:
    """By polyshard and by torch, which may refuse."""
    with meshed(plan, rank) as (model, mesh):
        polyshard.shard(model, meshes.config_of(plan, mesh))
        given = polyshard.flat_parameters(model) if flat else list(model.parameters())
        model(plan.batch(0, plan.data_rank(coordinate_of(mesh)), 0)).backward()
    found: list[tuple[float, float | str]] = []
    for order in ORDERS:
        ours: float = polyshard.clip_grad_norm_(model, math.inf, order).item()
        try:
            theirs: Any = torch.nn.utils.clip_grad_norm_(given, math.inf, order)
            found.append((ours, theirs.full_tensor().item()))
        except RuntimeError as error:
            found.append((ours, str(error)))
    polyshard.close(model)
    return found


@pytest.mark.parametrize(
    ("plan", "flat"), [(PARTS, False), (UNEVEN, True), pytest.param(SINGLE, False, marks=pytest.mark.nightly)], ids=str
)
def test_every_order_is_that_of_the_whole_model(plan: Plan, flat: bool) -> None:
    whole = torch.cat([each.flatten() for each in expected(plan).gradients.values()])
    wanted = [torch.linalg.vector_norm(whole, order).item() for order in ORDERS]
    for found in run(4, norms_of, plan, flat):
        assert [ours for ours, _ in found] == pytest.approx(wanted, rel=1e-12)
        for order, (_, theirs), norm in zip(ORDERS, found, wanted, strict=True):
            if plan is PARTS:
                # Sequence parallelism has every parameter on one mesh.
                assert theirs == pytest.approx(norm, rel=1e-12)
            else:
                assert "mesh" in theirs or (order == math.inf and "empty" in theirs)


def scale_behind(rank: int, plan: Plan, overflows: int, name: str) -> tuple[float, bool]:
    model = trained(plan, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = polyshard.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    before = [local(each.detach()).clone() for each in model.parameters()]
    if rank == overflows:
        gradients = [each.grad for key, each in model.named_parameters() if key.startswith(name)]
        next(each for each in map(local, gradients) if each.numel()).view(-1)[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    stayed = all(torch.equal(local(each), old) for each, old in zip(model.parameters(), before, strict=True))
    polyshard.close(model)
    return scaler.get_scale(), stayed


def test_an_overflow_in_one_part_lets_all_ranks_skip() -> None:
    assert run(4, scale_behind, SINGLE, 2, "blocks.1.feed.experts") == [(2.0, True)] * 4


def compare_copies(rank: int) -> str:
    model = trained(PARTS, rank)
    polyshard.check_replicas(model)
    for name in ("blocks.0.attention.query.weight", "blocks.0.before.weight"):
        if rank == 1:
            local(model.get_parameter(name).detach()).view(-1).view(torch.int64)[0] ^= 1
        if "attention" in name:
            # A part of this rank alone.
            polyshard.check_replicas(model)
    with pytest.raises(RankMismatchError) as caught:
        polyshard.check_replicas(model)
    polyshard.close(model)
    return str(caught.value)


def test_what_tensor_parallel_ranks_have_alike_is_compared_and_their_parts_are_not() -> None:
    for rank, told in enumerate(run(4, compare_copies)):
        assert "Parameter 'blocks.0.before.weight' of unit 'blocks.0' differs" in told
        assert f"[0], [1] agree among themselves (rank {rank})" in told


def with_a_block_outside(rank: int) -> str:
    with meshed(PARTS, rank) as (model, mesh):
        # One rank says that nothing averages them.
        warnings.simplefilter("ignore")
        polyshard.shard(model, meshes.config_of(PARTS, mesh), ignored_modules=[model.blocks[0]])
    model(PARTS.batch(0, coordinate_of(mesh)["dp"], 0)).backward()
    with pytest.raises(ConfigError) as caught:
        polyshard.clip_grad_norm_(model, 1.0)
    model.blocks[0].requires_grad_(False)
    model.blocks[0].zero_grad()
    assert polyshard.clip_grad_norm_(model, 1.0).isfinite()
    polyshard.close(model)
    return str(caught.value)


def test_dtensors_outside_of_units_are_refused_in_a_norm() -> None:
    for rank, told in enumerate(run(4, with_a_block_outside)):
        assert "a DTensor of shape" in told
        assert f"in no unit (rank {rank})" in told


def first_batches(rank: int) -> str:
    with meshed(PARTS, rank) as (model, mesh):
        polyshard.shard(model, meshes.config_of(PARTS, mesh))
        told = ""
        try:
            # By the process's rank, as without tensor parallelism.
            model(tokens=torch.full((2, 8), rank))
        except RankMismatchError as error:
            told = str(error)
        model(PARTS.batch(0, coordinate_of(mesh)["dp"], 0)).backward()
        # Compared once.
        model(torch.full((2, 8), 0)).backward()
    polyshard.close(model)
    return told


def test_ranks_that_must_see_one_batch_say_where_it_differs() -> None:
    for rank, told in enumerate(run(4, first_batches)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert f"Ranks {pair} must see the same batch, but argument 'tokens' of 'Net' differs" in told
        assert f"(rank {rank})" in told
        assert "mesh['dp'].get_local_rank()" in told


RAISES = """
import sys, time
sys.path[:0] = {path!r}
import torch, torch.distributed as dist
import meshes, polyshard
from meshed_models import Shape
from meshes import Plan, coordinate_of, meshed

dist.init_process_group("gloo")
rank, plan = dist.get_rank(), Plan((2, 2), ("dp", "tp"), Shape(), ("dp",))
with meshed(plan, rank) as (model, mesh):
    polyshard.shard(model, meshes.config_of(plan, mesh))

def fail(module, args):
    raise ValueError("a bad sample")

for turn in range(4):
    if turn == 2 and rank == 3:
        # Between a collective of the other group and one of this.
        model.blocks[1].feed.down.register_forward_pre_hook(fail)
    begun = time.monotonic()
    try:
        model(plan.batch(turn, coordinate_of(mesh)["dp"], 0)).backward()
    except Exception as error:
        told = " ".join([str(error), *getattr(error, "__notes__", ())]).replace(chr(10), " ")
        print(f"rank {{rank}}: {{time.monotonic() - begun:.1f}} s, {{type(error).__name__}}: {{told}}", flush=True)
        raise SystemExit(1)
"""


def test_all_ranks_of_a_mesh_end_soon_behind_one_that_raised_and_tell_its_error(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISES.format(path=[*sys.path]))
    ended = run_script(4, script, timeout=60.0)
    assert ended.codes == [1] * 4, ended.errors
    lines = sorted(line for line in ended.output.splitlines() if line.startswith("rank "))
    assert len(lines) == 4
    for rank, line in enumerate(lines):
        # Of the 30 that the configuration lets them wait.
        assert float(line.split()[2]) < 15.0, line
        assert "a bad sample" in line, line
        if rank != 3:
            assert "Rank 3 raised ValueError: a bad sample" in line, line
    # In one tensor parallel group with the rank that raised, torch's own collective fails.
    assert [line.split()[4].rstrip(":") for line in lines[:2]] == ["PeerFailedError"] * 2
