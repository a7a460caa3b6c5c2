"""Two jobs of one device each over torchft and NCCL: one is killed, the other goes on. CPU twin: ``tests/faults``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("torchft")

from elastic_jobs import Jobs, Lighthouse, compare
from elastic_rank import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a device for each job"),
]


def test_a_job_on_a_device_is_killed_and_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    lighthouse = Lighthouse()
    plan = Plan(tmp_path, lighthouse.address, size=1, device="cuda")
    try:
        with Jobs(plan) as jobs:
            jobs.await_together(2, steps=20, limit_s=120.0)
            jobs.kill(1, hold=False)
            assert jobs.await_steps(0, 3, limit_s=10.0) < 5.0
            jobs.await_together(2, steps=20)
            jobs.finish()
        found = compare(plan)
    finally:
        lighthouse.kill()
    assert found.alone >= 3
