"""Exceptions in ways that ``test_random_programs.py`` does not draw: nothing stays gathered, the next step is right."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_parity,
    draw,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    units_of,
    whole_of,
)
from polyshard.errors import CollectiveError
from polyshard.interfaces import Collectives
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


class PlannedError(Exception):
    """What the tests raise."""


@pytest.mark.parametrize("outer", [True, False])
def test_a_unit_that_returns_nothing(outer: bool) -> None:
    class Silent(Block):
        def forward(self, x: torch.Tensor) -> None:
            self.seen = super().forward(x).detach()

    class Root(Net):
        def __init__(self) -> None:
            super().__init__()
            self.silent = Silent(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if outer:
                try:
                    raise PlannedError("being handled")
                except PlannedError:
                    assert self.silent(x) is None
            else:
                assert self.silent(x) is None
            return super().forward(x)

    assert_parity(seeded(Root), world_size=2, settings={"policy": units_of(Silent, Block)})


@one_by_one("strategy", STRATEGIES, "index", [0, 1, 3])
def test_a_backward_after_one_that_raised_has_all_gradients(index: int, strategy: str) -> None:
    """No forward comes in between, which would clean up."""

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(seeded(lambda: Net(4)), rank, world, policy=units_of(Block), strategy=strategy)
        fails = [True]

        def fail(_: torch.Tensor) -> None:
            if fails:
                raise PlannedError

        mine.blocks[index].up.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        first, second = (mine(draw(4, 3, turn=turn, rank=rank)).square().mean() for turn in range(2))
        with pytest.raises(PlannedError):
            second.backward(retain_graph=True)
        fails.clear()
        for loss in (first, second):
            loss.backward()
        assert root_of(mine).gathered == ()
        return {name: each.grad for name, each in mine.named_parameters() if each.grad is not None}

    ranks = on_ranks(2, on_rank)
    plain = seeded(lambda: Net(4))
    for rank in range(2):
        for turn in range(2):
            (plain(draw(4, 3, turn=turn, rank=rank)).square().mean() / 2).backward()
    for name, parameter in plain.named_parameters():
        whole = whole_of(parameter, [rank[name] for rank in ranks])
        torch.testing.assert_close(whole, parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_forward_inside_an_except_clause_keeps_nothing_of_what_is_handled_there() -> None:
    """An exception has its frames, and these have tensors: activations of a batch that was too large, say."""
    config = polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}, policy=units_of(Block))
    model = polyshard.shard(Net(), config)

    def too_large() -> None:
        activations = torch.ones(1000)
        alive.append(weakref.ref(activations))
        raise PlannedError(activations.numel())

    alive: list[weakref.ref[torch.Tensor]] = []
    for _ in range(2):
        try:
            too_large()
        except PlannedError:
            model(torch.ones(4, 3)).sum().backward()
    gc.collect()
    assert [each() for each in alive] == [None, None]


def live_nbytes() -> int:
    """Bytes of all tensors that Python knows."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("together", [0, "16 MiB"])
def test_after_a_gather_that_could_not_be_issued_no_memory_stays(
    failing: int, together: int | str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeCollectives.all_gather
    left: list[int] = []

    def fails(self: FakeCollectives, out: torch.Tensor, shard: torch.Tensor) -> Any:
        if left and not left[0]:
            left.clear()
            raise CollectiveError("told to")
        if left:
            left[0] -= 1
        return whole(self, out, shard)

    monkeypatch.setattr(FakeCollectives, "all_gather", fails)
    # One by one, as the contract's own does with larger ones.
    monkeypatch.setattr(FakeCollectives, "all_gather_many", Collectives.all_gather_many)
    monkeypatch.setattr("polyshard.interfaces.collectives.PACKED_NBYTES", 0)
    config = polyshard.ShardConfig(
        collectives={"name": "fake", "world_size": 2}, policy=units_of(Block), strategy=strategy, batch_nbytes=together
    )
    model = polyshard.shard(Net(), config)
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
    model.zero_grad()
    before = live_nbytes()
    left.append(failing)
    with pytest.raises(CollectiveError, match="told to"):
        model(torch.ones(4, 3))
    assert live_nbytes() == before
    model(torch.ones(4, 3)).sum().backward()
    model.zero_grad()
    assert live_nbytes() == before
