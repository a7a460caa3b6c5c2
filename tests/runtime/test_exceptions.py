"""An exception anywhere in a step: it reaches the user, nothing stays gathered, and the next step is right."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    assert_parity,
    draw,
    is_sharded,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    units_of,
    whole,
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


class RaisesInBackward(torch.autograd.Function):
    """The identity, but for its backward while ``module`` says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Fragile) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.module.raises == "backward":
            raise PlannedError("in backward")
        return gradient, None


class Fragile(Block):
    """Raises before, in the middle of or after its computation, or in its backward, on request."""

    raises: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises == "start":
            raise PlannedError("at the start")
        y = self.up(x)
        if self.raises == "middle":
            raise PlannedError("in the middle")
        if self.raises == "backward":
            y = RaisesInBackward.apply(y, self)
        z = x + self.down(torch.tanh(y))
        if self.raises == "end":
            raise PlannedError("at the end")
        return z


class FragileNet(nn.Module):
    raises: str | None = None
    catches = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Fragile() for _ in range(4))
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises == "start":
            raise PlannedError("at the root's start")
        x = self.first(x)
        for block in self.blocks:
            try:
                x = block(x)
            except PlannedError:
                if not self.catches:
                    raise
        if self.raises == "end":
            raise PlannedError("at the root's end")
        return self.last(x)


FRAGILE = {"policy": units_of(Fragile)}


def failing_then_right(break_it: Callable[[nn.Module], None], in_backward: bool = False) -> Any:
    """A step whose turn 1 fails first, then repeats."""

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        if turn == 1:
            break_it(model)
            if in_backward:
                loss = model(draw(4, 3, turn=9, rank=rank)).square().mean()
                with pytest.raises(PlannedError):
                    loss.backward()
            else:
                with pytest.raises(PlannedError):
                    model(draw(4, 3, turn=9, rank=rank))
            if is_sharded(model) and not in_backward:
                assert root_of(model).gathered == ()
            for module in model.modules():
                if isinstance(module, (Fragile, FragileNet)):
                    module.raises = None
            # What a backward that raised left in .grad is undefined, unsharded too.
            model.zero_grad()
            # Not lost with what was whole.
            model.load_state_dict(model.state_dict())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        return square_step(model, turn, rank)

    return step


@one_by_one(
    "index, at, world_size",
    [
        *((index, at, 2) for index, at in [(0, "start"), (0, "end"), (2, "middle"), (3, "start"), (3, "end")]),
        # Of the root's forward.
        *((None, at, world_size) for at, world_size in [("start", 1), ("start", 3), ("end", 3)]),
        *((index, "backward", world_size) for index, world_size in [(0, 2), (1, 2), (3, 2), (3, 1)]),
    ],
    "strategy",
    STRATEGIES,
)
def test_after_an_exception_the_next_step_is_right(index: int | None, at: str, world_size: int, strategy: str) -> None:
    def break_it(model: nn.Module) -> None:
        (model if index is None else model.blocks[index]).raises = at

    step = failing_then_right(break_it, in_backward=at == "backward")
    settings = {**FRAGILE, "strategy": strategy}
    assert_parity(seeded(FragileNet), step, world_size, settings=settings, optimizer=adam)


def test_a_unit_that_falls_back_in_its_own_except_clause() -> None:
    class Falls(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                raise PlannedError("inside")
            except PlannedError:
                return super().forward(x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.falls = Falls()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            try:
                raise PlannedError("in the root")
            except PlannedError:
                x = self.falls(x)
            return self.block(x)

    assert_parity(seeded(Root), world_size=2, settings={"policy": units_of(Falls, Block)})


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
        mine = sharded_copy(seeded(FragileNet), rank, world, **FRAGILE, strategy=strategy)
        mine.blocks[index].raises = "backward"
        first, second = (mine(draw(4, 3, turn=turn, rank=rank)).square().mean() for turn in range(2))
        with pytest.raises(PlannedError):
            second.backward(retain_graph=True)
        mine.blocks[index].raises = None
        for loss in (first, second):
            loss.backward()
        assert root_of(mine).gathered == ()
        return {name: each.grad for name, each in mine.named_parameters() if each.grad is not None}

    ranks = on_ranks(2, on_rank)
    plain = seeded(FragileNet)
    for rank in range(2):
        for turn in range(2):
            (plain(draw(4, 3, turn=turn, rank=rank)).square().mean() / 2).backward()
    for name, parameter in plain.named_parameters():
        whole = whole_of(parameter, [rank[name] for rank in ranks])
        torch.testing.assert_close(whole, parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_after_a_failure_parameters_can_be_read_whole(fails_in: str) -> None:
    model = seeded(FragileNet)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(model, rank, world, **FRAGILE)
        mine.blocks[2].raises = "middle" if fails_in == "forward" else "backward"
        with pytest.raises(PlannedError):
            mine(draw(4, 3)).sum().backward()
        return whole(mine)

    for parameters in on_ranks(2, on_rank):
        assert all(torch.equal(parameters[name], p) for name, p in model.named_parameters())


def test_a_second_forward_that_raises_does_not_take_the_first_one_s_backward_away() -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        loss = model(x).square().mean()
        model.blocks[2].raises = "middle"
        with pytest.raises(PlannedError):
            model(draw(4, 3, turn=8, rank=rank))
        model.blocks[2].raises = None
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad]

    assert_parity(seeded(FragileNet), step, world_size=2, settings=FRAGILE)


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
        collectives={"name": "fake", "world_size": 2},
        policy=units_of(Block),
        strategy=strategy,
        batch_nbytes=together,
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
