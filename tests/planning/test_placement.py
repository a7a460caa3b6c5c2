"""A policy chooses along which dimension ranks cut the parameters of a unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from extended_models import Rounded
from parity import (
    Block,
    Net,
    adam,
    assert_parity,
    local,
    on_ranks,
    seeded,
    sharded_copy,
    threaded,
    train,
    train_reference,
    units_of,
    whole,
)
from polyshard.errors import ConfigError, RankMismatchError, UnsupportedError
from polyshard.interfaces import PolicyContext, UnitPlan, WrapPolicy
from polyshard_backends.threaded import ThreadedWorld
from reference_models import Frozen, mixed, mixed_step
from refusal import Holder, Tower, refused, silent
from torch import nn
from torch.distributed.tensor import Shard


class Columns(WrapPolicy):
    """Blocks are cut along dimension 1, and of the root some, by any of their names: a convolution in channels_last, a
    transposed matrix, the tied embedding."""

    api_version = 1

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        inner = {module: {"placement": 1} for module in root.modules() if isinstance(module, Block | Frozen)}
        names = {"conv.weight": 1, "turned": 1, "head.weight": 1, "narrow": 0, "first.weight": 1}
        return {root: {"placement": names}, **inner}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        (2, {"offload": "cpu", "strategy": "shard_grad_op"}),
        (4, {"strategy": "hybrid_shard", "shard_size": 2}),
        (2, {"strategy": "no_shard"}),
    ],
    ids=["full", "offloaded", "hybrid", "not cut"],
)
def test_training_equals_the_unsharded_models(ranks: int, settings: dict[str, Any]) -> None:
    assert_parity(mixed(), mixed_step, ranks, optimizer=adam, settings={"policy": Columns(), **settings})


def test_dtensors_tell_the_dimension_and_hold_the_chunks_of_torch() -> None:
    plain = {name: value.detach() for name, value in mixed().named_parameters()}
    along = {name for name in plain if name.startswith(("blocks", "frozen")) and name.endswith("weight")}
    along |= {"conv.weight", "turned", "embed.weight", "first.weight"}

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(mixed(), rank, world, policy=Columns())
        for name, parameter in mine.named_parameters():
            dim = 1 if name in along else 0
            assert parameter.placements == (Shard(dim),), name
            chunks = plain[name].chunk(2, dim)
            wanted = chunks[rank] if rank < len(chunks) else chunks[0][:0]
            assert torch.equal(local(parameter.detach()), wanted) or not parameter.numel(), name

    on_ranks(2, on_rank)


@pytest.mark.slow
def test_flat_parameters_and_checkpoints_at_another_placement(tmp_path: Path) -> None:
    expected = train_reference(mixed(), mixed_step, 2, turns=2, optimizer=adam).parameters

    def save(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(mixed(), rank, world, policy=Columns())
        optimizer = torch.optim.AdamW(polyshard.flat_parameters(mine), lr=1e-2)
        train(mine, optimizer, mixed_step, rank, 2)
        torch.testing.assert_close(whole(mine), expected, rtol=1e-12, atol=1e-12)
        polyshard.checkpoint.save(tmp_path, 1, mine, optimizer)

    def load(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(mixed(), rank, world, policy=units_of(Block, Frozen))
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        polyshard.checkpoint.load(polyshard.checkpoint.latest(tmp_path), mine, optimizer)
        torch.testing.assert_close(whole(mine), expected, rtol=1e-12, atol=1e-12)

    on_ranks(2, save)
    on_ranks(3, load)


def placing(placement: Any) -> Any:
    return {"name": "custom", "fn": lambda module: isinstance(module, nn.Linear) and {"placement": placement}}


#: An answer for each ``Linear`` of a model over 4 ranks, the first of which is (4, 3), and words of the error.
WRONG = {
    "text": ("1", "overrides placement for 'first' by '1' (rank 2). Give a dimension, 0 or more, or a mapping"),
    "a flag": (True, "overrides placement for 'first' by True (rank 2)"),
    "negative": (-1, "overrides placement for 'first' by -1 (rank 2)"),
    "negative by name": ({"weight": -1}, "overrides placement for 'first' by {'weight': -1} (rank 2)"),
    "no name": ({0: 1}, "overrides placement for 'first' by {0: 1} (rank 2)"),
    "an unknown name": ({"wieght": 1}, "no such parameter. Did you mean 'weight'? It has: weight, bias."),
    "no such dimension": ({"bias": 1}, "for 'first' (rank 2) by {'bias': 1}: it has the shape (4,). Give one of"),
    "uneven": (1, "places 'first.weight' (rank 2), of shape (4, 3), along dimension 1, which 4 ranks do not divide"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_placements_are_refused_before_anything_changes(case: str) -> None:
    placement, words = WRONG[case]
    refused(Tower(), silent(policy=placing(placement)), ConfigError, words, twin=Tower())


def test_what_gathers_itself_or_computes_as_bytes_is_cut_along_rows_alone() -> None:
    head = Holder(nn.Parameter(Rounded(torch.ones(4, 4))))
    policy = {"name": "custom", "fn": lambda module: isinstance(module, Holder) and {"placement": 1}}
    words = "'inner.head' (rank 2) by {'odd': 1}: a Rounded gathers itself, and is cut along dimension 0 alone"
    refused(Tower(head), silent(policy=policy), ConfigError, words)
    policy = {"name": "custom", "fn": lambda module: isinstance(module, nn.Linear) and {"placement": {"weight": 1}}}
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32))
    words = "'0.weight' would be cut along dimension 1, and its precision plugin computes with the bytes of a gather"
    refused(model, silent(policy=policy, precision="fp8_linear"), UnsupportedError, words)


def test_ranks_that_place_differently_are_told_so() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            mine = seeded(lambda: Net(1, width=8))
        settings = {"placement": {"up.weight": rank}}
        policy = {"name": "custom", "fn": lambda module: isinstance(module, Block) and settings}
        with pytest.raises(RankMismatchError, match="trained, cut along dimension 1"):
            polyshard.shard(mine, threaded(world, rank, policy=policy))

    on_ranks(2, on_rank)
