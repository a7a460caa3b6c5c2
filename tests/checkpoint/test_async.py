"""Saves that go on in the background: what they hold, when they are there, and what a failure leaves."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from checkpoints import alone
from parity import on_ranks
from plain_states import differing, made, odd, train
from polyshard import checkpoint
from polyshard import state as states
from polyshard.checkpoint.writing import Writing
from polyshard.errors import BackgroundSaveError, CollectiveTimeoutError, ConfigError, RankMismatchError, StateError
from polyshard.hookspecs import hookimpl
from polyshard.io.memory import HostCopy
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

FULL = states.StateOptions(form="full")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written by threads in the background until it is set."""
    opened = threading.Event()
    write = Writing.write

    def waits(self: Writing) -> Any:
        if threading.current_thread().name.startswith("save of"):
            opened.wait(20)
        return write(self)

    monkeypatch.setattr(Writing, "write", waits)
    yield opened
    opened.set()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"strategy": "no_shard"}, {"offload": "cpu"}], ids=str)
def test_what_was_saved_is_the_state_at_the_call(
    settings: dict[str, Any], tmp_path: Path, gate: threading.Event
) -> None:
    def body(rank: int, world: ThreadedWorld) -> list[Any]:
        model, optimizer = made(rank, world, **settings)
        train(model, optimizer, 2)
        at_the_call = states.get_state_dict(model, optimizer, FULL)
        pending = checkpoint.async_save(tmp_path, 2, model, optimizer, extra={"epoch": 3})
        train(model, optimizer, 2, first=2)
        assert not pending.done()
        with pytest.raises(CollectiveTimeoutError, match="has not ended yet"):
            pending.result(timeout=0)
        assert checkpoint.latest(tmp_path) is None
        world_barrier(model)
        gate.set()
        assert pending.result(timeout=20) == tmp_path / "step-00000002"
        assert pending.done()
        later = states.get_state_dict(model, optimizer, FULL)
        assert checkpoint.load(tmp_path / "step-00000002", model, optimizer) == {"epoch": 3}
        return [at_the_call, later, states.get_state_dict(model, optimizer, FULL)]

    for before, later, loaded in on_ranks(2, body):
        assert differing(before, later)
        assert not differing(before, loaded)
    assert {path.name for path in tmp_path.iterdir()} == {".job-lock", "step-00000002"}


def world_barrier(model: nn.Module) -> None:
    """All ranks are here."""
    states.get_model_state_dict(model, states.StateOptions(form="full_on_rank_0"))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Threads in the background that find the disk full: ``{"0"}`` for that of rank 0."""
    ranks: set[str] = set()
    write = Writing.write

    def fails(self: Writing) -> Any:
        thread = threading.current_thread().name
        if thread.startswith("save of") and self.file.split("_")[2] in ranks:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self)

    monkeypatch.setattr(Writing, "write", fails)
    return ranks


def save_next(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.save(root, 2, model, optimizer)


def save_next_in_background(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.async_save(root, 2, model, optimizer)


def load_next(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.load(root / "step-00000000", model, optimizer)


def close_next(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    polyshard.close(model)


@pytest.mark.parametrize("full_on", [0, 1])
@pytest.mark.parametrize("call", [save_next, save_next_in_background, load_next, close_next])
def test_a_failure_that_nobody_asked_for_is_raised_alike_on_all_ranks_by_the_next_call(
    full_on: int, call: Callable[..., None], tmp_path: Path, failing: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And logged at once, on each."""

    def body(rank: int, world: ThreadedWorld) -> str:
        model, optimizer = made(rank, world)
        checkpoint.save(tmp_path, 0, model, optimizer)
        failing.add(str(full_on))
        pending = checkpoint.async_save(tmp_path, 1, model, optimizer)
        before = states.get_state_dict(model, optimizer, FULL)
        with pytest.raises(BackgroundSaveError) as told:
            call(tmp_path, model, optimizer)
        assert isinstance(told.value.__cause__, OSError if rank == full_on else RankMismatchError)
        with pytest.raises(OSError if rank == full_on else RankMismatchError, match="No space left on device"):
            pending.result()
        failing.clear()
        if call is close_next:
            with pytest.raises(StateError, match=r"came after polyshard\.close"):
                checkpoint.save(tmp_path, 3, model, optimizer)
        else:
            assert not differing(before, states.get_state_dict(model, optimizer, FULL))
            assert checkpoint.save(tmp_path, 2, model, optimizer).name == "step-00000002"
            # It is told once.
            polyshard.close(model)
        return str(told.value)

    texts = on_ranks(2, body)
    what = f"The save of {tmp_path / 'step-00000001'} in the background failed:\n  rank {full_on}: OSError: [Errno 28]"
    then = "The model is closed all the same." if call is close_next else "This call was not begun: call it again."
    assert all(text.startswith(what) and then in text for text in texts)
    logged = sorted(record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert [f"in the background failed on rank {rank}: " in text for rank, text in enumerate(logged)] == [True] * 2
    assert all("No space left on device" in text for text in logged)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".job-lock", "step-00000000"} | (set() if call is close_next else {"step-00000002"})


def test_the_copy_of_the_state_is_let_go_of_though_the_failure_is_kept(tmp_path: Path, failing: set[str]) -> None:
    failing.add("0")
    model = alone()
    pending = checkpoint.async_save(tmp_path, 1, model)
    with pytest.raises(OSError, match="No space left on device"):
        pending.result(20)
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, HostCopy)]
    del pending


#: Saves in the background where files may have 8 KiB at most, and ends without asking what came of it.
LAST_SAVE = """
import logging, resource, signal, sys, polyshard
from polyshard import checkpoint
from torch import nn
if sys.argv[2] == "silent":
    logging.disable(logging.CRITICAL)
model = polyshard.shard(nn.Linear(300, 300), polyshard.ShardConfig(collectives="fake", strategy="no_shard"))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
pending = checkpoint.async_save(sys.argv[1], 1, model)
if sys.argv[2] == "asked":
    try:
        pending.result()
    except OSError:
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["silent", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("plain", "asked"))]
)
def test_a_program_that_ends_behind_a_save_that_fails_says_so(tmp_path: Path, way: str) -> None:
    command = [sys.executable, "-c", LAST_SAVE, str(tmp_path), way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    what = f"The save of {tmp_path / 'step-00000001'} in the background failed on rank 0: OSError: [Errno 27] File too"
    lines = [line for line in ended.stderr.splitlines() if what in line]
    at_exit = [line for line in lines if line.startswith("polyshard: ") and "ended without asking" in line]
    # Python's own handler of what nobody configured writes to the same place.
    assert (len(lines), len(at_exit)) == {"plain": (2, 1), "silent": (1, 1), "asked": (1, 0)}[way]
    assert "Traceback" not in ended.stderr
    assert checkpoint.latest(tmp_path) is None


def test_a_program_may_go_elsewhere_while_a_relative_folder_is_written(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = alone()
    pending = checkpoint.async_save(Path("run"), 1, model)
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.set()
    # Longer than the system can wait for.
    assert pending.result(1e11) == Path("run") / "step-00000001"
    checkpoint.verify(tmp_path / "run" / "step-00000001")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_save_waits_for_the_one_before_and_keep_counts_both(tmp_path: Path) -> None:
    def body(rank: int, world: ThreadedWorld) -> list[str]:
        model, optimizer = made(rank, world)
        first = checkpoint.async_save(tmp_path, 1, model, optimizer, keep=2)
        second = checkpoint.async_save(tmp_path, 2, model, optimizer, keep=2)
        assert first.done()
        third = checkpoint.async_save(tmp_path, 3, model, optimizer, keep=2)
        assert [each.result(20).name for each in (second, third)] == ["step-00000002", "step-00000003"]
        with pytest.raises((ConfigError, RankMismatchError), match="step-00000003 is committed already"):
            checkpoint.async_save(tmp_path, 3, model, optimizer)
        with pytest.raises((ConfigError, RankMismatchError), match="step is -1, and must be 0 or more"):
            checkpoint.async_save(tmp_path, -1, model, optimizer)
        return [path.name for path in sorted(tmp_path.iterdir()) if path.name != ".job-lock"]

    assert on_ranks(2, body) == [["step-00000002", "step-00000003"]] * 2


def test_another_job_that_commits_meanwhile_is_told_of(tmp_path: Path, gate: threading.Event) -> None:
    config = polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2})
    model, other = (polyshard.shard(odd(), config) for _ in range(2))
    pending = checkpoint.async_save(tmp_path, 1, model)
    checkpoint.save(tmp_path, 2, other)
    gate.set()
    with pytest.raises(ConfigError, match="Another job has committed"):
        pending.result(20)
    assert {path.name for path in tmp_path.iterdir()} == {".job-lock", "step-00000002"}


class Heard:
    """A listener."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    @hookimpl
    def on_save(self, path: Path) -> None:
        self.saved.append(path.name)


def test_listeners_hear_of_a_checkpoint_when_it_is_there(tmp_path: Path, gate: threading.Event) -> None:
    heard = Heard()
    config = polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}, listeners=[heard])
    model = polyshard.shard(odd(), config)
    pending = checkpoint.async_save(tmp_path, 1, model)
    assert heard.saved == []
    gate.set()
    pending.result()
    pending.result()
    assert heard.saved == ["step-00000001"]
    checkpoint.async_save(tmp_path, 2, model)
    checkpoint.save(tmp_path, 3, model)
    assert heard.saved == ["step-00000001", "step-00000002", "step-00000003"]
