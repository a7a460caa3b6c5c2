"""What the suites compare a plugin with: steps over two ranks, or pretended ones where threads share no device."""

from __future__ import annotations

import sys
import time

import pytest
import torch
import torch.distributed as dist
from polyshard.interfaces import PolicyContext, UnitPlan
from polyshard_policies.module_class import Always
from polyshard_testing import plugin_context
from polyshard_testing.plugin import collectives_noted
from polyshard_testing.training import Training
from torch import nn


class Draws(Always):
    """Draws random numbers on one rank, as long as the other may be building its model."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        for _ in range(50):
            torch.rand(1)
            time.sleep(0.001)
        return super().plan(root, context)


def slowly_built() -> nn.Module:
    parts = []
    for _ in range(20):
        parts.append(nn.Linear(6, 6))
        time.sleep(0.001)
    return nn.Sequential(nn.Embedding(10, 6), *parts)


@pytest.mark.slow
def test_a_plugin_that_draws_random_numbers_changes_no_other_ranks_model() -> None:
    training = Training(slowly_built)
    sharded = training.sharded(lambda: {"policy": Draws(plugin_context())})
    sharded.check(training.reference(), 1e-4)


def test_other_random_numbers_are_as_they_were() -> None:
    state = torch.get_rng_state()
    Training().reference()
    Training().scores(dict)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_process_group_of_one_leaves_nothing_behind() -> None:
    printing = sys.excepthook
    with collectives_noted() as issued:
        dist.all_reduce(torch.zeros(1))
    assert issued == ["c10d::allreduce_"]
    assert not dist.is_initialized()
    assert sys.excepthook is printing
