"""A rank of a job that trains together with other jobs, writes down every step, and is killed on the way."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import struct
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from mmap import mmap
from pathlib import Path
from typing import Any

import polyshard
import torch
import torch.distributed as dist
from polyshard import checkpoint
from torch import nn
from torch.distributed.tensor import DTensor

#: Rows of a batch that one rank computes with.
ROWS = 3
_PLACE = struct.Struct("<qqq")


class At(enum.IntEnum):
    """What a rank is about to do."""

    START = 0
    QUORUM = 1
    """Find out who is there; take over another job's state."""
    FORWARD = 2
    BACKWARD = 3
    """And average gradients over ranks and jobs, meanwhile and at its end."""
    COMMIT = 4
    OPTIMIZER = 5
    SAVE = 6
    END = 7


@dataclass(frozen=True)
class Plan:
    """What all jobs are told."""

    folder: Path
    lighthouse: str
    size: int = 2
    """Ranks of a job."""
    jobs: int = 2
    timeout_s: float = 3.0
    """Of means over jobs, and of collectives of one job."""
    pause_s: float = 0.01
    """Of each step, as long as a loader takes."""
    save_every: int = 10
    min_replicas: int = 1
    device: str = "cpu"
    """Or ``"cuda"``: each rank of each job has one of its own."""


class Places:
    """Where each rank stands, and where all end, in memory that the driver shares."""

    def __init__(self, plan: Plan) -> None:
        self._size = plan.size
        path = plan.folder / "places"
        if not path.exists():
            path.write_bytes(bytes(_PLACE.size * (plan.size * plan.jobs + 1)))
        with path.open("r+b") as stream:
            self._memory = mmap(stream.fileno(), 0)

    def tell(self, job: int, rank: int, step: int, at: At, jobs: int) -> None:
        """``jobs``: how many took part in the last step that counted."""
        _PLACE.pack_into(self._memory, (1 + job * self._size + rank) * _PLACE.size, step, at, jobs)

    def read(self, job: int, rank: int) -> tuple[int, At, int]:
        """What the rank told last."""
        step, at, jobs = _PLACE.unpack_from(self._memory, (1 + job * self._size + rank) * _PLACE.size)
        return step, At(at), jobs

    @property
    def last(self) -> int:
        """The step behind which all end; 0 while none is known."""
        return int(_PLACE.unpack_from(self._memory, 0)[0])

    @last.setter
    def last(self, step: int) -> None:
        _PLACE.pack_into(self._memory, 0, step, 0, 0)


class Net(nn.Module):
    """Units of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        y: torch.Tensor = self.last(x)
        return y


def build() -> Net:
    """The model, whole, in fp64."""
    torch.manual_seed(0)
    return Net().double()


def batch(number: int, ranks: int) -> torch.Tensor:
    """All ranks' rows of one batch."""
    made = torch.Generator().manual_seed(number)
    return torch.randn(ranks * ROWS, 3, generator=made, dtype=torch.float64)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Of one rank's rows."""
    target = rows.sum(1, keepdim=True).sin()
    loss: torch.Tensor = (model(rows) - target).square().mean()
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The same for the reference."""
    return torch.optim.Adam(model.parameters(), lr=3e-3)


#: The largest norm of all gradients.
CLIP = 0.3


def digest(parts: Iterable[torch.Tensor]) -> str:
    """Of bits."""
    found = hashlib.sha256()
    for each in parts:
        found.update(each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of this rank's parameters and states."""
    held = [*model.parameters(), *(value for each in optimizer.state.values() for value in each.values())]
    return digest(each.to_local() if hasattr(each, "to_local") else each for each in held)


def replay(rank: int, size: int, schedule: Sequence[tuple[int, int]]) -> list[str]:
    """One job alone trains on all batches of each step, one after the other; the bits behind each.

    ``schedule``: the first batch and the number of batches of each step.
    """
    torch.set_num_threads(1)
    policy = {"name": "module_class", "classes": [nn.Linear]}
    model = polyshard.shard(build(), polyshard.ShardConfig(policy=policy))
    optimizer = optimizer_of(model)
    told = []
    for first, batches in schedule:
        sums: list[torch.Tensor] = []
        for number in range(first, first + batches):
            loss_of(model, batch(number, size)[rank * ROWS : (rank + 1) * ROWS]).backward()
            mine = [each.grad.to_local().clone() for each in model.parameters()]
            sums = [one + other for one, other in zip(sums, mine, strict=True)] if sums else mine
            optimizer.zero_grad()
        for each, total in zip(model.parameters(), sums, strict=True):
            each.grad = DTensor.from_local(
                total / batches, each.device_mesh, each.placements, shape=each.shape, stride=each.stride()
            )
        polyshard.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        told.append(bits_of(model, optimizer))
    return told


def run_rank(job: int, rank: int, life: int, plan: Plan, store: Path) -> None:
    """The body of a rank's process; ends it."""
    torch.set_num_threads(1)
    code = 0
    try:
        _train(job, rank, life, plan, store)
    except BaseException as error:
        told = {"type": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
        (plan.folder / f"error-{job}-{rank}-{life}.json").write_text(json.dumps(told))
        code = 1
    sys.stdout.flush()
    os._exit(code)


def _train(job: int, rank: int, life: int, plan: Plan, store: Path) -> None:
    from polyshard_torchft import Elastic

    errors = os.open(plan.folder / f"stderr-{job}-{rank}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(errors, 2)
    places = Places(plan)
    places.tell(job, rank, 0, At.START, 0)
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo",
        store=dist.FileStore(str(store), plan.size),
        rank=rank,
        world_size=plan.size,
        timeout=limit,
    )
    collectives = {
        "name": "torchft",
        "lighthouse": plan.lighthouse,
        "timeout_s": plan.timeout_s,
        "min_replicas": plan.min_replicas,
    }
    policy = {"name": "module_class", "classes": [nn.Linear]}
    settings: dict[str, Any] = {"strategy": "no_shard"} if plan.size == 1 else {}
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", job * plan.size + rank)
        torch.cuda.set_device(device)
    model = polyshard.shard(
        build().to(device), polyshard.ShardConfig(collectives=collectives, policy=policy, timeout_s=60.0, **settings)
    )
    optimizer = optimizer_of(model)
    torch.manual_seed(1000 + rank)
    elastic = Elastic(model, optimizer)
    # Of each job, since one folder is one job's. All look at all of them.
    root = plan.folder / "checkpoints" / str(job)
    found = [checkpoint.latest(each) for each in sorted(root.parent.glob("*"))] if rank == 0 else []
    newest = [max((each for each in found if each is not None), key=lambda each: each.name, default=None)]
    dist.broadcast_object_list(newest)
    if newest[0] is not None:
        saved = checkpoint.load(newest[0], model, optimizer)
        elastic.load_state_dict(saved["elastic"])
        # Where other jobs stand behind this step, nothing is taken over.
        polyshard.restore_random_states(model, saved["random"])
    jobs = 0

    def tell(at: At) -> None:
        places.tell(job, rank, elastic.steps, at, jobs)

    with (plan.folder / f"steps-{job}-{rank}.jsonl").open("a", buffering=1) as log:
        while not places.last or elastic.steps < places.last:
            time.sleep(plan.pause_s)
            tell(At.QUORUM)
            began = time.monotonic()
            with elastic.step() as step:
                rows = batch(step.batch, plan.size)[rank * ROWS : (rank + 1) * ROWS].to(device)
                torch.rand(1)
                tell(At.FORWARD)
                loss = loss_of(model, rows)
                tell(At.BACKWARD)
                loss.backward()
                polyshard.clip_grad_norm_(model, CLIP)
                tell(At.COMMIT)
                counts = step.commits()
                if counts:
                    tell(At.OPTIMIZER)
                    optimizer.step()
            took = time.monotonic() - began
            bits, drawn = "", ""
            if counts:
                jobs = step.size
                bits, drawn = bits_of(model, optimizer), digest([torch.get_rng_state()])
            told = [step.number, step.batch, step.rank, step.size, counts, loss.item().hex(), bits, drawn, life, took]
            log.write(json.dumps(told) + "\n")
            if counts and step.rank == 0 and step.number % plan.save_every == 0:
                tell(At.SAVE)
                extra = {"elastic": elastic.state_dict(), "random": polyshard.random_states(model)}
                checkpoint.save(root, step.number, model, optimizer, extra=extra, keep=3)
    tell(At.END)
