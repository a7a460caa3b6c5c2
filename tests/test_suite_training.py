"""What the suites compare a plugin with: steps over two ranks, or pretended ones where threads share no device."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from int8_wire import Int8Wire
from polyshard.interfaces import UnitSpec
from polyshard.testing.communication import collectives_noted
from polyshard.testing.training import Trained, Training


class HalfTheScale(Int8Wire):
    """Decodes to half of what was sent."""

    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        super().decode(unit, wire, out)
        out.mul_(0.5)


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> Training:
    """What a device that threads do not share gets, on this one."""
    training = Training()
    pretended = training._pretended
    monkeypatch.setattr(Training, "sharded", lambda self, settings: pretended(settings))
    monkeypatch.setattr(Training, "reference", lambda self: pretended(dict))
    return training


def settings(caster: type[Int8Wire]) -> Any:
    return lambda: {"precision": caster()}


def test_two_ranks_train_as_the_model_by_itself() -> None:
    training = Training()
    training.sharded(dict).check(training.reference(), 1e-6)


def test_on_pretended_ranks_a_sound_encoding_is_near_and_a_faulty_one_is_not(pretending: Training) -> None:
    pretending.sharded(settings(Int8Wire)).check(pretending.reference(), 0.05)
    with pytest.raises(AssertionError, match="of the largest change"):
        pretending.sharded(settings(HalfTheScale)).check(pretending.reference(), 0.05)


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
