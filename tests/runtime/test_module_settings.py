"""What modules send where some are set apart: not to reduce, not over replicas, to keep parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, root_of, seeded, units_of
from polyshard.interfaces import PluginContext
from polyshard.runtime.module_state import ModuleState
from polyshard_backends.fake import FakeCollectives
from torch import nn

BLOCKS = 3


class Sent:
    """What a model of three blocks and a root sends; of 4 ranks, or of 2 shards and 2 replicas."""

    def __init__(self, hybrid: bool = False, **settings: Any) -> None:
        self.world = FakeCollectives(PluginContext("fake", torch.device("cpu")), 0, 4)
        self.model = seeded(lambda: nn.Sequential(nn.Linear(5, 5), *(Block() for _ in range(BLOCKS))))
        if hybrid:
            settings |= {"strategy": "hybrid_shard", "shard_size": 2}
        config = polyshard.ShardConfig(
            collectives=self.world, policy=units_of(Block), batch_nbytes=0, split_root=False, **settings
        )
        polyshard.shard(self.model, config)
        self.root = root_of(self.model)
        ranks = self.root.units[0].ranks
        self.groups = [each for each in (ranks.owner, ranks.replicate) if isinstance(each, FakeCollectives)]
        self.blocks = self.root.module_states[1:]

    def step(self, module: nn.Module | None = None) -> Counter[str]:
        for each in self.groups:
            each.calls.clear()
        (module or self.model)(torch.ones(2, 5, dtype=torch.float64)).square().mean().backward()
        return Counter(call.operation for each in self.groups for call in each.calls)


def set_all(module_states: Any, **values: bool) -> None:
    for each in module_states:
        for name, value in values.items():
            assert isinstance(each, ModuleState)
            setattr(each, name, value)


def test_modules_that_do_not_synchronise_send_no_gradient() -> None:
    sent = Sent()
    set_all(sent.root.module_states, synchronises=False)
    assert set(sent.step()) == {"all_gather"}
    set_all(sent.root.module_states, synchronises=True)
    # What waits is a part of what is sent anyway.
    assert sent.step()["reduce_scatter"] == BLOCKS + 1


@pytest.mark.parametrize("chosen", range(BLOCKS + 1))
def test_one_module_that_does_not_synchronise(chosen: int) -> None:
    sent = Sent()
    sent.root.module_states[chosen].synchronises = False
    assert [sent.step()["reduce_scatter"] for _ in range(2)] == [BLOCKS, BLOCKS]
    sent.root.module_states[chosen].synchronises = True
    # A backward that does not come through the others, or through this one: what waits is reduced.
    assert sent.step(sent.blocks[0].module)["reduce_scatter"] == (2 if chosen != 1 else 1)
    assert not any(unit.gradients.unreduced for unit in sent.root.units)


def test_replicas_are_left_out() -> None:
    sent = Sent(hybrid=True)
    set_all(sent.root.module_states, all_reduces=False)
    for _ in range(2):
        found = sent.step()
        assert (found["reduce_scatter"], found["all_reduce"]) == (BLOCKS + 1, 0)
    sent.blocks[0].all_reduces = True
    assert sent.step()["all_reduce"] == 1
    set_all(sent.root.module_states, all_reduces=True)
    found = sent.step()
    assert (found["reduce_scatter"], found["all_reduce"]) == (BLOCKS + 1, BLOCKS + 1)


@pytest.mark.parametrize("releases", [True, False])
def test_parameters_that_backwards_keep_are_not_gathered(releases: bool) -> None:
    sent = Sent(reshard_after_forward=releases)
    set_all(sent.root.module_states, releases_after_backward=False)
    # One gather a parameter: three of a block, two of the root.
    each = 3 * BLOCKS + 2
    # A root that is asked to, releases as well.
    first = each * 2 if releases else each
    assert sent.step()["all_gather"] == first
    # Released after forward, they are gathered for backward.
    again = each if releases else 0
    assert [sent.step()["all_gather"] for _ in range(2)] == [again, again]
    optimizer = torch.optim.SGD(sent.model.parameters(), lr=0.1)
    optimizer.step()
    assert sent.step()["all_gather"] == first
    set_all(sent.root.module_states, releases_after_backward=True)
    sent.step()
    assert sent.root.gathered == ()


def test_parameters_are_kept_while_another_module_is_called() -> None:
    """As the head of a chunked loss is, between forward and backward."""
    sent = Sent(reshard_after_forward=False)
    set_all(sent.root.module_states, releases_after_backward=False)
    sent.step()
    loss = sent.model(torch.ones(2, 5, dtype=torch.float64)).square().mean()
    assert not sent.step(sent.blocks[0].module)["all_gather"]
    sent.groups[0].calls.clear()
    loss.backward()
    assert not [call for call in sent.groups[0].calls if call.operation == "all_gather"]


def test_a_backward_that_is_not_the_last_delivers_with_the_next() -> None:
    sent = Sent()
    sent.root.last_backward = False
    hooked: list[int] = []
    for number, parameter in enumerate(sent.model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: hooked.append(number))
    sent.step()
    assert not hooked
    sent.root.last_backward = True
    sent.step()
    # Once each, also of those that have no row on this rank.
    assert sorted(hooked) == list(range(len(list(sent.model.parameters()))))


def test_an_exception_leaves_nothing_gathered() -> None:
    sent = Sent()
    set_all(sent.root.module_states, releases_after_backward=False)
    sent.step()
    assert len(sent.root.gathered) == BLOCKS + 1

    def stop(*_: object) -> None:
        raise ValueError("stopped")

    sent.blocks[1].module.register_forward_pre_hook(stop)
    with pytest.raises(ValueError, match="stopped"):
        sent.step()
    assert sent.root.gathered == ()
