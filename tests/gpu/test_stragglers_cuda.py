"""``polyshard.Stragglers`` finds slow devices and slow hosts. CPU twin: ``tests/diagnose/test_stragglers.py``."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import polyshard
import pytest
import torch
from processes import KeptRanks
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs ranks that wait for each other"),
]

WORLD_SIZE = 2
RANKS = KeptRanks("nccl")
SLOW_S = 0.05


class Slow(nn.Module):
    """Holds up the device, or the host."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "device":
            # At some 2 GHz.
            torch.cuda._sleep(int(2e9 * SLOW_S))
        if self.where == "host":
            time.sleep(SLOW_S)
        return x


Found = tuple[list[tuple[polyshard.Straggler, ...]], list[str]]


class Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def find(rank: int, where: str, slow: Sequence[int], capture: bool) -> Found:
    """The answer of each of fifteen steps, and what was logged."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 256), Slow(where if rank in slow else "nowhere"), nn.Linear(256, 256), nn.Linear(256, 256)
    )
    config = polyshard.ShardConfig(policy={"name": "module_class", "classes": [nn.Linear]}, precision="bf16")
    polyshard.shard(model.to(device), config)
    optimizer = torch.optim.AdamW(polyshard.flat_parameters(model), lr=1e-3, fused=True, capturable=capture)
    batch = torch.ones(64, 256, device=device)

    def step(x: torch.Tensor) -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    captured = polyshard.CapturedStep(model, optimizer, step, fallback="refuse") if capture else None
    run = captured or step
    answers, told = [], Told()
    logging.getLogger("polyshard.monitor").addHandler(told)
    with polyshard.Stragglers(model, every=6, factor=2.0) as stragglers:
        for _ in range(15):
            run(batch)
            answers.append(stragglers.step())
    if captured is not None:
        captured.reset()
    logging.getLogger("polyshard.monitor").removeHandler(told)
    polyshard.close(model)
    return answers, told.texts


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_named(where: str, slow: int) -> None:
    for answers, _ in RANKS.run(WORLD_SIZE, find, where, [slow], False, timeout=60.0):
        assert [[each.rank for each in answer] for answer in answers if answer] == [[slow], [slow]]
        second = answers[13][0]
        assert second.times == 2
        assert second.own_s > 0.8 * SLOW_S
        assert second.median_s < 0.5 * SLOW_S


def test_steps_of_a_graph_are_not_judged() -> None:
    found = RANKS.run(WORLD_SIZE, find, "device", [1], True, timeout=60.0)
    assert [answers for answers, _ in found] == [[()] * 15] * 2
    # Both windows, of which the second is of replays alone: two ranks that wait for each other would be alike.
    assert [texts for _, texts in found] == [
        ["Stragglers saw no step: those that a CUDA graph replays cannot be measured."],
        [],
    ]


def test_ranks_alike_are_none() -> None:
    found = RANKS.run(WORLD_SIZE, find, "device", [0, 1], False, timeout=60.0)
    assert found == [([()] * 15, [])] * 2
