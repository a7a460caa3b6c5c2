"""A small training that is killed: ranks are processes over gloo, and everything that a step depends on is saved."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import os
import random
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from mmap import mmap
from pathlib import Path
from typing import Literal

import polyshard
import torch
import torch.distributed as dist
from polyshard import checkpoint
from polyshard.errors import PolyshardError
from torch import nn

#: Exit codes of a rank: an error of polyshard's ended it, or another one.
FAILED, BROKE = 3, 4
_PLACE = struct.Struct("<iii")


class At(enum.IntEnum):
    """What a rank is about to do."""

    START = 0
    """Join the others, make the model, load."""
    FORWARD = 1
    """Compute the loss, which gathers."""
    BACKWARD = 2
    """Compute gradients, which gathers and reduces."""
    OPTIMIZER = 3
    """Clip and step."""
    BETWEEN = 4
    """Draw the next batch."""
    SAVE = 5
    """Write a checkpoint."""
    SAVE_BEHIND = 6
    """Copy a checkpoint, which is written while the next steps are made."""
    END = 7
    """All is done."""


class Kind(enum.Enum):
    """What one rank does wrong."""

    RAISE = "raise"
    """The program raises."""
    OUT_OF_MEMORY = "out of memory"
    """The device's allocator raises."""
    SKIP = "skip"
    """A block is left out of one step's forward, and so of its backward."""
    AGAIN = "again"
    """One more forward and backward than the others make."""
    NOT_FINITE = "not finite"
    """A batch is not a number."""


@dataclass(frozen=True)
class Mistake:
    """One, of one rank."""

    rank: int
    step: int
    kind: Kind
    at: At
    """Where the program raises; of the other kinds, FORWARD."""
    block: int
    """Index of the block that is concerned, of the model's children."""

    def fail(self) -> None:
        """Raise what the mistake comes to."""
        if self.kind is Kind.OUT_OF_MEMORY:
            raise torch.OutOfMemoryError("planned: out of memory, tried to allocate 2.00 GiB")
        raise ValueError(f"planned in {self.at.name}")


@dataclass(frozen=True)
class Job:
    """One run."""

    folder: Path
    """Of its checkpoints and of what its ranks say."""
    ranks: int = 3
    steps: int = 12
    save_every: int = 3
    keep: int | None = None
    timeout_s: float = 5.0
    seed: int = 0
    mistake: Mistake | None = None
    check_ranks: bool | Literal["always"] = True

    def planned(self, rank: int, step: int) -> Mistake | None:
        """What ``rank`` does wrong in ``step``."""
        mistake = self.mistake
        return mistake if mistake is not None and (mistake.rank, mistake.step) == (rank, step) else None


class Places:
    """Where each rank stands, in memory that the driver reads: its step, what it is about to do, its last save."""

    def __init__(self, path: Path, ranks: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(_PLACE.size * ranks))
        with path.open("r+b") as stream:
            self._memory = mmap(stream.fileno(), 0)

    def tell(self, rank: int, step: int, at: At, saved: int) -> None:
        """Say where ``rank`` stands. ``saved``: the step of the last checkpoint that is known to be committed."""
        _PLACE.pack_into(self._memory, rank * _PLACE.size, step, at, saved)

    def read(self, rank: int) -> tuple[int, At, int]:
        """What ``rank`` said last."""
        step, at, saved = _PLACE.unpack_from(self._memory, rank * _PLACE.size)
        return step, At(at), saved


class Block(nn.Module):
    """A unit; widths differ, so that no shard is like another."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return y


class Chain(nn.Sequential):
    """What ranks train: one after the other, but for a child that is left out, or that raises."""

    mistake: Mistake | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        planned = self.mistake
        for index, child in enumerate(self):
            here = planned is not None and planned.block == index
            if here and planned is not None and planned.kind is Kind.SKIP:
                continue
            if here and planned is not None and planned.at is At.FORWARD and planned.kind in _RAISES:
                planned.fail()
            x = child(x)
            if here and planned is not None and planned.at is At.BACKWARD:
                fails = planned.fail
                x.register_hook(lambda gradient, fails=fails: fails())
        return x


_RAISES = (Kind.RAISE, Kind.OUT_OF_MEMORY)


def build(seed: int = 0) -> Chain:
    """The model, whole."""
    torch.manual_seed(seed)
    return Chain(nn.Linear(5, 11), Block(11, 17), Block(11, 3), Block(11, 29), nn.Linear(11, 1))


def config(timeout_s: float, check_ranks: bool | Literal["always"] = True) -> polyshard.ShardConfig:
    """How it is sharded."""
    policy = {"name": "module_class", "classes": [Block]}
    return polyshard.ShardConfig(policy=policy, timeout_s=timeout_s, check_ranks=check_ranks)


def run_rank(rank: int, job: Job, store: Path) -> None:
    """The body of one rank's process; ends it."""
    torch.set_num_threads(1)
    code = 0
    try:
        _train(rank, job, store)
    except PolyshardError as error:
        _leave_word(job, rank, error)
        code = FAILED
    except BaseException as error:
        _leave_word(job, rank, error)
        code = BROKE
    sys.stdout.flush()
    # Without the interpreter's end: a failed group's threads may wait for a rank that is gone.
    os._exit(code)


def _leave_word(job: Job, rank: int, error: BaseException) -> None:
    told = {"type": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
    (job.folder / f"error-{rank}.json").write_text(json.dumps(told))


def _train(rank: int, job: Job, store: Path) -> None:
    places = Places(job.folder / "places", job.ranks)
    places.tell(rank, 0, At.START, -1)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), job.ranks), rank=rank, world_size=job.ranks, timeout=timeout
    )
    model = polyshard.shard(build(job.seed), config(job.timeout_s, job.check_ranks))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1000 + rank)
    random.seed(2000 + rank)
    first, losses, saved = _resumed(rank, job, model, optimizer)
    with polyshard.tell_failures(model):
        saved = _train_on(rank, job, places, model, optimizer, first, losses, saved)
    with polyshard.unsharded(model):
        state = {name: value.detach().clone() for name, value in model.named_parameters()}
    (job.folder / f"end-{rank}.json").write_text(
        json.dumps({"digest": digest(state), "losses": losses if rank == 0 else []})
    )
    places.tell(rank, job.steps, At.END, saved)


def _train_on(
    rank: int,
    job: Job,
    places: Places,
    model: Chain,
    optimizer: torch.optim.Optimizer,
    first: int,
    losses: list[float],
    saved: int,
) -> int:
    """The steps from ``first`` on; returns the step of the last save that was waited for."""
    pending: checkpoint.PendingSave | None = None
    for step in range(first, job.steps):
        places.tell(rank, step, At.BETWEEN, saved)
        mistake = job.planned(rank, step)
        model.mistake = mistake
        if mistake is not None and mistake.at is At.BETWEEN:
            mistake.fail()
        # As long as a loader takes.
        time.sleep(0.004)
        batch = torch.tensor([[random.random() for _ in range(5)] for _ in range(4)])
        if mistake is not None and mistake.kind is Kind.NOT_FINITE:
            batch[1, 2] = math.nan
        places.tell(rank, step, At.FORWARD, saved)
        if mistake is not None and mistake.kind is Kind.AGAIN:
            model(batch).square().mean().backward()
        loss = model(batch).square().mean()
        places.tell(rank, step, At.BACKWARD, saved)
        loss.backward()
        places.tell(rank, step, At.OPTIMIZER, saved)
        polyshard.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        if mistake is not None and mistake.at is At.OPTIMIZER:
            mistake.fail()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        done = step + 1
        if done % job.save_every and done != job.steps:
            continue
        behind = (done // job.save_every) % 2 == 0 and done != job.steps
        places.tell(rank, step, At.SAVE_BEHIND if behind else At.SAVE, saved)
        extra = {"step": done, "losses": losses, "random": polyshard.random_states(model)}
        root = job.folder / "checkpoints"
        if behind:
            pending = checkpoint.async_save(root, done, model, optimizer, extra=extra, keep=job.keep)
        else:
            checkpoint.save(root, done, model, optimizer, extra=extra, keep=job.keep)
            saved, pending = done, None
    if pending is not None:
        pending.result()
    return saved


def _resumed(rank: int, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, list[float], int]:
    chosen = [checkpoint.latest(job.folder / "checkpoints") if rank == 0 else None]
    dist.broadcast_object_list(chosen)
    if chosen[0] is None:
        return 0, [], -1
    extra = checkpoint.load(chosen[0], model, optimizer)
    polyshard.restore_random_states(model, extra["random"])
    # Of rank 0, as what is saved there: other ranks' have no use for it.
    return extra["step"], list(extra["losses"]), extra["step"]


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Of names and bits."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
