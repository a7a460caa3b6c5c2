"""A pipeline whose stages import ``fully_shard`` from torch when they run, and know of no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

WIDTH, HIDDEN, WORDS, LENGTH = 16, 24, 20, 8


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return made


class Decoder(nn.Module):
    """Layers between embeddings and a head; a stage of a pipeline has None for what others have."""

    embeddings: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: nn.Linear | None

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(number): FeedForward() for number in range(4)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(words) if self.embeddings is not None else words
        for block in self.layers.values():
            x = x + block(x)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x

    def init_weights(self) -> None:
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.2)


def _start(model: Decoder) -> torch.optim.Optimizer:
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    model.train()
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _batches(data_rank: int) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(data_rank)
    while True:
        yield torch.randint(0, WORDS, (2, LENGTH), generator=random)


def _cross_entropy(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.roll(-1, 1).flatten())


def clip(parameters: list[nn.Parameter]) -> float:
    """Clip all gradients to a tenth; returns their norm. Torch's function takes those of one mesh."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = []
    for group in groups.values():
        norm: Any = torch.nn.utils.get_total_norm([each.grad for each in group if each.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, 0.1, total)
    return total.item()


def _stage(number: int, stages: int) -> Decoder:
    """Some blocks; the first has the embeddings, too, and the last the head."""
    with torch.device("meta"):
        model = Decoder().double()
    each = len(model.layers) // stages
    for name in list(model.layers):
        if int(name) // each != number:
            del model.layers[name]
    if number > 0:
        model.embeddings = None
    if number < stages - 1:
        model.norm = model.output = None
    return model


def pipeline(name: str, each: int) -> Any:
    """Two ranks of a pipeline, with so many stages each, every one of which two ranks shard.

    ``name``: of the schedule.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    place, stages = mesh["pp"].get_local_rank(), 2 * each
    models = [_stage(number, stages) for number in range(place, stages, 2)]
    for model in models:
        for block in model.layers.values():
            fully_shard(block, mesh=mesh["shard"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["shard"], reshard_after_forward=False)
    assert all(isinstance(model, FSDPModule) for model in models)
    optimizers = [_start(model) for model in models]
    made = [
        PipelineStage(model, number, stages, torch.device("cpu"), group=mesh["pp"].get_group())
        for number, model in zip(range(place, stages, 2), models, strict=True)
    ]
    kind: Any = get_schedule_class(name)
    schedule = kind(made if each > 1 else made[0], 4, loss_fn=_cross_entropy)
    batches = _batches(mesh["shard"].get_local_rank())
    told = []
    for _ in range(2):
        words = torch.cat([next(batches) for _ in range(2)])
        losses: list[torch.Tensor] = []
        schedule.step(*([words] if place == 0 else []), target=words if place else None, losses=losses)
        told += [loss.item() for loss in losses]
        for model, optimizer in zip(models, optimizers, strict=True):
            told.append(clip(list(model.parameters())))
            optimizer.step()
            optimizer.zero_grad()
    return told, [{name: each.full_tensor() for name, each in model.named_parameters()} for model in models]
