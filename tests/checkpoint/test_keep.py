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


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in root.glob("step-*"))


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


@pytest.mark.parametrize(
    ("of", "value"),
    [("parameters", torch.nan), ("parameters", torch.inf), ("state", -torch.inf), ("state of flat ones", torch.nan)],
)
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save], ids=["save", "async_save"])
def test_what_is_no_number_is_told_of_and_the_last_finite_one_stays(
    tmp_path: Path, save: Callable[..., Any], of: str, value: float
) -> None:
    model = sharded()
    optimizer = torch.optim.Adam(polyshard.flat_parameters(model) if "flat" in of else model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()

    def saved(step: int, *held: Any) -> list[int]:
        made = save(tmp_path, step, *held, keep=1)
        if isinstance(made, checkpoint.PendingSave):
            made.result()
        return steps(tmp_path)

    assert saved(1, model, optimizer) == [1]
    assert saved(2, model, optimizer) == [2]
    broken, name = model.get_parameter("2.weight").detach(), "2.weight"
    if of != "parameters":
        # The first parameter's first element.
        broken, name = next(iter(optimizer.state.values()))["exp_avg"], "exp_avg of 0.weight"
    before = broken.clone()
    broken.view(-1)[0] = value
    for step in (3, 4, 5):
        with pytest.warns(UserWarning, match=rf"step {step} in .* are infinite or no number: '{name}'\. Who"):
            assert saved(step, model, optimizer) == [2, step]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if of != "parameters":
            # The parameters alone are sound.
            assert saved(6, model) == [6]
        broken.copy_(before)
        assert saved(7, model, optimizer) == [7]


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
