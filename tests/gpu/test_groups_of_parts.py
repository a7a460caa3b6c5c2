"""Further groups of a part of a job that is bound to devices: its ranks make them alone, whatever the others do.

Four ranks on one GPU::

    POLYSHARD_RANKS_ON_ONE_GPU=4 python -m pytest -m gpu tests/gpu/test_groups_of_parts.py
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from polyshard.errors import WorldSizeError
from polyshard.interfaces import PluginContext, ReduceOp
from polyshard_backends.nccl import NcclCollectives
from polyshard_testing.collectives_checks import check_overlap
from processes import KeptRanks, device_of, gpu_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WORLD_SIZE = gpu_ranks(4)
RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD_SIZE != 4, reason="four ranks: see POLYSHARD_RANKS_ON_ONE_GPU"),
]

#: In a rank's process.
MESHES: list[DeviceMesh] = []


def mesh() -> DeviceMesh:
    """Two by two ranks, of a job that is bound to devices."""
    job: Any = dist.group.WORLD
    assert job.bound_device_id is not None
    if not MESHES:
        MESHES.append(init_device_mesh("cuda", (2, 2), mesh_dim_names=("stage", "dp")))
    return MESHES[0]


def over(rank: int, group: dist.ProcessGroup) -> NcclCollectives:
    context = PluginContext("nccl", device_of(rank), process_group=group, timeout=timedelta(seconds=30))
    return NcclCollectives(context, registered=False)


def overlap(rank: int) -> tuple[list[str], bool, float]:
    """Warnings, whether both kinds have a communicator of their own, and a sum over a rank's stage."""
    group = mesh()["dp"].get_group()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # Ranks of the first stage construct one more, and use it first.
        if mesh().get_local_rank("stage") == 0:
            extra = over(rank, group)
            extra.barrier()
            extra.all_reduce(torch.ones(4, device=extra.device), op=ReduceOp.SUM).wait()
        collectives = over(rank, group)
        check_overlap(collectives, [(3, 2, 1, 0)])
        full = torch.full((2,), float(rank + 1), device=collectives.device)
        mine = torch.empty(1, device=collectives.device)
        collectives.reduce_scatter(mine, full, op=ReduceOp.SUM).wait()
    apart = collectives.gather_group() is not collectives.reduction_group()
    total = mine.item()
    collectives.close()
    return [str(each.message) for each in said if "communicator" in str(each.message)], apart, total


def test_gathers_and_reductions_of_a_part_have_a_communicator_each() -> None:
    # Stages are ranks 0 and 1, 2 and 3.
    assert run(overlap) == [([], True, 3.0), ([], True, 3.0), ([], True, 7.0), ([], True, 7.0)]


def partition(rank: int) -> float | str:
    three = dist.new_group([0, 1, 2])
    if rank == 3:
        return "outside"
    assert isinstance(three, dist.ProcessGroup)
    collectives = over(rank, three)
    with pytest.raises(WorldSizeError, match="a split numbers ranks in ascending order"):
        collectives.partition([[2, 1], [0]])
    part = collectives.partition([[0], [1, 2]])
    full = torch.full((part.world_size,), float(rank + 1), device=part.device)
    mine = torch.empty(1, device=part.device)
    part.reduce_scatter(mine, full, op=ReduceOp.SUM).wait()
    part.close()
    collectives.close()
    return mine.item()


def test_a_part_of_the_job_is_partitioned_without_the_others() -> None:
    assert run(partition) == [1.0, 5.0, 5.0, "outside"]
