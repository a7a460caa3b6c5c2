"""A model of two branches on two streams, one process for each of at most two GPUs; its twin is of the same name.

Delays let one stream fall far behind the others, so that whatever forgets to wait for it reads or overwrites too early.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any
from unittest import mock

import polyshard
import pytest
import torch
from cuda_models import sharded
from polyshard.interfaces import UnitEvent, UnitOperation
from polyshard.planning import thresholds
from polyshard.runtime.root import Root
from processes import KeptRanks, gpu_ranks, settle_on_device
from torch import nn

pytestmark = pytest.mark.gpu


WORLD_SIZE = gpu_ranks()
#: A few milliseconds: longer than all else that a step does.
CYCLES_OF_DELAY = 5_000_000
WIDTH = 192


RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)


class Late(torch.autograd.Function):
    """The identity, after a delay of the stream that it runs on, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES_OF_DELAY)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES_OF_DELAY)
        return gradient.clone()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TwoBranches(nn.Module):
    """Branches that share their last block. With ``side``, the second one is computed there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.here = nn.ModuleList(Block() for _ in range(4))
        self.beside = nn.ModuleList(Block() for _ in range(4))
        self.shared = Block()
        self.last = nn.Linear(WIDTH, 1)
        self.side: torch.cuda.Stream | None = None
        #: The branch that is late.
        self.late = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.side is None:
            one, other = self.branch(x, "here"), self.branch(x, "beside")
        else:
            current = torch.cuda.current_stream()
            self.side.wait_stream(current)
            one = self.branch(x, "here")
            with torch.cuda.stream(self.side):
                other = self.branch(x, "beside")
            current.wait_stream(self.side)
            # What torch asks of tensors that two streams use.
            x.record_stream(self.side)
            other.record_stream(current)
        return self.last(one + other).square().mean()

    def branch(self, x: torch.Tensor, name: str) -> torch.Tensor:
        for block in (*getattr(self, name), self.shared):
            x = block(Late.apply(x) if self.late == name else x)
        return x


def delay_reductions(event: UnitEvent) -> None:
    """Hold the stream that reduces up, which has yet to read its input."""
    if event.begins and event.operation is UnitOperation.REDUCE:
        torch.cuda._sleep(CYCLES_OF_DELAY)


def train(rank: int, late: str, direct: bool, settings: dict[str, Any]) -> tuple[float, float, int]:
    """Largest differences in loss and, after some steps, in parameters; number of units left gathered."""
    device = settle_on_device(rank)
    torch.manual_seed(0)
    reference = TwoBranches().to(device, torch.float64)
    model = sharded(copy.deepcopy(reference), Block, **settings)
    assert isinstance(model, TwoBranches)
    model.side, model.late = torch.cuda.Stream(), late
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    expected = torch.optim.SGD(reference.parameters(), lr=1e-3)
    root: Root = model.__dict__["_polyshard_module_state"].root
    for unit in root.units:
        unit.observers = (delay_reductions,)
    loss_off = 0.0
    # A parameter that two streams use gathers its gradient on the first of them, and torch says so.
    warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream")
    with mock.patch.object(thresholds, "DIRECT_NUMEL", 1 if direct else thresholds.DIRECT_NUMEL):
        for _ in range(4):
            x = torch.randn(8 * WORLD_SIZE, 16, device=device, dtype=torch.float64)
            loss = model(x.chunk(WORLD_SIZE)[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = reference(x)
            whole.backward()
            expected.step()
            expected.zero_grad()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            loss_off = max(loss_off, abs((mean / WORLD_SIZE - whole).item()) / whole.item())
    with polyshard.unsharded(model):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        parameters_off = max((one - other).abs().max().item() for one, other in pairs)
    return loss_off, parameters_off, len(root.gathered)


@pytest.mark.parametrize("late", ["here", "beside"])
@pytest.mark.parametrize("direct", [False, True], ids=["copied", "direct"])
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "full_shard", "batch_nbytes": 0},
        {"strategy": "full_shard", "batch_nbytes": "8 MiB"},
        {"strategy": "shard_grad_op", "batch_nbytes": 0},
        {"strategy": "no_shard"},
    ],
    ids=["full", "buckets", "grad_op", "whole"],
)
def test_branches_on_two_streams_train_as_the_unsharded_model(
    settings: dict[str, Any], direct: bool, late: str
) -> None:
    for loss, parameters, gathered in run(train, late, direct, settings):
        assert loss < 1e-12
        assert parameters < 1e-10
        assert gathered == 0


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


class MayRaise(nn.Module):
    """The identity, whose backward raises once it is armed."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Raises.apply(x) if self.armed else x


def written_behind_an_exception(rank: int) -> float:
    """What reductions of a backward that raised write into memory that ``.grad`` had, and others have now."""
    device = settle_on_device(rank)
    model = sharded(nn.Sequential(Block(), MayRaise(), Block(), Block(), Block()).to(device), Block, batch_nbytes=0)
    x = torch.randn(8, WIDTH, device=device)
    model(x).square().mean().backward()
    gradients = {each.grad.to_local().untyped_storage().nbytes() for each in model.parameters()}
    root: Root = model.__dict__["_polyshard_module_state"].root
    for unit in root.units:
        unit.observers = (delay_reductions,)
    model[1].armed = True
    with pytest.raises(ArithmeticError, match="in backward"):
        model(x).square().mean().backward()
    model.zero_grad()
    others = [torch.zeros(nbytes // 4, device=device) for nbytes in gradients for _ in range(len(model))]
    torch.cuda.synchronize()
    return max(each.abs().max().item() for each in others)


def test_a_backward_that_raised_writes_into_no_memory_that_others_have_since() -> None:
    assert max(run(written_behind_an_exception)) == 0.0
