"""What the suites compare a plugin with: steps over two ranks, or pretended ones where threads share no device."""

from __future__ import annotations

import sys
import time

import pytest
import torch
import torch.distributed as dist
from polyshard.errors import PluginContractError
from polyshard.interfaces import PolicyContext, UnitPlan, UnitSpec
from polyshard_plugins.offload import CpuOffload
from polyshard_policies.module_class import Always
from polyshard_testing import plugin_context
from polyshard_testing.plugin import collectives_noted
from polyshard_testing.training import Trained, Training
from torch import nn


class HalfOfIt(CpuOffload):
    """Fetches half of what was placed."""

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        super().fetch(unit, master, own_slice)
        own_slice.mul_(0.5)


def test_two_ranks_train_as_the_model_by_itself() -> None:
    training = Training()
    training.sharded(dict).check(training.reference(), 1e-6)


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


@pytest.mark.slow
def test_one_rank_trains_as_the_model_by_itself_and_a_faulty_plugin_does_not() -> None:
    training = Training()
    context = plugin_context()
    training.alone(dict).check(training.reference(), 1e-6)
    training.alone(lambda: {"offload": CpuOffload(context), "precision": "bf16"}).check(training.reference(), 0.1)
    with pytest.raises((AssertionError, PluginContractError), match=r"of the largest change|fetch"):
        training.alone(lambda: {"offload": HalfOfIt(context)}).check(training.reference(), 0.1)


def test_the_tolerance_is_a_share_of_the_largest_change() -> None:
    before = {"weight": torch.zeros(2), "bias": torch.zeros(1)}
    reference = Trained(before, {"weight": torch.tensor([4.0, 0.0]), "bias": torch.zeros(1)})
    moved = Trained(before, {"weight": torch.tensor([4.0, 0.0]), "bias": torch.tensor([0.3])})
    moved.check(reference, 0.08)
    with pytest.raises(AssertionError, match=r"bias is 0\.3 off after 3 steps, 0\.075 of the largest change"):
        moved.check(reference, 0.07)


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
