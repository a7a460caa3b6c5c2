"""The learning rate of each step."""

from __future__ import annotations

import math

import torch
from settings import Schedule


def rate(step: int, steps: int, schedule: Schedule) -> float:
    """The share of the highest rate with which step ``step`` of ``steps``, counted from 0, is taken.

    A linear rise over the warm-up, then by ``schedule.shape``: a cosine down to ``final``; flat, and over the last
    ``cooldown`` a line down to ``final`` (warm-up, stable, decay: "wsd"); or flat.
    """
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.shape == "cosine":
        done = (step - schedule.warmup) / max(1, steps - schedule.warmup)
        return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if schedule.shape == "wsd":
        cooldown = max(1, round(schedule.cooldown * steps))
        left = max(0, steps - step) / cooldown
        return schedule.final + (1 - schedule.final) * min(1.0, left)
    return 1.0


def make_scheduler(
    optimizer: torch.optim.Optimizer, lr: float, steps: int, schedule: Schedule, done: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """What sets the rate of step ``done`` now, and of the next one at each ``step()``.

    It needs no state of its own in a checkpoint: the rate follows from the step's number.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = lr
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps, schedule), last_epoch=done - 1)
