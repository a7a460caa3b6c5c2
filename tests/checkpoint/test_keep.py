"""``keep`` leaves enough to go on from: what is damaged or no number does not count."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from checkpoints import alone
from polyshard import checkpoint
from polyshard.errors import RankMismatchError
from polyshard_testing import Rank, run_ranks
from torch import nn


def sharded() -> nn.Module:
    torch.manual_seed(0)
    return alone(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))


def spoil(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        model.get_parameter("2.weight")[0, 0] = value


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in root.glob("step-*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_told_of_and_the_last_finite_one_stays(tmp_path: Path, value: float) -> None:
    model = sharded()
    checkpoint.save(tmp_path, 1, model, keep=1)
    checkpoint.save(tmp_path, 2, model, keep=1)
    spoil(model, value)
    for step in (3, 4, 5):
        with pytest.warns(UserWarning, match=r"step \d in .* are infinite or no number: '2\.weight'"):
            checkpoint.save(tmp_path, step, model, keep=1)
    assert steps(tmp_path) == [2, 5]
    spoil(model, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, 6, model, keep=1)
    assert steps(tmp_path) == [6]


def test_infinite_buffers_are_nobodys_mistake(tmp_path: Path) -> None:
    model = sharded()
    model.get_buffer("1.running_mean").fill_(-torch.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, 1, model)


def test_what_one_rank_holds_is_named_once(tmp_path: Path) -> None:
    def on_rank(rank: Rank) -> list[str]:
        with rank.lock:
            torch.manual_seed(0)
            # Of one row the second rank has none.
            model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4))
        polyshard.shard(model, polyshard.ShardConfig(collectives=rank.collectives))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if rank.rank == 1:
            with torch.no_grad():
                for parameter, state in optimizer.state.items():
                    parameter.fill_(torch.nan)
                    state["momentum_buffer"].fill_(-torch.inf)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.save(tmp_path, 1, model, optimizer)
        return [str(each.message) for each in caught if "no number" in str(each.message)]

    # Threads share what is caught; one of them warned.
    (text,) = {text for texts in run_ranks(2, on_rank) for text in texts}
    assert text.count("'1.bias'") == 1
    assert "'momentum_buffer of 1.weight'" in text
    assert "0.weight'" not in text


def test_a_damaged_checkpoint_does_not_count(tmp_path: Path) -> None:
    model = sharded()
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, model, keep=3)
    (tmp_path / "step-00000003" / "__0_0.distcp").unlink()
    checkpoint.save(tmp_path, 4, model, keep=2)
    assert steps(tmp_path) == [2, 3, 4]
    checkpoint.save(tmp_path, 5, model, keep=2)
    assert steps(tmp_path) == [4, 5]


@pytest.mark.parametrize("flat", [False, True], ids=["parameters", "flat"])
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save], ids=["save", "async_save"])
def test_state_of_the_optimizer_that_is_no_number_counts_too(
    tmp_path: Path, save: Callable[..., Any], flat: bool
) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(polyshard.flat_parameters(model) if flat else model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()

    def wait(made: Path | checkpoint.PendingSave) -> None:
        if isinstance(made, checkpoint.PendingSave):
            made.result()

    wait(save(tmp_path, 1, model, optimizer, keep=1))
    state = next(iter(optimizer.state.values()))
    before = state["exp_avg"].clone()
    # The first parameter's first element.
    state["exp_avg"].view(-1)[0] = torch.nan
    for step in (2, 3):
        with pytest.warns(UserWarning, match=rf"step {step} in .* infinite or no number: 'exp_avg of 0\.weight'\. Who"):
            wait(save(tmp_path, step, model, optimizer, keep=1))
    assert steps(tmp_path) == [1, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The parameters alone are sound.
        wait(save(tmp_path, 4, model, keep=1))
        state["exp_avg"].copy_(before)
        wait(save(tmp_path, 5, model, optimizer, keep=1))
    assert steps(tmp_path) == [5]


def test_a_warning_that_raises_does_so_on_all_ranks(tmp_path: Path) -> None:
    def on_rank(rank: Rank) -> None:
        with rank.lock:
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
        polyshard.shard(model, polyshard.ShardConfig(collectives=rank.collectives))
        with torch.no_grad():
            model.weight.fill_(torch.nan)
        # As the suite has it, warnings are errors.
        with pytest.raises(UserWarning if rank.rank == 0 else RankMismatchError, match="infinite or no number"):
            checkpoint.save(tmp_path, 1, model)

    run_ranks(2, on_rank)
    assert checkpoint.latest(tmp_path) is None
