"""Stages of a pipeline that are sharded, beside the unsharded model in one process."""

from __future__ import annotations

import pipelines
import pytest
import torch
from pipelines import Plan
from processes import KeptRanks

RANKS = KeptRanks()
pytestmark = pytest.mark.slow


def assert_parity(plan: Plan, world_size: int = 4) -> None:
    reference, norms = pipelines.expected(plan, 3)
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    seen = set()
    for found, values in RANKS.run(world_size, pipelines.train, plan):
        assert found == pytest.approx(norms, rel=1e-12)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
        seen.update(values)
    assert seen == wanted.keys()


@pytest.mark.parametrize(
    "plan",
    [
        Plan("GPipe"),
        Plan("1F1B", gathers="microbatch"),
        Plan("1F1B", settings={"strategy": "shard_grad_op"}),
        Plan("Interleaved1F1B", each=2, gathers="microbatch"),
        Plan("Interleaved1F1B", each=2),
        Plan("ZBVZeroBubble", each=2),
    ],
    ids=str,
)
def test_a_pipeline_trains_as_the_unsharded_model(plan: Plan) -> None:
    assert_parity(plan)
