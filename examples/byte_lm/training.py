"""The training loop: everything at a step follows from the settings and the step's number."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import polyshard
import torch
from data import Batches, Corpus
from history import History
from model import build_model, part_of_mean_loss
from polyshard.errors import ConfigError
from progress import Progress
from ranks import Ranks
from settings import RunSettings, Settings
from torch import nn

#: The learning rate ends at this part of its highest value.
_FINAL_RATE = 0.1


def rate_at(step: int, run: RunSettings) -> float:
    """The learning rate of ``step``, counted from 0: a linear rise, then a cosine."""
    if step < run.warmup:
        return run.lr * (step + 1) / run.warmup
    done = (step - run.warmup) / max(1, run.steps - run.warmup)
    return run.lr * (_FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: nn.Module, run: RunSettings) -> torch.optim.AdamW:
    """AdamW over ``model``, whole or sharded."""
    return torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=run.weight_decay)


def loss_of(model: nn.Module, batches: Batches, step: int, ranks: Ranks) -> torch.Tensor:
    """This rank's part of the loss on the batch of ``step``; the mean over ranks is that of the whole batch."""
    inputs, targets = batches.part(step, rank=ranks.rank, world_size=ranks.world_size)
    return part_of_mean_loss(
        model,
        inputs.to(ranks.device),
        targets.to(ranks.device),
        sequences=batches.batch,
        world_size=ranks.world_size,
    )


def backward(model: nn.Module, batches: Batches, step: int, ranks: Ranks) -> torch.Tensor:
    """Compute the gradients of the batch of ``step``; returns the loss as ``loss_of``."""
    loss = loss_of(model, batches, step, ranks)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def set_rate(optimizer: torch.optim.Optimizer, step: int, run: RunSettings) -> None:
    """Let the next update be that of ``step``."""
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step, run)


def update(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer use the gradients that there are, and drop them."""
    optimizer.step()
    optimizer.zero_grad()


def global_batch(run: RunSettings, ranks: Ranks) -> int:
    """Sequences of all ranks together. Raises ``ConfigError`` where some rank would have none."""
    if not ranks.communicates:
        return max(run.batch, ranks.world_size)
    if run.batch < ranks.world_size:
        raise ConfigError(f"run.batch is {run.batch}, fewer than the {ranks.world_size} ranks. Give each at least one.")
    return run.batch


class Training:
    """A sharded model with what trains it."""

    def __init__(self, settings: Settings, ranks: Ranks, corpus: Corpus) -> None:
        run = settings.run
        self.run = run
        self.ranks = ranks
        self.history = History()
        self.batch = global_batch(run, ranks)
        self._train = Batches(corpus.train, run.context, self.batch, run.seed)
        # Another seed: the same offsets in both texts would do no harm, but would look like a mistake.
        self._held_out = Batches(corpus.held_out, run.context, self.batch, run.seed + 1)
        self.model = polyshard.shard(build_model(run), dataclasses.replace(settings.shard, device=ranks.device))
        self.optimizer = make_optimizer(self.model, run)
        # One CUDA graph from the fourth step on, where the device records them.
        self._step = polyshard.CapturedStep(self.model, self.optimizer, self._train_step)

    def step(self, step: int) -> torch.Tensor:
        """Train on the batch of ``step``; returns this rank's part of the loss."""
        # Here and not inside: a graph runs no Python.
        set_rate(self.optimizer, step, self.run)
        inputs, targets = self._train.part(step, rank=self.ranks.rank, world_size=self.ranks.world_size)
        # Every step returns the same memory.
        return self._step(inputs, targets).clone()

    def _train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        world_size = self.ranks.world_size
        loss = part_of_mean_loss(self.model, inputs, targets, sequences=self.batch, world_size=world_size)
        loss.backward()  # type: ignore[no-untyped-call]
        polyshard.clip_grad_norm_(self.model, self.run.clip)
        update(self.optimizer)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on the same held-out sequences each time."""
        self.model.eval()
        losses = [loss_of(self.model, self._held_out, index, self.ranks) for index in range(self.run.eval_batches)]
        self.model.train()
        return sum(self.ranks.average(losses)) / len(losses)

    def train(
        self,
        first: int,
        last: int,
        progress: Progress,
        save: Callable[[int], None],
        preemption: polyshard.Preemption,
    ) -> int:
        """Steps ``first`` to ``last - 1``; ``save`` is called with the steps done wherever a checkpoint is due.

        Returns how many steps are done: fewer than ``last`` where ``preemption`` asked for an end.
        """
        run = self.run
        waiting: list[torch.Tensor] = []
        if first == 0:
            self._record_held_out(0, progress)
        began = time.perf_counter()
        for step in range(first, last):
            waiting.append(self.step(step))
            done = step + 1
            # Between this answer and the end of the process there are no steps that could be lost.
            ends = preemption.requested() or done == last
            evaluates = done % run.eval_every == 0 or done == run.steps
            saves = done % run.checkpoint_every == 0 or ends
            if not (ends or evaluates or saves or done % run.report_every == 0):
                continue
            # Losses are read here only: each reading waits for the device, and for the other ranks.
            self.history.train += self.ranks.average(waiting)
            seconds = time.perf_counter() - began
            speed = len(waiting) * self.batch * run.context / seconds
            progress.trained(done, self.history.train[-1], speed)
            waiting.clear()
            if evaluates:
                self._record_held_out(done, progress)
            if saves:
                save(done)
            if ends:
                return done
            began = time.perf_counter()
        return last

    def _record_held_out(self, done: int, progress: Progress) -> None:
        loss = self.evaluate()
        self.history.held_out.append((done, loss))
        progress.held_out(done, loss)
