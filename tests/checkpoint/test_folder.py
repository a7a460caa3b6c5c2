"""Which of a folder's checkpoints count, whatever several jobs, interruptions and steps back have left in it."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import checkpoints
import polyshard
import pytest
import torch
from checkpoints import remark
from parity import Block, Net, on_ranks, seeded, threaded, units_of
from polyshard import checkpoint
from polyshard.errors import ConfigError, RankMismatchError, StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn


def filled(value: float) -> nn.Module:
    """A model whose every element is ``value``."""
    model = seeded(Net)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def alone(value: float = 0.0) -> nn.Module:
    """The same, on one rank."""
    return checkpoints.alone(filled(value))


def value_of(directory: Path | None) -> set[float]:
    """The values of the model in ``directory``."""
    assert directory is not None
    model = alone(-1.0)
    checkpoint.load(directory, model)
    return {float(element) for parameter in model.parameters() for element in parameter.detach().flatten()}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".job-lock")


def change(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_a_second_job_in_the_folder_is_noticed_at_the_next_save(tmp_path: Path) -> None:
    one, other = alone(1.0), alone(2.0)
    checkpoint.save(tmp_path, 1, one)
    checkpoint.save(tmp_path, 2, other)
    with pytest.raises(
        ConfigError, match=r"Another job has committed .*step-00000002 since this one .*folder of its own"
    ):
        checkpoint.save(tmp_path, 3, one)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    checkpoint.load(newest, one)
    assert value_of(checkpoint.save(tmp_path, 3, one)) == {2.0}


def line_of_three(root: Path) -> nn.Module:
    """Steps 100, 200 and 300 of one run, each of whose elements are the step."""
    model = alone()
    for step in (100, 200, 300):
        change(model, float(step))
        checkpoint.save(root, step, model)
    return model


@pytest.mark.slow
def test_a_run_taken_up_at_an_earlier_step_goes_on_from_there(tmp_path: Path) -> None:
    line_of_three(tmp_path)
    model = alone()
    checkpoint.load(tmp_path / "step-00000100", model)
    change(model, 150.0)
    assert checkpoint.save(tmp_path, 150, model) == tmp_path / "step-00000150"
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000150"
    # Steps that were there already are another run's future: they stay as they are.
    change(model, 201.0)
    assert checkpoint.save(tmp_path, 200, model) == tmp_path / "step-00000200.2"
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000200.2"
    assert value_of(tmp_path / "step-00000200") == {200.0}
    assert value_of(checkpoint.latest(tmp_path)) == {201.0}
    with pytest.raises(ConfigError, match=r"step-00000200\.2 is committed already"):
        checkpoint.save(tmp_path, 200, model)


def test_keep_counts_what_the_run_goes_back_to(tmp_path: Path) -> None:
    line_of_three(tmp_path)
    model = alone()
    checkpoint.load(tmp_path / "step-00000200", model)
    checkpoint.save(tmp_path, 250, model, keep=2)
    # 300 is no part of this run; 200 and 250 are its last two.
    assert names(tmp_path) == ["step-00000200", "step-00000250", "step-00000300"]
    checkpoint.save(tmp_path, 260, model, keep=2)
    assert names(tmp_path) == ["step-00000250", "step-00000260", "step-00000300"]


def test_keep_leaves_links_and_what_they_lead_to(tmp_path: Path) -> None:
    model = alone()
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    checkpoint.save(elsewhere, 1, model)
    root.mkdir()
    (root / "step-00000001").symlink_to(elsewhere / "step-00000001")
    checkpoint.load(root / "step-00000001", model)
    for step in (2, 3, 4):
        checkpoint.save(root, step, model, keep=1)
    assert names(root) == ["step-00000001", "step-00000004"]
    assert value_of(elsewhere / "step-00000001") == {0.0}


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_refused_and_passed_over(tmp_path: Path, name: str) -> None:
    line_of_three(tmp_path)
    newest = tmp_path / "step-00000300"
    (newest / name).unlink()
    model = alone(7.0)
    with pytest.raises(StateError, match=rf"step-00000300 is damaged: '{name}'.*latest\(root"):
        checkpoint.load(newest, model)
    assert float(model.first.bias[0].detach()) == 7.0
    with pytest.warns(UserWarning, match=rf"passed over: .*step-00000300 is damaged: '{name}'"):
        good = checkpoint.latest(tmp_path)
    assert good == tmp_path / "step-00000200"
    # The run goes on from there, and comes to the step whose name is taken.
    checkpoint.load(good, model)
    change(model, 301.0)
    assert checkpoint.save(tmp_path, 300, model, keep=2) == tmp_path / "step-00000300.2"
    assert value_of(checkpoint.latest(tmp_path)) == {301.0}


def test_a_marker_behind_which_there_is_no_other_is_named_before_anything_is_committed(tmp_path: Path) -> None:
    model = line_of_three(tmp_path)
    remark(tmp_path / "step-00000300", lambda marker: marker.update(turn=(1 << 62) - 1))
    with pytest.raises(
        ConfigError, match=r"step-00000300 says that it is commit 4,611,686,018,427,387,903.* or remove it"
    ):
        checkpoint.save(tmp_path, 400, model)
    assert names(tmp_path) == [f"step-00000{step}00" for step in (1, 2, 3)]
    shutil.rmtree(tmp_path / "step-00000300")
    assert checkpoint.save(tmp_path, 400, model) == checkpoint.latest(tmp_path) == tmp_path / "step-00000400"


def test_the_fallback_stays_with_the_run(tmp_path: Path) -> None:
    line_of_three(tmp_path)
    model = alone()
    checkpoint.load(tmp_path / "step-00000100", model)
    (checkpoint.save(tmp_path, 150, model) / "__0_0.distcp").unlink()
    with pytest.warns(UserWarning, match="step-00000150 is damaged"):
        # 300 was committed later than 100, but is not what 150 goes back to.
        assert checkpoint.latest(tmp_path) == tmp_path / "step-00000100"


def test_what_an_ended_save_left_is_removed_and_what_a_running_one_writes_is_not(tmp_path: Path) -> None:
    model = line_of_three(tmp_path)
    ended, running = (tmp_path / f".unfinished-{digit * 32}" for digit in "0f")
    users = tmp_path / ".unfinished-work"
    for path in (ended, running, users):
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"half")
    lock = os.open(running, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        checkpoint.save(tmp_path, 400, model)
        assert names(tmp_path)[:2] == [running.name, users.name]
        assert len(names(tmp_path)) == 6
        assert (users / "__0_0.distcp").read_bytes() == b"half"
    finally:
        os.close(lock)


@pytest.mark.slow
def test_ranks_that_were_given_different_checkpoints_are_told(tmp_path: Path) -> None:
    line_of_three(tmp_path)

    def on_rank(rank: int, world: ThreadedWorld) -> float:
        model = polyshard.shard(filled(7.0), threaded(world, rank, policy=units_of(Block)))
        with pytest.raises(RankMismatchError, match=r"different checkpoints: .*00 on rank \d, .*00 on rank \d"):
            checkpoint.load(tmp_path / f"step-00000{rank + 1}00", model)
        with polyshard.unsharded(model):
            return float(model.first.bias[0].detach())

    assert on_ranks(2, on_rank) == [7.0, 7.0]


def test_what_has_the_name_of_a_save_stays_and_the_save_gets_a_number(tmp_path: Path) -> None:
    notes, copied, link, file = (tmp_path / f"step-{step:08d}" for step in (1, 2, 3, 4))
    for path, name in ((notes, "notes.txt"), (copied, "__0_0.distcp")):
        (path / "deep").mkdir(parents=True)
        for each in (path / name, path / "deep" / name):
            each.write_text("mine")
    link.symlink_to("nowhere")
    file.write_text("mine")

    def on_rank(rank: int, world: ThreadedWorld) -> list[Path]:
        model = polyshard.shard(filled(float(5)), threaded(world, rank, policy=units_of(Block)))
        return [checkpoint.save(tmp_path, step, model, keep=1) for step in (1, 2, 3, 4, 5)]

    made, others = on_ranks(2, on_rank)
    assert made == others == [
        *(tmp_path / f"step-{step:08d}.2" for step in (1, 2, 3, 4)), tmp_path / "step-00000005"
    ]  # fmt: skip
    assert checkpoint.latest(tmp_path) == made[-1]
    assert value_of(made[-1]) == {5.0}
    assert names(tmp_path) == [path.name for path in (notes, copied, link, file, made[-1])]
    for each in (notes / "notes.txt", notes / "deep" / "notes.txt", copied / "__0_0.distcp", file):
        assert each.read_text() == "mine"


def test_keep_leaves_what_others_put_into_a_checkpoint(tmp_path: Path) -> None:
    model = alone()
    first = checkpoint.save(tmp_path, 1, model)
    (first / "deep").mkdir()
    mine = [first / "notes.txt", first / "deep" / "__0_0.distcp", first / "__0_0.distcp.bak"]
    for path in mine:
        path.write_text("mine")
    (first / "written-by-0").symlink_to(mine[0])
    for step in (2, 3):
        checkpoint.save(tmp_path, step, model, keep=1)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert sorted(path.name for path in first.iterdir()) == ["__0_0.distcp.bak", "deep", "notes.txt", "written-by-0"]
    assert [path.read_text() for path in mine] == ["mine"] * 3
    # It is no checkpoint any more, and its step can be saved again, beside it.
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000003"
    assert checkpoint.save(tmp_path, 1, model).name == "step-00000001.2"
