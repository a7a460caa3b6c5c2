"""Stages of a pipeline over NCCL, beside the unsharded model; CPU twins: ``tests/pipelining``."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pipelines
import pytest
import torch
from pipelines import Plan
from processes import KeptRanks, device_of, gpu_ranks

WORLD_SIZE = gpu_ranks(4)
RANKS = KeptRanks("nccl")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD_SIZE < 2, reason="two stages need two ranks: POLYSHARD_RANKS_ON_ONE_GPU=2"),
]


def train(rank: int, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """As ``pipelines.train`` on the rank's device; parameters on the host."""
    with warnings.catch_warnings():
        # Threads of autograd have no context before their first kernel; of two ranks each has a stage alone.
        warnings.filterwarnings("ignore", message=".*(no current CUDA context|NO_SHARD)")
        norms, values = pipelines.train(rank, replace(plan, device=device_of(rank)))
    return norms, {name: value.cpu() for name, value in values.items()}


@pytest.mark.parametrize(
    "plan",
    [
        Plan("1F1B"),
        Plan("1F1B", gathers="microbatch"),
        Plan("Interleaved1F1B", each=2),
        Plan("ZBVZeroBubble", each=2),
        Plan("GPipe", faced=True),
    ],
    ids=str,
)
def test_a_pipeline_trains_as_the_unsharded_model(plan: Plan) -> None:
    plan = replace(plan, sizes=(2, WORLD_SIZE // 2))
    reference, norms = pipelines.expected(plan, 3)
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    seen = set()
    for found, values in RANKS.run(2 * (WORLD_SIZE // 2), train, plan):
        assert found == pytest.approx(norms, rel=1e-12)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
        seen.update(values)
    assert seen == wanted.keys()
