"""torch.compile around the sharded model and inside it, on processes: compiling from several threads can crash."""

from __future__ import annotations

import warnings
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, root_of, seeded, sgd, square_step, train_reference, units_of
from polyshard.planning import thresholds
from processes import KeptRanks
from torch import nn

RANKS = KeptRanks()
TURNS = 3


def train(rank: int, compiles: str, strategy: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int]:
    """The losses and the whole parameters after training, and the number of graphs that the compiler made."""
    # The compiler looks at .grad of the tensors that a frame takes in, and does not silence this in every version.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    config = polyshard.ShardConfig(policy=units_of(Block), strategy=strategy)
    model: Any = seeded(Net)
    if compiles == "forwards before":
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="eager", fullgraph=True)
    polyshard.shard(model, config)
    called: nn.Module = model
    if compiles == "around":
        called = torch.compile(model, backend="eager")
    elif compiles == "blocks after":
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
    optimizer = sgd(model)
    losses = []
    for turn in range(TURNS):
        losses += square_step(called, turn, rank)
        assert root_of(model).gathered == ()
        optimizer.step()
        optimizer.zero_grad()
    with polyshard.unsharded(model):
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return losses, whole, torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Tailed(nn.Module):
    """A head whose weight its own forward does not have for itself."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.first = nn.Linear(3, 5)
        self.block = Block()
        self.head = nn.Linear(5, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.first(x))
        return self.head(x) if self.use == "called" else x @ self.head.weight.t()


def train_tailed(rank: int, use: str, compiles: str) -> tuple[list[torch.Tensor], int]:
    """The losses, and how many parts are left."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch.compiler.reset()
    thresholds.SMALLEST_SPLIT = 18
    model: Any = polyshard.shard(seeded(lambda: Tailed(use)), polyshard.ShardConfig(policy=units_of(Block)))
    if compiles == "model":
        called = torch.compile(model, backend="eager")
    else:
        called = model
        if compiles == "forward":
            model.forward = torch.compile(model.forward, backend="eager")
        else:
            # Torch 2.15 compiles the hooks of a layer of its own with it, which fullgraph=True refuses; FSDP2's, too.
            model.head.compile(backend="eager")
    optimizer = sgd(model)
    losses = []
    for turn in range(TURNS):
        losses += square_step(called, turn, rank)
        optimizer.step()
        optimizer.zero_grad()
    return losses, sum(stage.is_split for stage in root_of(model).module_states)


@pytest.mark.slow
@pytest.mark.parametrize(("compiles", "use"), [("model", "called"), ("forward", "its weight"), ("head", "called")])
def test_a_head_that_was_split_off_may_be_compiled_and_used_in_compiled_code(compiles: str, use: str) -> None:
    reference = train_reference(seeded(lambda: Tailed(use)), square_step, 2, turns=TURNS)
    expected = [[tensor for turn in reference.observed for tensor in turn[rank]] for rank in range(2)]
    for rank, (losses, left) in enumerate(RANKS.run(2, train_tailed, use, compiles, timeout=90.0)):
        torch.testing.assert_close(losses, expected[rank], rtol=1e-12, atol=1e-12)
        assert left == (2 if use == "called" else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiles", "strategy"),
    [("around", "full_shard"), ("around", "no_shard"), ("blocks after", "full_shard"), ("forwards before", "no_shard")],
)
def test_a_compiled_model_trains_like_the_unsharded_one(compiles: str, strategy: str) -> None:
    reference = train_reference(seeded(Net), square_step, 2, turns=TURNS)
    expected = [[tensor for turn in reference.observed for tensor in turn[rank]] for rank in range(2)]
    for rank, (losses, parameters, graphs) in enumerate(RANKS.run(2, train, compiles, strategy, timeout=90.0)):
        assert graphs > 0
        torch.testing.assert_close(losses, expected[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parameters, reference.parameters, rtol=1e-12, atol=1e-12)
