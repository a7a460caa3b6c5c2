"""``reshard_after_forward=n``: each rank keeps ``1/n`` of a unit behind a forward, and ``n`` neighbours gather it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from encodings_of_gathers import Int8Encoding
from parity import Block, Net, Words, draw, fake, live_bytes, on_ranks, root_of, seeded, sgd, sharded_copy, units_of
from polyshard.errors import ConfigError
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.utils.checkpoint import checkpoint

BLOCKS: dict[str, Any] = {"policy": units_of(Block), "reshard_after_forward": 2}
#: Gathers that bring ``Net``, one a parameter: those of three blocks, of three each, and four of the root.
EACH = 3 * 3 + 4


def test_what_is_kept_of_an_encoded_unit_is_decoded() -> None:
    model, x = nn.Linear(16, 16, bias=False), torch.randn(8, 16)
    rows = model.weight.detach().view(4, -1)
    scales = rows.abs().amax(1, keepdim=True) / 127.0
    decoded = ((rows / scales).round() * scales).view(16, 16)
    outer = x.clone().requires_grad_()
    (outer @ decoded.T).square().mean().backward()

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        mine = sharded_copy(model, rank, world, precision=Int8Encoding(), reshard_after_forward=2)
        inner = x.clone().requires_grad_()
        mine(inner).square().mean().backward()
        assert inner.grad is not None
        return inner.grad

    for gradient in on_ranks(4, on_rank):
        torch.testing.assert_close(gradient, outer.grad, rtol=1e-5, atol=1e-6)


def sharded(model: nn.Module, **settings: Any) -> tuple[nn.Module, Callable[[], list[int]]]:
    """One of four pretended ranks, and a function that tells of each gather since then among how many ranks it was."""
    collectives = fake()
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, **{**BLOCKS, **settings}))
    groups = [collectives, *(each for each in root_of(model).owned if isinstance(each, FakeCollectives))]

    def gathered() -> list[int]:
        found = [each.world_size for each in groups for call in each.calls if call.operation == "all_gather"]
        for each in groups:
            each.calls.clear()
        return sorted(found)

    return model, gathered


def test_a_forward_gathers_among_all_ranks_and_a_backward_among_neighbours() -> None:
    model, gathered = sharded(seeded(Net))
    for turn in range(3):
        loss = model(draw(4, 3, turn=turn)).square().mean()
        assert root_of(model).gathered == ()
        assert gathered() == [4] * EACH
        loss.backward()
        assert gathered() == [2] * EACH


def test_parts_are_of_the_last_forward_with_gradients_alone() -> None:
    model, gathered = sharded(seeded(Net))
    first = model(draw(4, 3)).square().mean()
    with torch.no_grad():
        model(draw(4, 3))
    assert gathered() == [4] * 2 * EACH
    # A forward began since, and an optimizer may have stepped before it.
    first.backward()
    assert gathered() == [4] * EACH


def test_a_policy_decides_for_each_unit() -> None:
    def policy(module: nn.Module) -> bool | dict[str, Any]:
        return {"reshard_after_forward": 2} if isinstance(module, Block) else False

    model, gathered = sharded(seeded(Net), policy=policy, reshard_after_forward=None)
    loss = model(draw(4, 3)).square().mean()
    assert root_of(model).gathered == ("(root)",)
    loss.backward()
    assert gathered() == [2] * 9 + [4] * EACH


def test_a_rank_by_itself_keeps_the_whole_and_all_together_nothing() -> None:
    for number, expected in ((1, [4] * EACH), (4, [4] * 2 * EACH)):
        model, gathered = sharded(seeded(Net), reshard_after_forward=number)
        model(draw(4, 3)).square().mean().backward()
        assert gathered() == expected


def test_nothing_is_kept_of_an_embedding_whose_backward_reads_no_weight() -> None:
    model, gathered = sharded(seeded(Words), policy=units_of(nn.Embedding, Block))
    loss = model(torch.arange(4)).square().mean()
    # The embedding, two blocks, and the last weight.
    assert gathered() == [4] * 8
    loss.backward()
    assert gathered() == [2] * 7


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_gathered_among_neighbours(reentrant: bool) -> None:
    model, gathered = sharded(seeded(Net))
    x = draw(4, 3, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=False).square().mean()
    assert gathered() == [4] * EACH
    loss.backward()
    assert gathered() == [2] * EACH


def test_an_optimizer_steps_inside_of_a_forward() -> None:
    """What was kept before it is not what is computed with behind it."""

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
            before = self.inner(x)
            optimizer.step()
            behind: torch.Tensor = self.inner(x)
            return before - behind

    def run(model: nn.Module) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        output: torch.Tensor = model(x, sgd(model))
        return output.detach()

    x = draw(4, 4)
    expected = run(seeded(Stepping))
    assert expected.abs().max() > 0
    model = seeded(Stepping)

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        return run(sharded_copy(model, rank, world, policy=units_of(nn.Linear), reshard_after_forward=2))

    for output in on_ranks(4, on_rank):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def left_by_a_forward(releases: bool | int, units: int, width: int, folder: Path) -> tuple[int, int, int]:
    """Bytes that a forward leaves, and its backward then, on one of eight ranks; those that the report says of both."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.float64) for _ in range(units)))
    settings = {"policy": units_of(nn.Linear), "reshard_after_forward": releases, "batch_nbytes": 0}
    config = polyshard.ShardConfig(collectives={"name": "fake", "world_size": 8}, **settings)
    polyshard.shard(model, config)
    x = torch.ones(2, width, dtype=torch.float64)
    model(x).sum().backward()
    model.zero_grad()
    losses: list[torch.Tensor] = []
    forward = live_bytes(lambda: losses.append(model(x).sum()), folder)[-1]
    backward = live_bytes(lambda: losses.pop().backward(), folder)[-1]
    return forward, forward + backward, polyshard.report(model).gathered_nbytes


def test_a_rank_keeps_its_part_between_forward_and_backward(tmp_path: Path) -> None:
    units, width = 3, 64
    whole = units * width * width * 8
    released, behind, reported = left_by_a_forward(True, units, width, tmp_path)
    for number in (2, 4):
        found = left_by_a_forward(number, units, width, tmp_path)
        assert found == (released + whole // number, behind, reported + whole // number)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reshard_after_forward": 3}, r"reshard_after_forward=3 for '\(root\)' \(rank 0\) .* the 4 that share"),
        ({"policy": lambda m: isinstance(m, Block) and {"reshard_after_forward": 8}}, "=8 for 'blocks.0'"),
        ({"policy": lambda m: isinstance(m, Block) and {"reshard_after_forward": 0}}, "'blocks.0' by 0"),
    ],
)
def test_a_number_that_does_not_divide_the_ranks_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sharded(seeded(Net), **settings)
