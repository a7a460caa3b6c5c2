"""Gradients of small units are reduced together: by how many communications, and that no number changes."""

from __future__ import annotations

import copy
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, fake, on_ranks, root_of, seeded, sharded_copy, square_step, units_of, whole_of
from polyshard.errors import CollectiveError
from polyshard.interfaces import Collectives
from polyshard.planning.groups import UnitRanks
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
#: Bytes of a block's gradients in fp64, padding included, for up to four ranks.
BLOCK_NBYTES = 8 * 4 * (2 * 5 + 2 + 2 * 7)
LINEARS = {"policy": units_of(nn.Linear)}


def small(count: int) -> list[int]:
    """Widths of layers whose gradients take 1 KiB each."""
    return [16] * count


def layers(widths: list[int]) -> nn.Module:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for width in widths)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x.new_ones(layer.in_features)).sum()
            return x

    return Layers()


def second_step(widths: list[int], **config: Any) -> FakeCollectives:
    """Collectives of four ranks that have what a second step issued."""
    collectives = fake()
    model = polyshard.shard(layers(widths), polyshard.ShardConfig(collectives=collectives, **LINEARS, **config))
    for _ in range(2):
        collectives.calls.clear()
        collectives.reduction_batches.clear()
        model(torch.ones(())).backward()
    return collectives


def reductions(widths: list[int], **config: Any) -> list[int]:
    """Elements that a rank of four keeps of each reduction of a second step, in order."""
    calls = second_step(widths, **config).calls
    return [call.numel // 4 for call in calls if call.operation == "reduce_scatter"]


def launches(widths: list[int], **config: Any) -> list[int]:
    """How many reductions each launch of several had in a second step, in order."""
    return list(second_step(widths, **config).reduction_batches)


@pytest.mark.parametrize(
    ("limit", "together"),
    [
        # A unit joins where four of its size fit.
        (4 * 1024 - 1, [1] * 24),
        (4 * 1024, [4] * 6),
        (5 * 1024, [5, 5, 5, 5, 4]),
        ("16 MiB", [24]),
        (0, [1] * 24),
    ],
)
def test_twenty_four_small_units_take_as_few_reductions_as_fit(limit: int | str, together: list[int]) -> None:
    # By itself a unit keeps 16 * 16 / 4 elements a rank; in a bucket places begin at multiples of 128.
    expected = [128 * count if count > 1 else 64 for count in together]
    assert reductions(small(24), batch_nbytes=limit) == expected


def test_a_large_unit_waits_for_none_and_lets_none_wait() -> None:
    # In backward: two small ones, the large one, three small ones. 64 * 64 * 4 bytes are more than a quarter.
    assert reductions([16, 16, 16, 64, 16, 16], batch_nbytes=32 * 1024) == [2 * 128, 64 * 64 // 4, 3 * 128]


@pytest.mark.slow
def test_by_default_units_of_4_mib_share_a_bucket_and_larger_ones_do_not() -> None:
    widths = [1024] * 5 + [1088]
    assert reductions(widths) == [1088 * 1088 // 4, 4 * 1024 * 1024 // 4, 1024 * 1024 // 4]


@pytest.mark.parametrize(
    ("limit", "together"),
    [
        # A unit joins where two of its size fit, and is merged where four do.
        (2 * 1024 - 1, []),
        (2 * 1024, [2] * 12),
        (3 * 1024, [3] * 8),
        (4 * 1024 - 1, [3] * 8),
        (4 * 1024, []),
    ],
)
def test_twenty_four_medium_units_take_as_few_launches_as_fit(limit: int, together: list[int]) -> None:
    assert launches(small(24), batch_nbytes=limit) == together


def test_launches_of_medium_units_are_in_the_order_of_backward() -> None:
    # Alone, merged in twos, and, from 4 KiB on, three in a launch. Each kind waits for its own alone.
    widths = [64, 32, 32, 16, 16, 32, 32, 32, 32, 64]
    assert reductions(widths, batch_nbytes=12 * 1024) == [1024, *[256] * 4, 2 * 128, *[256] * 2, 1024]
    assert launches(widths, batch_nbytes=12 * 1024) == [3, 2]


@pytest.mark.slow
def test_by_default_units_of_up_to_32_mib_share_a_launch_of_128_mib() -> None:
    # 25, 32 and 33 MiB.
    assert launches([2560] * 3 + [2896] * 3 + [2944] * 2) == [4, 2]


def in_turns(model: nn.Module, other: Collectives) -> nn.Module:
    """Let every other unit of ``model`` communicate in ``other``, as experts do beside dense layers."""
    units = root_of(model).units
    for unit in units[1::2]:
        unit.use_ranks(UnitRanks.over(unit.ranks.world, other, None))
    return model


@pytest.mark.parametrize(
    ("limit", "launches", "kib"),
    # As many launches for each group's twelve as they take by themselves. The report counts a bucket of each group, one
    # more that travels, and the copy of one: nothing waits where each unit goes by itself.
    [("16 MiB", [1, 1], 12 + 12 + 24), (4 * 1024, [3, 3], 4 + 4 + 4 + 8), (0, [12, 12], 2)],
)
def test_units_of_two_groups_in_turns_share_buckets_with_their_own(
    limit: int | str, launches: list[int], kib: int
) -> None:
    collectives = fake()
    other = collectives.partition([[0, 1, 2, 3]])
    config = polyshard.ShardConfig(collectives=collectives, batch_nbytes=limit, **LINEARS)
    model = in_turns(polyshard.shard(layers(small(24)), config), other)
    for _ in range(2):
        collectives.calls.clear()
        other.calls.clear()
        model(torch.ones(())).backward()
    calls = [[call.operation for call in each.calls] for each in (collectives, other)]
    assert [each.count("reduce_scatter") for each in calls] == launches
    assert polyshard.report(model).reduction_nbytes == kib * 1024


@pytest.mark.slow
def test_launches_follow_what_is_the_same_on_all_ranks_and_memory_what_this_rank_has() -> None:
    counts, reports = [], []
    for factor, limit in ((1, 4 * 1024), (2, 8 * 1024)):
        collectives = fake()
        config = polyshard.ShardConfig(collectives=collectives, batch_nbytes=limit, **LINEARS)
        model = polyshard.shard(layers(small(24)), config)
        for unit in root_of(model).units:
            # As of a rank whose parts are half as large as the largest.
            unit.launch_numel *= factor
        for _ in range(2):
            collectives.calls.clear()
            model(torch.ones(())).backward()
        counts.append([(call.operation, call.numel) for call in collectives.calls])
        reports.append(polyshard.report(model).reduction_nbytes)
    assert counts[0] == counts[1]
    assert [numel for operation, numel in counts[1] if operation == "reduce_scatter"] == [4 * 4 * 128] * 6
    # Two buckets of four, and the copy in which one travels.
    assert reports == [(4 + 4 + 8) * 1024] * 2


def assert_mean_gradients(shards: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    """The ranks' gradient shards, one after the other, are the mean of ``wanted``, an unsharded model's a rank."""
    for name in wanted[0]:
        mean = torch.stack([each[name] for each in wanted]).mean(0)
        got = whole_of(mean, [shard[name] for shard in shards])
        torch.testing.assert_close(got, mean, rtol=1e-12, atol=1e-12)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def after_turn_2(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """By rank: the gradients of an unsharded copy of ``model``."""
    twins = [copy.deepcopy(model) for _ in range(2)]
    for rank, twin in enumerate(twins):
        square_step(twin, 2, rank)
    return [gradients(twin) for twin in twins]


@pytest.mark.parametrize("limit", [3 * BLOCK_NBYTES, "16 MiB"], ids=["grouped", "merged"])
@pytest.mark.parametrize("issued", [False, True], ids=["at once", "at its end"])
def test_after_a_reduction_that_failed_training_goes_on(
    limit: int | str, issued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(lambda: Net(6))
    whole = ThreadedCollectives.reduce_scatter

    class Broken:
        def wait(self) -> None:
            raise CollectiveError("told to")

    def broken(self: ThreadedCollectives, *args: Any, **kwargs: Any) -> Any:
        if self.rank not in fails:
            return whole(self, *args, **kwargs)
        fails.discard(self.rank)
        if not issued:
            raise CollectiveError("told to")
        return Broken()

    fails: set[int] = set()
    monkeypatch.setattr(ThreadedCollectives, "reduce_scatter", broken)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(model, rank, world, **BLOCKS, batch_nbytes=limit)
        square_step(mine, 0, rank)
        mine.zero_grad()
        fails.add(rank)
        with pytest.raises(CollectiveError, match="told to"):
            square_step(mine, 1, rank)
        mine.zero_grad()
        square_step(mine, 2, rank)
        return gradients(mine)

    assert_mean_gradients(on_ranks(2, on_rank), after_turn_2(model))


@pytest.mark.parametrize(
    ("limit", "kib"),
    # Two inputs by themselves, or two launches of two; the gradients of a full bucket of four and of the two that are
    # left; all six in one. And a bucket's inputs, twice.
    [(0, 2), (2 * 1024, 4), (4 * 1024, 4 + 2 + 4 + 4), ("16 MiB", 6 + 6 + 6)],
)
def test_the_report_counts_buckets_and_the_copy_in_which_they_travel(limit: int | str, kib: int) -> None:
    collectives = fake()
    config = polyshard.ShardConfig(collectives=collectives, batch_nbytes=limit, **LINEARS)
    assert polyshard.report(polyshard.shard(layers(small(6)), config)).reduction_nbytes == kib * 1024
