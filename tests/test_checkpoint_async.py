"""Saves that go on in the background: what they hold, when they are there, and what a failure leaves."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import on_ranks, threaded, units_of
from plain_states import Odd, Part, adamw, differing, odd, plain_state, train
from polyshard import checkpoint
from polyshard import state as states
from polyshard.errors import CollectiveTimeoutError, ConfigError, PolyshardError, RankMismatchError
from polyshard.hookspecs import hookimpl
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.checkpoint import filesystem

Made = tuple[Odd, torch.optim.Optimizer]
FULL = states.StateOptions(form="full")


def made(rank: int, world: ThreadedWorld, **settings: Any) -> Made:
    with world.lock:
        model = odd()
    polyshard.shard(model, threaded(world, rank, policy=units_of(Part), check_ranks=False, **settings))
    return model, adamw(model)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written by threads in the background until it is set."""
    opened = threading.Event()
    write = filesystem.FileSystemWriter.write_data

    def waits(self: Any, *args: Any) -> Any:
        if threading.current_thread().name.startswith("save of"):
            opened.wait(20)
        return write(self, *args)

    monkeypatch.setattr(filesystem.FileSystemWriter, "write_data", waits)
    yield opened
    opened.set()


@pytest.mark.parametrize("settings", [{"layout": "rows"}, {"strategy": "no_shard"}, {"offload": "cpu"}], ids=str)
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
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002"}


def world_barrier(model: nn.Module) -> None:
    """All ranks are here."""
    states.get_model_state_dict(model, states.StateOptions(form="full_on_rank_0"))
