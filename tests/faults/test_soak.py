"""Ten thousand steps with saves: memory, threads and files are no more at the end than behind the start."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import polyshard
import psutil
import pytest
import torch
from fault_figures import record
from polyshard import checkpoint
from polyshard_testing import Rank, RankProcesses
from program import Block, build

STEPS, SAVE_EVERY, LOOK_EVERY = 10_000, 250, 1000
#: Steps until allocators and caches have what they keep.
WARM = 3000
GROWTH = 4 << 20


def train(joined: Rank, folder: Path, steps: int) -> list[tuple[int, int, int]]:
    """Resident bytes, threads and descriptors at every ``LOOK_EVERY`` steps."""
    chance = random.Random(joined.rank)
    model = polyshard.shard(build(), polyshard.ShardConfig(policy={"name": "module_class", "classes": [Block]}))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    own = psutil.Process()
    looks = []
    for step in range(1, steps + 1):
        batch = torch.tensor([[chance.random() for _ in range(5)] for _ in range(2)])
        model(batch).square().mean().backward()
        polyshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            save = checkpoint.async_save if step % (2 * SAVE_EVERY) == 0 else checkpoint.save
            save(folder, step, model, optimizer, keep=2)
        if step % LOOK_EVERY == LOOK_EVERY - 1:
            looks.append((own.memory_info().rss, own.num_threads(), len(os.listdir("/proc/self/fd"))))
    polyshard.close(model)
    return looks


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_ten_thousand_steps_leave_nothing_behind(tmp_path: Path) -> None:
    with RankProcesses(2) as ranks:
        found = ranks.run(partial(train, folder=tmp_path, steps=STEPS), timeout_s=1700.0)
    growth = 0
    for looks in found:
        warm, end = looks[WARM // LOOK_EVERY], looks[-1]
        growth = max(growth, end[0] - warm[0])
        assert end[0] - warm[0] < GROWTH, looks
        assert end[1:] == warm[1:], looks
    record(
        "soak",
        steps=STEPS,
        saves=STEPS // SAVE_EVERY,
        growth_mib=round(growth / 2**20, 2),
        threads=[each[-1][1] for each in found],
        descriptors=[each[-1][2] for each in found],
    )
