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


KEPT = {"strategy": "shard_grad_op"}
HYBRID = {"strategy": "hybrid_shard", "shard": "dp", "replicate": "replicate"}
#: Over two ranks with a stage or two each, and over four, of which two share each stage.
PLANS = [
    replace(plan, sizes=(2, ranks // 2))
    for ranks in (2, 4)
    for plan in (
        Plan("GPipe"),
        Plan("GPipe", gathers="microbatch", settings=KEPT),
        Plan("GPipe", drop_in=True),
        Plan("1F1B", settings=KEPT),
        Plan("1F1B", gathers="microbatch"),
        Plan("Interleaved1F1B", each=2),
        Plan("Interleaved1F1B", each=2, gathers="microbatch", settings=KEPT),
        Plan("LoopedBFS", each=2, settings=KEPT),
        Plan("InterleavedZeroBubble", each=2),
        Plan("ZBVZeroBubble", each=2, settings=KEPT),
        Plan("ZBVZeroBubble", each=2, drop_in=True),
        Plan("DualPipeV", each=2),
    )
]
#: Of three axes, one of them of one rank.
PLANS += [
    Plan("1F1B", sizes=(2, 2, 1), names=("pp", "replicate", "dp"), settings=HYBRID),
    Plan("1F1B", sizes=(2, 1, 2), names=("pp", "dp", "tp"), gathers="microbatch"),
    Plan("Interleaved1F1B", each=2, sizes=(2, 1, 2), names=("pp", "dp", "tp"), drop_in=True),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_pipeline_trains_as_the_unsharded_model(plan: Plan) -> None:
    ranks = torch.Size(plan.sizes).numel()
    if ranks > WORLD_SIZE:
        pytest.skip(f"{ranks} ranks: POLYSHARD_RANKS_ON_ONE_GPU={ranks}")
    reference, norms = pipelines.expected(plan, 3)
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    seen = set()
    for found, values in RANKS.run(ranks, train, plan):
        assert found == pytest.approx(norms, rel=1e-12)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
        seen.update(values)
    assert seen == wanted.keys()
