"""``polyshard.Preemption``: all ranks leave behind the same step, whichever was told; signals are put back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, adam, draw, local, on_ranks, seeded, sharded_copy, units_of
from polyshard.errors import ConfigError, StateError
from polyshard_backends.threaded import ThreadedWorld
from processes import RankPool, run_script
from torch import nn

BLOCKS: dict[str, Any] = {"policy": units_of(Block)}


def train(model: nn.Module, rank: int = 0) -> None:
    model(draw(4, 3, rank=rank)).square().mean().backward()


def alone() -> nn.Module:
    return polyshard.shard(seeded(Net), polyshard.ShardConfig(strategy="no_shard", collectives="fake"))


@contextmanager
def handled(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)


@pytest.mark.parametrize(
    ("every", "asked_before", "expected"),
    # The exchange at every third call, say, is read at the next one.
    [(1, 2, 3), (3, 2, 4), (3, 4, 7)],
)
def test_all_ranks_agree_at_the_same_call_that_one_asked(every: int, asked_before: int, expected: int) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[bool]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        answers = []
        with polyshard.Preemption(model, signals=(), every=every) as preemption:
            for call in range(1, expected + 3):
                train(model, rank)
                if (rank, call) == (1, asked_before):
                    preemption.request()
                answers.append(preemption.requested())
        return answers

    for answers in on_ranks(3, on_rank):
        assert answers == [call >= expected for call in range(1, expected + 3)]


def signal_one(rank: int) -> list[bool]:
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(timeout_s=10, **BLOCKS))
    answers = []
    before = signal.getsignal(signal.SIGTERM)
    with polyshard.Preemption(model) as preemption:
        for step in range(5):
            train(model, rank)
            if (rank, step) == (2, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(preemption.requested())
    assert signal.getsignal(signal.SIGTERM) is before
    train(model, rank)
    return answers


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_behind_the_same_step() -> None:
    with RankPool(3) as pool:
        assert pool.run(signal_one) == [[False, False, False, True, True]] * 3


def test_one_rank_alone_answers_at_once() -> None:
    model = alone()
    with polyshard.Preemption(model) as preemption:
        assert not preemption.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested()
        train(model)
        assert preemption.requested()


def test_former_handlers_are_put_back_behind_an_exception_too() -> None:
    heard: list[int] = []
    with handled(signal.SIGUSR1, lambda number, frame: heard.append(number)):

        def fail() -> None:
            with polyshard.Preemption(alone(), signals=(signal.SIGUSR1,)):
                os.kill(os.getpid(), signal.SIGUSR1)
                raise ZeroDivisionError("planned")

        with pytest.raises(ZeroDivisionError, match="planned"):
            fail()
        assert heard == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]


@pytest.mark.slow
def test_a_second_signal_counts_as_the_first_within_a_second_and_goes_to_the_former_handler_later() -> None:
    heard: list[int] = []
    with (
        handled(signal.SIGUSR1, lambda number, frame: heard.append(number)),
        polyshard.Preemption(alone(), signals=(signal.SIGUSR1,)) as preemption,
    ):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.requested()
        assert heard == []
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]


SIGNALLED = """
import os, signal, time, torch, polyshard
model = polyshard.shard(torch.nn.Linear(2, 2), polyshard.ShardConfig(strategy="no_shard", collectives="fake"))
with polyshard.Preemption(model):
    os.kill(os.getpid(), signal.SIGTERM)
    print("lives", flush=True)
    time.sleep(1.1)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still lives", flush=True)
"""


@pytest.mark.slow
def test_a_second_signal_ends_the_process_where_nothing_handled_it_before(tmp_path: Path) -> None:
    script = tmp_path / "signalled.py"
    script.write_text(SIGNALLED)
    done = run_script(0, script)
    assert done.codes == [-signal.SIGTERM], done.errors
    assert done.output == "lives\n"


def test_an_exception_comes_through_and_the_ranks_train_on() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model, other = (sharded_copy(seeded(Net), rank, world, **BLOCKS) for _ in range(2))
        optimizers = adam(model), adam(other)

        def fail_in_second_step() -> None:
            with polyshard.Preemption(model, signals=()) as preemption:
                for step in range(2):
                    train(model, rank)
                    preemption.requested()
                    assert step == 0, "planned"

        with pytest.raises(AssertionError, match="planned"):
            fail_in_second_step()
        for parameter in model.parameters():
            parameter.grad = None
        for each, optimizer in zip((model, other), optimizers, strict=True):
            train(each, rank)
            optimizer.step()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local(mine), local(theirs))

    on_ranks(2, on_rank)


def test_wrong_uses_are_refused_and_the_model_trains_on() -> None:
    model = alone()
    with pytest.raises(ConfigError, match="every must be a number of calls, 1 or more, not 0"):
        polyshard.Preemption(model, every=0)
    preemption = polyshard.Preemption(model)
    with pytest.raises(StateError, match=r"requested\(\) was called outside of 'with polyshard.Preemption\(model\)'"):
        preemption.requested()
    with preemption:
        with pytest.raises(StateError, match="A Preemption was entered twice"):
            preemption.__enter__()
        train(model)
        assert not preemption.requested()
    with pytest.raises(StateError, match="Preemption needs a sharded module"), polyshard.Preemption(nn.Linear(2, 2)):
        pass
    inner = next(each for each in model.modules() if isinstance(each, Block))
    with pytest.raises(StateError, match="Preemption needs"), polyshard.Preemption(inner):
        pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(model)


def test_handlers_are_put_back_where_one_signal_cannot_be_taken() -> None:
    model = alone()
    with pytest.raises(OSError, match="Invalid argument"):
        polyshard.Preemption(model, signals=(signal.SIGTERM, signal.SIGKILL)).__enter__()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(model)


def test_another_thread_is_refused_signals_and_may_ask_without() -> None:
    model = alone()
    found: list[Any] = []

    def elsewhere() -> None:
        try:
            with polyshard.Preemption(model):
                found.append("entered")
        except StateError as error:
            found.append(str(error))
        with polyshard.Preemption(model, signals=()) as preemption:
            preemption.request()
            found.append(preemption.requested())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "outside of the main thread, where Python takes no signals" in found[0]
    assert found[1:] == [True]
