"""Who writes what of a checkpoint: any shapes come back to the bit at any number of ranks; nothing is written twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import polyshard
import polyshard.state
import pytest
import torch
from parity import on_ranks, threaded
from polyshard import checkpoint
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

Shape = tuple[int, ...]


class Held(nn.Module):
    """A unit: some parameters of one dtype, some of them with other strides, and a buffer."""

    def __init__(self, dtype: torch.dtype, shapes: list[Shape], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for index, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator).to(dtype)
            if index % 2 and value.ndim > 1:
                value = value.transpose(0, -1).contiguous().transpose(0, -1)
            self.register_parameter(f"p{index}", nn.Parameter(value))
        self.register_buffer("seen", torch.arange(seed, seed + 3))


Parts = list[tuple[torch.dtype, list[Shape]]]


def model_of(parts: Parts, seed: int) -> nn.Module:
    return nn.Sequential(*(Held(dtype, shapes, seed + index) for index, (dtype, shapes) in enumerate(parts)))


def sharded(rank: int, world: ThreadedWorld, parts: Parts, seed: int, run: dict[str, Any]) -> nn.Module:
    with world.lock:
        model = model_of(parts, seed)
    return polyshard.shard(
        model, threaded(world, rank, policy={"name": "module_class", "classes": [Held]}, check_ranks=False, **run)
    )


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with polyshard.unsharded(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "run", [{"strategy": "no_shard"}, {"strategy": "hybrid_shard", "shard_size": 2}], ids=lambda run: run["strategy"]
)
def test_what_ranks_hold_alike_is_written_once_and_shared_out(run: dict[str, Any], tmp_path: Path) -> None:
    parts: Parts = [(torch.float32, [(size, 17 * 40)]) for size in (300, 20, 90, 200, 64, 150, 31, 280)]

    def save(rank: int, world: ThreadedWorld) -> Path:
        return checkpoint.save(tmp_path, 1, sharded(rank, world, parts, 0, run))

    directory = on_ranks(4, save)[0]
    sizes = [path.stat().st_size for path in sorted(directory.glob("__*_0.distcp"))]
    total = sum(math.prod(shape) * 4 for _, shapes in parts for shape in shapes)
    assert len(sizes) == 4
    assert total <= sum(sizes) < 1.02 * total
    # The largest is 26 % of all; no rank has much more than a quarter.
    assert max(sizes) < 0.3 * total


@pytest.mark.slow
def test_blocks_of_large_files_are_read_by_those_that_need_them(tmp_path: Path) -> None:
    """Files of several blocks, chunks across their borders, and parts of chunks."""
    parts: Parts = [
        (torch.float32, [(1500, 1500), (7,)]),
        (torch.float64, [(3, 300_000)]),
        (torch.bfloat16, [(11, 13)]),
    ]

    def save(rank: int, world: ThreadedWorld) -> tuple[Path, dict[str, torch.Tensor]]:
        model = sharded(rank, world, parts, 0, {})
        directory = checkpoint.save(tmp_path, 1, model)
        pending = checkpoint.async_save(tmp_path, 2, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert pending.result(30).name == "step-00000002"
        checkpoint.load(directory, model)
        return directory, state_of(model)

    directory, expected = on_ranks(2, save)[0]
    manifest = json.loads((directory / "manifest.json").read_text())
    assert {len(file["xxh3_128"]) for file in manifest["files"].values()} <= {2, 3, 4}
    start = model_of(parts, 0).state_dict()
    assert all(torch.equal(expected[name], value) for name, value in start.items())
    for path in directory.glob("__*"):
        assert path.read_bytes() == (tmp_path / "step-00000002" / path.name).read_bytes()

    def load(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded(rank, world, parts, 9, {})
        checkpoint.load(directory, model)
        return state_of(model)

    for loaded in on_ranks(3, load):
        assert all(torch.equal(loaded[name], value) for name, value in start.items())
