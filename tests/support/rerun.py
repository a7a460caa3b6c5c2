"""Captured steps without CUDA: in the place of the graph stands a recording that runs the step again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import polyshard
import torch
from parity import Block, Net, Training, draw, seeded, train_reference, units_of
from polyshard import CapturedStep, CaptureMode
from polyshard.capture.graph import Capturer, Recording
from polyshard.interfaces import CollectivesCapabilities, PluginContext
from polyshard.nested import iter_tensors
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from torch import nn

T = TypeVar("T")


class Recordable(ThreadedCollectives):
    """Threads that say that a graph could hold their operations."""

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return replace(super().capabilities, capturable=True)


class _Rerun(Recording[T]):
    def __init__(self, step: Callable[[], T]) -> None:
        self._step = step
        self._outputs: T | None = None

    def replay(self) -> T:
        outputs = self._step()
        if self._outputs is None:
            self._outputs = outputs
        for static, tensor in zip(iter_tensors(self._outputs), iter_tensors(outputs), strict=True):
            static.copy_(tensor)
        return self._outputs

    def close(self) -> None:
        pass


class Rerun(Capturer):
    """Replays by running the step again."""

    def __init__(self) -> None:
        pass

    def warm_up(self, step: Callable[[], T]) -> T:
        return step()

    def record(self, step: Callable[[], T]) -> Recording[T]:
        return _Rerun(step)


class Rerunning(CapturedStep[Any, Any]):
    """With ``Rerun`` in the place of the CUDA graph."""

    def _make_capturer(self) -> Capturer:
        return Rerun()


def on_thread(model: nn.Module, rank: int, world: ThreadedWorld, **settings: Any) -> nn.Module:
    """A copy of ``model``, sharded over recordable threads."""
    with world.lock:
        mine = copy.deepcopy(model)
    collectives = Recordable(PluginContext("threaded", torch.device("cpu")), world, rank)
    settings = {"policy": units_of(Block), **settings}
    return polyshard.shard(mine, polyshard.ShardConfig(collectives=collectives, **settings))


def alone(**settings: Any) -> nn.Module:
    """One rank of a pretended world of 4 whose collectives a graph could hold."""
    config = {"policy": units_of(Block), **settings}
    return polyshard.shard(seeded(Net), polyshard.ShardConfig(collectives=Pretended(), **config))


class Pretended(FakeCollectives):
    """A rank of 4, which says that a graph could hold its operations. Of each parameter it has a row."""

    def __init__(self) -> None:
        super().__init__(PluginContext("pretended", torch.device("cpu")), 0, 4)

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return replace(super().capabilities, capturable=True)


def momentum(model: nn.Module) -> torch.optim.SGD:
    """SGD with state: its momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """A training step of the mean square; other arguments are taken and ignored."""

    def train_step(x: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def reference(turns: int, ranks: int = 2) -> Training:
    """Training of the unsharded model on the batches of ``turns``."""

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = model(draw(4, 3, turn=turn, rank=rank)).square().mean()
        loss.backward()
        return [loss.detach()]

    return train_reference(seeded(Net), step, ranks, turns, momentum)


def captured(fallback: str = "refuse", **options: Any) -> tuple[nn.Module, torch.optim.SGD, CapturedStep[Any, Any]]:
    """A model on one rank, its optimizer and its step, after two eager calls and one that captured."""
    model = alone()
    optimizer = momentum(model)
    step = Rerunning(model, optimizer, stepping(model, optimizer), warmup=2, fallback=fallback)
    for turn in range(3):
        step(draw(4, 3, turn=turn), **options)
    assert step.mode is CaptureMode.CAPTURED
    return model, optimizer, step
