"""What modules send where some are set apart: not to reduce, not over replicas, to keep parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, fake, root_of, seeded, units_of
from polyshard.runtime.module_state import ModuleState
from polyshard_backends.fake import FakeCollectives
from torch import nn

BLOCKS = 3


class Sent:
    """What a model of three blocks and a root sends; of 4 ranks, or of 2 shards and 2 replicas."""

    def __init__(self, hybrid: bool = False, **settings: Any) -> None:
        self.world = fake()
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
