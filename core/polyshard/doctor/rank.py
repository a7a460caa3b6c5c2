"""One rank of the doctor's trial, as a program.

It trains a small model for some steps, sharded over the ranks, and beside it the same model whole over all ranks'
batches. What it has come to, and at last how far the two are apart, it writes into a file.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import signal
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..api import shard, unsharded
from ..config import ShardConfig

STEPS = 3
#: Upon which a rank writes its stack to its output.
STACK_SIGNAL = signal.SIGUSR1
#: Of a rank's inputs; as many on each, since the mean over ranks is compared with the mean over all rows.
_BATCH, _WIDTH = 4, 16


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What one rank is told."""

    rank: int
    world_size: int
    backend: str
    device: str
    """``cpu``, or ``cuda``, of which rank n takes device n."""
    folder: str
    """Where ranks meet, and where each writes how far it came."""
    limit_s: float

    @property
    def notes(self) -> Path:
        """The file into which this rank writes."""
        return Path(self.folder, f"rank{self.rank}.json")


def run(settings: RankSettings) -> None:
    """Take part in the trial."""
    # A rank that hangs is asked where, before it is ended.
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    _note(settings, stage="joining")
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", settings.rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        settings.backend,
        init_method=f"file://{Path(settings.folder, 'store')}",
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=timedelta(seconds=settings.limit_s),
        device_id=device if device.type == "cuda" else None,
    )
    _note(settings, stage="sharding")
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(_WIDTH, 32), nn.Tanh(), nn.Linear(32, 4)).to(device, dtype)
    model = copy.deepcopy(whole)
    config = ShardConfig(policy={"name": "module_class", "classes": [nn.Linear]}, timeout_s=settings.limit_s)
    shard(model, config)
    _note(settings, stage="training")
    _train(model, whole, settings, dtype, device)
    _note(settings, stage="comparing")
    with unsharded(model):
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        difference = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    _note(settings, stage="leaving", difference=difference)
    dist.destroy_process_group()
    _note(settings, stage="done", difference=difference)


def _train(
    model: nn.Module, whole: nn.Module, settings: RankSettings, dtype: torch.dtype, device: torch.device
) -> None:
    sharded_steps = torch.optim.Adam(model.parameters(), lr=1e-2)
    whole_steps = torch.optim.Adam(whole.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        shape = (settings.world_size, _BATCH, _WIDTH)
        batches = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        model(batches[settings.rank]).square().mean().backward()
        whole(batches.flatten(0, 1)).square().mean().backward()
        for optimizer in (sharded_steps, whole_steps):
            optimizer.step()
            optimizer.zero_grad()


def _note(settings: RankSettings, stage: str, difference: float | None = None) -> None:
    text = json.dumps({"stage": stage, "difference": difference})
    partial = settings.notes.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(settings.notes)


def as_argument(settings: RankSettings) -> str:
    """``settings`` as the program takes them."""
    return json.dumps(asdict(settings))


def main() -> None:
    """The program: its one argument is what ``as_argument`` made."""
    run(RankSettings(**json.loads(sys.argv[1])))
