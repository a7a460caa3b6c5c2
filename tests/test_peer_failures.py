"""A rank that does not come: the others say at which communication they waited."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import polyshard
import pytest
import torch
from parity import Block, Net, draw, seeded, units_of
from polyshard.errors import CollectiveError, ConfigError, RankMismatchError
from processes import RankPool
from torch import nn


def wait_for_one(rank: int) -> tuple[float, str, str]:
    model = polyshard.shard(seeded(lambda: Net(5)), polyshard.ShardConfig(timeout_s=3, policy=units_of(Block)))
    model(draw(4, 3, rank=rank)).sum().backward()
    if rank:
        time.sleep(8)
        return 0.0, "", ""
    begun = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        model(draw(4, 3, rank=rank))
    return time.monotonic() - begun, type(caught.value).__name__, str(caught.value)


def test_a_rank_that_sleeps_is_waited_for_no_longer_than_the_limit() -> None:
    with RankPool(2) as pool:
        (took, kind, text), _ = pool.run(wait_for_one)
    assert took < 10
    assert kind == "CollectiveTimeoutError"
    assert "Rank 0 waited for its communication number " in text
    assert "all_gather of '(root)', in forward." in text


class Planned(Block):
    """Raises in its forward, or in its backward, where it is told to."""

    forward_fails = backward_fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forward_fails:
            raise ValueError("planned in forward")
        y: torch.Tensor = super().forward(x)
        if self.backward_fails and y.requires_grad:
            y.register_hook(_fail)
        return y


def _fail(gradient: torch.Tensor) -> None:
    raise ValueError("planned in backward")


def raise_on_one(rank: int, backward: bool) -> tuple[float, str, str]:
    """Rank 1's program raises in the second step and lives on; then all train on together."""
    model = polyshard.shard(
        nn.Sequential(Planned(), Planned(), Planned()), polyshard.ShardConfig(timeout_s=3, policy=units_of(Block))
    )

    def step() -> None:
        model(torch.ones(4, 5)).sum().backward()

    step()
    middle = model[1]
    assert isinstance(middle, Planned)
    if rank == 1:
        middle.forward_fails, middle.backward_fails = not backward, backward
        with pytest.raises(ValueError, match="planned in"):
            step()
        middle.forward_fails = middle.backward_fails = False
        time.sleep(6)
        told = 0.0, "", ""
    else:
        begun = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            step()
        told = time.monotonic() - begun, type(caught.value).__name__, str(caught.value)
    return told


@pytest.mark.parametrize("backward", [False, True])
def test_another_ranks_exception_is_told_with_its_traceback(backward: bool) -> None:
    with RankPool(2) as pool:
        (took, kind, text), _ = pool.run(raise_on_one, backward)
    assert took < 3 + 3
    assert kind == "PeerFailedError"
    where = "backward" if backward else "forward"
    assert f"Rank 1 raised ValueError: planned in {where} behind its communication number " in text
    assert "test_peer_failures.py" in text
    assert "Rank 0 waited for its communication number " in text


def lose_one(rank: int) -> tuple[float, str]:
    model = polyshard.shard(seeded(lambda: Net(5)), polyshard.ShardConfig(timeout_s=3, policy=units_of(Block)))
    model(draw(4, 3, rank=rank)).sum().backward()
    if rank == 2:
        time.sleep(8)
        return 0.0, ""
    begun = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        model(draw(4, 3, rank=rank))
    return time.monotonic() - begun, str(caught.value)


def test_ranks_say_where_the_others_stood_and_who_gave_no_word() -> None:
    with RankPool(3) as pool:
        first, second, _ = pool.run(lose_one)
    for (took, text), other in ((first, 1), (second, 0)):
        assert took < 3 + 3
        assert f"rank {other} waited, too, for its communication number " in text
        assert "rank 2 gave no word: stuck elsewhere, or dead. Look there first" in text
        match = re.search(r"stacks are in (\S+\.json) on", text)
        assert match is not None
        report = json.loads(Path(match[1]).read_text())
        Path(match[1]).unlink()
        assert report["rank"] == 1 - other
        assert str(other) in report["others"]
        assert [each["number"] for each in report["operations"]] == list(range(1, len(report["operations"]) + 1))
        assert any("lose_one" in line for stack in report["stacks"].values() for line in stack)


def differ_in_size(rank: int) -> str:
    """One rank's unit has another size from the third step on, which gloo would end the process for."""
    config = polyshard.ShardConfig(timeout_s=5, policy=units_of(nn.Linear), check_ranks="always", split_root=False)
    model = polyshard.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)
    small, wide = nn.Linear(4, 4), nn.Linear(4, 40)
    polyshard.shard(small, config)
    polyshard.shard(wide, config)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        small(torch.ones(2, 4)).sum().backward()
        wide(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RankMismatchError) as caught:
        (small if rank else wide)(torch.ones(2, 4)).sum().backward()
    return str(caught.value)


def test_sizes_that_differ_in_a_later_step_are_compared_where_that_is_asked_for() -> None:
    with RankPool(2) as pool:
        for text in pool.run(differ_in_size):
            assert "Ranks are about to issue different collectives" in text
            assert "elements of torch.float32" in text


@pytest.mark.parametrize("value", ["sometimes", 1, None])
def test_what_check_ranks_cannot_be_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="check_ranks must be True, False or 'always', not "):
        polyshard.ShardConfig(check_ranks=value)  # type: ignore[arg-type]
