"""A signal that one rank of Lightning's got alone ends all of them, with a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning_ranks import BATCH, CONFIG, Pairs, Regression, lightnings_warnings, on_ranks, trainer
from polyshard.errors import ConfigError
from polyshard.lightning import PolyshardStrategy, PreemptionCallback
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


def batches() -> StatefulDataLoader:
    """Of this rank, which it goes on with in the middle of an epoch."""
    pairs = Pairs(BATCHES * BATCH * 2, torch.float64)
    # A loader without a generator of its own draws from the one of the dropout, whenever it begins.
    own = torch.Generator()
    sampler = DistributedSampler(pairs, shuffle=False)
    return StatefulDataLoader(pairs, batch_size=BATCH, sampler=sampler, generator=own)


def preempt_and_resume(rank: int, folder: str, form: str, accumulates: int) -> dict[str, Any]:
    settings = {"max_epochs": 3, "accumulate_grad_batches": accumulates}
    strategy = PolyshardStrategy(CONFIG, state_dict_type=form)
    before = signal.getsignal(signal.SIGTERM)
    torch.manual_seed(rank)
    straight = Regression(dropout=0.5)
    trainer(folder, strategy, **settings).fit(straight, batches())

    torch.manual_seed(rank)
    stopped = Regression(dropout=0.5)
    callbacks = [Signalled(2), PreemptionCallback(folder)]
    strategy = PolyshardStrategy(CONFIG, state_dict_type=form)
    with pytest.raises(SystemExit) as ended:
        trainer(folder, strategy, callbacks=callbacks, **settings).fit(stopped, batches())
    put_back = signal.getsignal(signal.SIGTERM) == before

    torch.manual_seed(99)
    resumed = Regression(dropout=0.5)
    newest = PreemptionCallback.newest(folder)
    strategy = PolyshardStrategy(CONFIG, state_dict_type=form)
    again = trainer(folder, strategy, callbacks=[PreemptionCallback(folder)], **settings)
    again.fit(resumed, batches(), ckpt_path=newest)
    return {
        "code": ended.value.code,
        "put back": put_back and signal.getsignal(signal.SIGTERM) == before,
        "newest": newest,
        "straight": straight.losses,
        "stopped": stopped.losses,
        "resumed": resumed.losses,
    }


@pytest.mark.parametrize(("form", "accumulates", "last"), [("sharded", 1, 10), ("full", 1, 10), ("sharded", 3, 12)])
def test_a_signal_of_one_rank_ends_all_with_a_checkpoint_to_go_on_from(
    tmp_path: Path, form: str, accumulates: int, last: int
) -> None:
    # Of three batches a step: signalled behind the ninth batch in all, told behind the twelfth.
    assert PreemptionCallback.newest(tmp_path) is None
    for found in on_ranks(preempt_and_resume, str(tmp_path), form, accumulates):
        assert found["code"] == 75
        assert found["put back"]
        assert found["newest"] == str(tmp_path / f"preempted-step={last // accumulates:08d}.ckpt")
        assert len(found["straight"]) == 3 * BATCHES
        assert found["stopped"] == found["straight"][:last]
        assert found["resumed"] == found["straight"][last:]


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
