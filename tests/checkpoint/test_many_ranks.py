"""What the first of 16,384 ranks computes and holds for a save of an 8B model, of offers as ranks make them."""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from polyshard.checkpoint.manifest import file_of
from polyshard.checkpoint.shares import Kind, Offer, share_out
from polyshard.checkpoint.writing import Document, FileLayout, ending_of

RANKS = 16_384
WIDTH, HIDDEN, WORDS, LAYERS = 4096, 14336, 128256, 32


def shapes() -> dict[str, tuple[int, ...]]:
    """Of Llama 3 8B's parameters."""
    found: dict[str, tuple[int, ...]] = {"embed": (WORDS, WIDTH), "norm": (WIDTH,), "output": (WORDS, WIDTH)}
    for layer in range(LAYERS):
        rows = {"q": WIDTH, "k": 1024, "v": 1024, "o": WIDTH, "gate": HIDDEN, "up": HIDDEN}
        found |= {f"layers.{layer}.{name}": (size, WIDTH) for name, size in rows.items()}
        found |= {f"layers.{layer}.down": (WIDTH, HIDDEN), f"layers.{layer}.norm1": (WIDTH,)}
        found[f"layers.{layer}.norm2"] = (WIDTH,)
    return found


def kinds() -> tuple[Kind, ...]:
    """With AdamW's state."""
    found: list[Kind] = [(("model", name), "float32", shape) for name, shape in shapes().items()]
    for name, shape in shapes().items():
        found.append((("optimizer", "state", name, "step"), "float32", ()))
        found += [(("optimizer", "state", name, key), "float32", shape) for key in ("exp_avg", "exp_avg_sq")]
    return tuple(found)


def offer_of(rank: int, of: tuple[Kind, ...]) -> Offer:
    """Equal rows of each tensor, padded at the end; the number of steps on all ranks."""
    rows = []
    for number, (_, _, shape) in enumerate(of):
        size = -(-shape[0] // RANKS) if shape else 0
        count = min(size, shape[0] - rank * size) if shape else 0
        if count > 0 or not shape:
            rows.append((number, rank * size, 0, max(count, 1), shape[1] if len(shape) > 1 else 1))
    return Offer(of, np.array(rows, np.int64))


def first_rank(folder: str, told: Any) -> None:
    of = kinds()
    offers = [offer_of(rank, of) for rank in range(RANKS)]
    names = list(shapes())
    settings = {"lr": 1e-3, "params": {"$list": names}}
    document = Document({}, {"module": "torch", "class": "AdamW"}, [settings], {}, {}, (), {})
    began = time.process_time()
    shares = share_out(offers, complete=True)
    planned = time.process_time() - began
    layout = FileLayout()
    layout.add(torch.zeros(1))
    written = [{"file": file_of(rank), "size": end, "digests": []} for rank, end in enumerate(shares.ends)]
    found = {"planned_s": planned}
    for turn in ("first_s", "second_s"):
        began = time.process_time()
        ending_of(Path(folder), shares, document, {}, layout, 0, complete=True).composed(written)
        found[turn] = time.process_time() - began
    found["gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    told.send(found)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_sixteen_thousand_ranks(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=first_rank, args=(str(tmp_path), there))
    process.start()
    found = here.recv()
    process.join()
    print(json.dumps(found))
    assert found["planned_s"] + found["first_s"] < 60
    assert found["second_s"] < 5
    assert found["gib"] < 4
