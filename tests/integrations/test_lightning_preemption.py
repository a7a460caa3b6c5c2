"""A signal that one rank of Lightning's got alone ends all of them, with a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning_ranks import BATCH, CONFIG, Pairs, Regression, lightnings_warnings, on_ranks, trainer
from polyshard.errors import ConfigError
from polyshard_lightning import PolyshardStrategy, PreemptionCallback
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

#: Ranks import Lightning.
pytestmark = pytest.mark.slow

BATCHES = 6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with lightnings_warnings():
        yield


class Signalled(lightning.Callback):
    """Rank 1 alone is told to end, in one batch of the second epoch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, trainer.current_epoch, batch_idx) == (1, 1, self.batch):
            os.kill(os.getpid(), signal.SIGTERM)


def batches(shuffles: bool = False, epoch: int = 0) -> StatefulDataLoader:
    """Of this rank, which it goes on with in the middle of an epoch."""
    pairs = Pairs(BATCHES * BATCH * 2, torch.float64)
    # A loader without a generator of its own draws from the one of the dropout, whenever it begins.
    own = torch.Generator()
    sampler = DistributedSampler(pairs, shuffle=shuffles)
    sampler.set_epoch(epoch)
    return StatefulDataLoader(pairs, batch_size=BATCH, sampler=sampler, generator=own)


class Shuffled(Regression):
    """Sees data in another order in each epoch."""

    def train_dataloader(self) -> StatefulDataLoader:
        return batches(shuffles=True, epoch=self.trainer.fit_loop.epoch_progress.current.processed)


def preempt_and_resume(rank: int, folder: str, form: str, accumulates: int, told: int) -> dict[str, Any]:
    settings = {"max_epochs": 3, "accumulate_grad_batches": accumulates}
    strategy = PolyshardStrategy(CONFIG, state_dict_type=form)
    before = signal.getsignal(signal.SIGTERM)
    torch.manual_seed(rank)
    straight = Shuffled(dropout=0.5)
    trainer(folder, strategy, **settings).fit(straight)

    torch.manual_seed(rank)
    stopped = Shuffled(dropout=0.5)
    callbacks = [Signalled(told), PreemptionCallback(folder)]
    strategy = PolyshardStrategy(CONFIG, state_dict_type=form)
    with pytest.raises(SystemExit) as ended:
        trainer(folder, strategy, callbacks=callbacks, **settings).fit(stopped)
    put_back = signal.getsignal(signal.SIGTERM) == before

    torch.manual_seed(99)
    resumed = Shuffled(dropout=0.5)
    newest = PreemptionCallback.newest(folder)
    strategy = PolyshardStrategy(CONFIG, state_dict_type=form)
    again = trainer(folder, strategy, callbacks=[PreemptionCallback(folder)], **settings)
    again.fit(resumed, ckpt_path=newest)
    return {
        "code": ended.value.code,
        "put back": put_back and signal.getsignal(signal.SIGTERM) == before,
        "newest": newest,
        "straight": straight.losses,
        "stopped": stopped.losses,
        "resumed": resumed.losses,
    }


@pytest.mark.parametrize(
    ("form", "accumulates", "told", "last"),
    [
        pytest.param("sharded", 1, 2, 10, marks=pytest.mark.nightly),
        ("full", 1, 2, 10),
        # Of three batches a step: signalled behind the ninth batch in all, told behind the twelfth.
        pytest.param("sharded", 3, 2, 12, marks=pytest.mark.nightly),
        # Told behind an epoch.
        ("sharded", 1, 4, 12),
    ],
)
def test_a_signal_of_one_rank_ends_all_with_a_checkpoint_to_go_on_from(
    tmp_path: Path, form: str, accumulates: int, told: int, last: int
) -> None:
    assert PreemptionCallback.newest(tmp_path) is None
    for found in on_ranks(preempt_and_resume, str(tmp_path), form, accumulates, told):
        assert found["code"] == 75
        assert found["put back"]
        assert found["newest"] == str(tmp_path / f"preempted-step={last // accumulates:08d}.ckpt")
        assert len(found["straight"]) == 3 * BATCHES
        assert found["stopped"] == found["straight"][:last]
        assert found["resumed"] == found["straight"][last:]


class SignalledTwice(lightning.Callback):
    """Rank 1 alone is told to end in the validation ahead of training, and again in the first batch."""

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._tell(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            # Within a second signals are one request.
            time.sleep(1.1 if trainer.global_rank == 1 else 0.0)
            self._tell(trainer)

    def _tell(self, trainer: Any) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def signal_twice(rank: int, folder: str) -> dict[str, Any]:
    heard: list[int] = []
    module = Regression()
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        runs = trainer(folder, callbacks=[SignalledTwice(), PreemptionCallback(folder)], max_epochs=1)
        with pytest.raises(SystemExit) as ended:
            runs.fit(module, batches(), batches())
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    newest = PreemptionCallback.newest(folder)
    return {"code": ended.value.code, "heard": heard, "newest": newest, "steps": len(module.losses)}


def test_a_second_signal_goes_to_who_took_them_before_fit(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(signal_twice, str(tmp_path))):
        # One more each behind fit: who took them before does so again.
        assert found["heard"] == [signal.SIGTERM] * (1 + rank)
        assert found["code"] == 75
        assert found["newest"] == str(tmp_path / "preempted-step=00000002.ckpt")
        assert found["steps"] == 2


def refuse(rank: int, folder: str) -> list[float]:
    """An exchange at every 0-th step is refused when training begins, and the module trains all the same."""
    with pytest.raises(ConfigError, match="every must be a number of calls, 1 or more, not 0"):
        trainer(folder, callbacks=[PreemptionCallback(folder, every=0)], max_epochs=1).fit(Regression(), batches())
    module = Regression()
    trainer(folder, callbacks=[PreemptionCallback(folder, signals=())], max_epochs=1).fit(module, batches())
    return module.losses


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    for losses in on_ranks(refuse, str(tmp_path)):
        assert len(losses) == BATCHES
