"""Ranks that stand still over NCCL: who waits, and where, is told while the device waits. CPU twin:
``tests/diagnose/test_peer_failures.py``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import polyshard
import pytest
import torch
from processes import KeptRanks
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs ranks that wait for each other"),
]

PROGRAM = """
import logging, os, time
import torch, polyshard
from torch import nn

def stuck():
    time.sleep(25)

logging.basicConfig()
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
polyshard.shard(model, polyshard.ShardConfig(timeout_s=10, policy={"name": "module_class", "classes": [nn.Linear]}))
for step in range(4):
    loss = model(torch.ones(8, 64, device="cuda")).sum()
    loss.backward()
    if rank == 1 and step == 2:
        stuck()
    loss.item()
torch.cuda.synchronize()
"""


def test_where_ranks_stand_is_logged_and_reported_while_the_device_waits(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "TMPDIR": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        words = ranks[0].communicate(timeout=90)[1]
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    match = re.search(
        r"Rank 0 has issued nothing for (\d+\.\d) s, and its device is not through with what it issued\.", words
    )
    assert match is not None, words[-6000:]
    assert 9.0 <= float(match[1]) < 11.0
    assert re.search(r"The last is number \d+, (all_gather|reduction) of '", words)
    assert re.search(r"rank 1 issued nothing for \d+\.\d s behind its communication number \d+, reduction of ", words)
    assert "stuck" in words
    report = json.loads(next(tmp_path.glob("polyshard-rank-0-*.json")).read_text())
    assert report["others"]["1"]["kind"] == "silent"
    assert any("loss.item" in line or "<string>" in line for stack in report["stacks"].values() for line in stack)
    # The process group's own limit is longer, and rank 1 came in the end.
    assert ranks[0].returncode == 0


# ``polyshard.Stragglers`` finds slow devices and slow hosts. CPU twin: ``tests/diagnose/test_stragglers.py``.


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
