"""Single flipped bits in every kind of file of a checkpoint: each is named, none is loaded."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import polyshard
import pytest
import torch
from fault_figures import record
from parity import threaded
from polyshard import checkpoint
from polyshard.errors import CheckpointDamagedError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

FLIPS = 500


def made(rank: int, world: ThreadedWorld) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Each rank's file of three has about 4 MB."""
    with world.lock:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(1001, 3))
    polyshard.shard(model, threaded(world, rank))
    return model, torch.optim.AdamW(model.parameters())


def saved(root: Path) -> Path:
    def body(rank: int, world: ThreadedWorld) -> Path:
        model, optimizer = made(rank, world)
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        return checkpoint.save(root, 1, model, optimizer, extra={"text": "hello"})

    return ThreadedWorld(3, timeout=30.0).run(body, timeout=60.0)[0]


def bits(directory: Path) -> list[tuple[Path, int]]:
    """Files in turn; in each its first and its last bit, then any."""
    chosen = random.Random(22)
    files = sorted(directory.iterdir())
    found = []
    for number in range(FLIPS):
        path, turn = files[number % len(files)], number // len(files)
        nbits = path.stat().st_size * 8
        found.append((path, (0, nbits - 1)[turn] if turn < 2 else chosen.randrange(nbits)))
    return found


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def outcome(error: BaseException | None, path: Path) -> str:
    if error is None:
        return "silent"
    # On all ranks alike, also on one that reads nothing of the file: programs go back to an older one alike.
    return "named" if isinstance(error, CheckpointDamagedError) and f"'{path.name}'" in str(error) else "other"


def loaded(directory: Path, flips: list[tuple[Path, int]]) -> list[list[str]]:
    """The outcome of each load, by rank of two; the last load, of the whole checkpoint, must succeed."""
    turn = threading.Barrier(2)

    def body(rank: int, world: ThreadedWorld) -> list[str]:
        model, optimizer = made(rank, world)
        found = []
        for path, bit in flips:
            if rank == 0:
                flip(path, bit)
            turn.wait(60)
            error: Exception | None = None
            try:
                checkpoint.load(directory, model, optimizer)
            except Exception as caught:
                error = caught
            found.append(outcome(error, path))
            turn.wait(60)
            if rank == 0:
                flip(path, bit)
        turn.wait(60)
        checkpoint.load(directory, model, optimizer)
        return found

    return ThreadedWorld(2, timeout=30.0).run(body, timeout=1200.0)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_flipped_bit_is_named_and_none_loaded(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    flips = bits(directory)
    ranks = loaded(directory, flips)
    verified = []
    for path, bit in flips:
        flip(path, bit)
        problem: Exception | None = None
        try:
            checkpoint.verify(directory)
        except Exception as caught:
            problem = caught
        verified.append(outcome(problem, path))
        flip(path, bit)
    checkpoint.verify(directory)
    told: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for (path, _), *each in zip(flips, *ranks, verified, strict=True):
        told[next(name for name in ("silent", "other", "named") if name in each)] += 1
        kinds[path.suffix[1:] or path.name] += 1
    assert told == {"named": FLIPS}, told
    record("flips", flips=FLIPS, named=told["named"], loaded=told["silent"], by_file=kinds)
