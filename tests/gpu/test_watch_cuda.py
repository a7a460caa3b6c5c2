"""Ranks that stand still over NCCL: who waits, and where, is told while the device waits. CPU twin:
``tests/diagnose/test_peer_failures.py``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
