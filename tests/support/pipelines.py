"""A small model in stages, its training over a pipeline, and the same training of the whole model in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polyshard
import polyshard.checkpoint
import torch
from parity import Block, seeded
from polyshard.checkpoint import Stages
from polyshard.pipelining import PipelineStage, TiedParameter, clip_grad_norm_
from polyshard_fsdp2 import fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CPU = torch.device("cpu")
WORDS, WIDTH, BLOCKS = 12, 6, 4
#: Rows of a microbatch, and tokens of a row.
ROWS, LENGTH = 2, 3


class Model(nn.Module):
    """An embedding, blocks, and a head with the embedding's weight where ``tied``. A stage lacks some of them."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block(WIDTH, 8) for number in range(BLOCKS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        # What each stage computes anew, under one name, is no part of a checkpoint.
        self.register_buffer("positions", torch.arange(LENGTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def part_of(model: Model, number: int, stages: int) -> Model:
    """A stage of ``model``, under its names."""
    part = copy.deepcopy(model)
    for name in list(part.blocks):
        if int(name) * stages // BLOCKS != number:
            del part.blocks[name]
    if number > 0:
        part.embedding = None
    if number < stages - 1:
        part.head = None
    return part


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of one microbatch."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Plan:
    """A schedule over stages, and how each of them is sharded."""

    schedule: str
    each: int = 1
    """Stages of a rank."""
    gathers: str = "schedule"
    settings: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (2, 2)
    names: tuple[str, ...] = ("pp", "dp")
    microbatches: int = 4
    tied: bool = True
    drop_in: bool = False
    """Whether ``fully_shard`` of ``polyshard_fsdp2`` shards, and not ``polyshard.shard``."""
    device: torch.device = CPU

    def __str__(self) -> str:
        kinds = f"{self.gathers}-{self.settings.get('strategy', 'full_shard')}"
        return (
            f"{self.schedule}-{self.stages}-{'fully_shard' if self.drop_in else kinds}-{'x'.join(map(str, self.sizes))}"
        )

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return self.sizes[0] * self.each

    def numbers(self, place: int) -> list[int]:
        """The stages of the pipeline's rank ``place``."""
        if self.schedule in ("ZBVZeroBubble", "DualPipeV"):
            return [place, self.stages - 1 - place]
        return list(range(place, self.stages, self.sizes[0]))


def batch(turn: int, data_rank: int, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one data rank in one step, and their targets."""
    generator = torch.Generator().manual_seed(100 * turn + data_rank)
    words = torch.randint(WORDS, (2, microbatches * ROWS, LENGTH), generator=generator)
    return words[0], words[1]


def whole_model(plan: Plan) -> Model:
    """The unsharded model of ``plan``."""
    model = seeded(lambda: Model(plan.tied))
    assert isinstance(model, Model)
    return model


def whole_backward(model: Model, plan: Plan, turn: int) -> None:
    """Forward and backward of the unsharded model, over the batches of all data ranks."""
    ranks = 1
    for size, name in zip(plan.sizes, plan.names, strict=True):
        ranks *= size if name in ("dp", "replicate") else 1
    batches = [batch(turn, rank, plan.microbatches) for rank in range(ranks)]
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    loss_of(model(inputs), targets).backward()


def expected(plan: Plan, steps: int) -> tuple[Model, list[float]]:
    """The unsharded model behind ``steps``, and the norm of each step's gradients."""
    model = whole_model(plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    norms = []
    for turn in range(steps):
        whole_backward(model, plan, turn)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


class Trainer:
    """One rank of the training of ``plan``."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        mesh = init_device_mesh(plan.device.type, plan.sizes, mesh_dim_names=plan.names)
        self.mesh, self.place = mesh, mesh["pp"].get_local_rank()
        data = tuple(name for name in plan.names if name in ("dp", "replicate"))
        #: The number of this rank among those with other samples.
        self.data_rank = 0
        for name in data:
            self.data_rank = self.data_rank * mesh[name].size() + mesh[name].get_local_rank()
        whole = whole_model(plan).to(plan.device)
        self.models = [self.shard(part_of(whole, number, plan.stages)) for number in plan.numbers(self.place)]
        self.stages = [
            PipelineStage(model, number, plan.stages, plan.device, group=mesh["pp"].get_group(), gathers=plan.gathers)
            for model, number in zip(self.models, plan.numbers(self.place), strict=True)
        ]
        names = {0: "embedding.weight", plan.stages - 1: "head.weight"}
        self.tied = [TiedParameter(self.stages, names)] if plan.tied else []
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in self.models]
        kind: Any = get_schedule_class(plan.schedule)
        self.schedule = kind(self.stages if plan.each > 1 else self.stages[0], plan.microbatches, loss_fn=loss_of)

    def shard(self, part: Model) -> Model:
        """``part``, sharded over the ranks that share it."""
        plan = self.plan
        if "tp" in plan.names:
            for block in part.blocks.values():
                parallelize_module(block, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if plan.drop_in:
            units = [*part.blocks.values(), part.embedding, part.head, part]
            for module in units:
                if module is not None:
                    fully_shard(module, mesh=self.mesh["dp"])
            return part
        inner = self.mesh[tuple(name for name in plan.names if name != "pp")]
        settings: dict[str, Any] = {"mesh": inner, **plan.settings}
        units = {"name": "module_class", "classes": [Block, nn.Embedding]}
        if "tp" in plan.names:
            settings["shard"] = "dp"
        return polyshard.shard(part, polyshard.ShardConfig(policy=units, **settings))

    def forward_backward(self, turn: int, **options: Any) -> list[float]:
        """A schedule, whose gradients are complete behind it; losses of microbatches where the last stage is."""
        inputs, targets = (each.to(self.plan.device) for each in batch(turn, self.data_rank, self.plan.microbatches))
        numbers, losses = self.plan.numbers(self.place), []
        self.schedule.step(
            *([inputs] if 0 in numbers else []),
            target=targets if self.plan.stages - 1 in numbers else None,
            losses=losses,
            **options,
        )
        for each in self.tied:
            each.reduce()
        return [loss.item() for loss in losses]

    def fail(self, turn: int, microbatch: int) -> None:
        """A schedule of the only stage, whose loss raises ``ZeroDivisionError`` behind so many microbatches."""
        left = iter(range(microbatch))

        def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if next(left, None) is None:
                raise ZeroDivisionError
            return loss_of(output, target)

        kind: Any = get_schedule_class(self.plan.schedule)
        inputs, targets = batch(turn, self.data_rank, self.plan.microbatches)
        kind(self.stages[0], self.plan.microbatches, loss_fn=failing).step(inputs, target=targets)

    def step(self, turn: int) -> float:
        """A whole step; the norm of its gradients."""
        self.forward_backward(turn)
        norm = float(clip_grad_norm_(self.stages, 0.5, tied=self.tied))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return norm

    def save(self, folder: Path, step: int, *, trains_on: bool = False) -> Path:
        """A checkpoint of all stages; in the background of another step where the rank ``trains_on``."""
        stages = Stages(self.models, tied={"head.weight": "embedding.weight"} if self.plan.tied else {})
        if trains_on:
            pending = polyshard.checkpoint.async_save(folder, step, stages, self.optimizers, extra={"turn": step})
            self.step(step)
            return pending.result()
        return polyshard.checkpoint.save(folder, step, stages, self.optimizers, extra={"turn": step})

    def load(self, directory: Path) -> Any:
        """What ``save`` wrote, for as many stages as there are."""
        return polyshard.checkpoint.load(directory, Stages(self.models), self.optimizers)

    def values(self) -> dict[str, torch.Tensor]:
        """The whole parameters of this rank's stages by name."""
        found = {}
        for model in self.models:
            with polyshard.unsharded(model):
                found.update({name: whole_of(each) for name, each in model.named_parameters()})
        return found

    def close(self) -> None:
        """Release what the stages hold."""
        for model in self.models:
            polyshard.close(model)


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of its values."""
    values = parameter.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values.clone()


def train(rank: int, plan: Plan, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The norms of ``steps``, and the whole parameters of this rank's stages."""
    trainer = Trainer(plan)
    norms = [trainer.step(turn) for turn in range(steps)]
    values = trainer.values()
    trainer.close()
    return norms, values
