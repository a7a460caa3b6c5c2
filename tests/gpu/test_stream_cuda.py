"""Whole weights handed out on CUDA, where the device is behind the host."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from processes import KeptRanks, gpu_ranks, run_script, settle_on_device, share_device
from torch import nn

pytestmark = pytest.mark.gpu

WORLD_SIZE = gpu_ranks()

RANKS = KeptRanks("nccl")

WIDTH, LAYERS = 2048, 6

UNIT = 4 * WIDTH * WIDTH


def handed_out(rank: int, settings: dict[str, Any], only: int | None) -> tuple[int, int, int]:
    """Tensors that were not the present weights, how many there were, and the most bytes that a stream of fp32 took."""
    device = settle_on_device(rank)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(device)
    with warnings.catch_warnings():
        # One GPU is a world of one, and not every NCCL registers memory.
        warnings.filterwarnings("ignore", message=".*(NO_SHARD|registering it failed)")
        policy = {"name": "module_class", "classes": [nn.Linear]}
        polyshard.shard(model, polyshard.ShardConfig(policy=policy, **settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x = torch.randn(WIDTH, WIDTH, device=device)
        busy = torch.empty_like(x)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        tensors = most = 0
        for dtype in (None, torch.bfloat16, None):
            # Whoever reads an older unit, or one that has not arrived, sees other values.
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with polyshard.unsharded(model):
                whole = {name: each.detach().clone() for name, each in model.named_parameters()}
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for names, handed in polyshard.stream(model, dtype=dtype, ranks="all" if only is None else [only]):
                for _ in range(10):
                    torch.mm(x, x, out=busy)
                # A sum of them would take twice the unit's memory, and a loop would keep its last tensor.
                wrong += sum(
                    torch.ne(tensor, whole[name].to(tensor.dtype)).any()
                    for name, tensor in zip(names, handed, strict=True)
                )
                tensors += len(handed)
            if dtype is None:
                most = max(most, torch.cuda.max_memory_allocated() - before)
    polyshard.close(model)
    return int(wrong), tensors, most


@pytest.mark.parametrize("only", [None, WORLD_SIZE - 1])
@pytest.mark.parametrize(
    "settings",
    [{}, {"offload": "cpu"}, {"precision": "bf16", "strategy": "shard_grad_op"}],
    ids=str,
)
def test_weights_are_the_present_ones_and_two_units_whole(settings: dict[str, Any], only: int | None) -> None:
    for rank, (wrong, tensors, most) in enumerate(RANKS.run(WORLD_SIZE, handed_out, settings, only)):
        assert wrong == 0
        assert tensors == (3 * LAYERS if only in (None, rank) else 0)
        # Beside them, what a comparison takes, blocks of 512 bytes of its results too.
        assert most <= 2.5 * UNIT + 4096


EXAMPLE = Path(__file__).parents[2] / "examples" / "rollout"


@pytest.mark.skipif(share_device(), reason="the example gives each trainer a GPU of its own")
def test_a_generator_copies_out_of_the_trainers_memory(tmp_path: Path) -> None:
    """The generator has a GPU of its own where one is left, and shares rank 0's where none is."""
    settings = ("steps=6", "every=2", "verify=true", f"output={tmp_path}")
    arguments = [word for each in settings for word in ("--set", each)]
    done = run_script(gpu_ranks() + 1, EXAMPLE / "train.py", arguments, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert not any(done.codes), done.output + done.errors
    history: list[dict[str, Any]] = json.loads((tmp_path / "history.json").read_text())
    assert [entry["step"] for entry in history] == [2, 4, 6]
    assert [entry["arrived"] for entry in history] == [entry["sent"] for entry in history]
    assert len({entry["sent"] for entry in history}) == 3
