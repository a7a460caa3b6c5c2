"""Training programs as torchtitan's are made: a plan for each parallelism, in this order, over a model on meta.

They import ``fully_shard`` from torch when they run, and know of no other. ``llama`` and ``mixture`` return what their
user sees: losses, norms of gradients, and the state dict before and behind a save.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

WIDTH, HEADS, HIDDEN, WORDS, LENGTH, EXPERTS = 16, 4, 24, 20, 8, 2


class Attention(nn.Module):
    """With rotations, whose buffer the model makes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        query, key = (each * rotation.cos() + each.flip(-1) * rotation.sin() for each in (query, key))
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        made: torch.Tensor = self.out(out.transpose(1, 2).flatten(-2))
        return made


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return made


class Experts(nn.Module):
    """A matrix for each of those that are here."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        parts = zip(x.split(counts), up, down, strict=True)
        return torch.cat([nn.functional.silu(part @ first.t()) @ second.t() for part, first, second in parts])


class Moe(nn.Module):
    """Every token goes to the expert that its router likes most, and to all of one that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.shared = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
        made = torch.empty_like(rows).index_copy(0, order, self.experts(rows[order], counts))
        shared: torch.Tensor = self.shared(x)
        return shared + (made * weight.unsqueeze(-1)).view_as(x)


class Block(nn.Module):
    def __init__(self, feed: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.feed = feed

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        made: torch.Tensor = x + self.feed(self.feed_norm(x))
        return made


class Decoder(nn.Module):
    """``head=False`` in forward leaves out the head, which a loss in chunks calls by itself.

    A stage of a pipeline has None for what others have.
    """

    embeddings: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: nn.Linear | None
    rotation: torch.Tensor

    def __init__(self, mixture: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block(Moe() if mixture else FeedForward()) for i in range(blocks)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("rotation", torch.empty(LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, words: torch.Tensor, head: bool = True) -> torch.Tensor:
        x = self.embeddings(words) if self.embeddings is not None else words
        for block in self.layers.values():
            x = block(x, self.rotation)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if head and self.output is not None else x

    def init_weights(self) -> None:
        turns = torch.arange(LENGTH).double().unsqueeze(-1)
        self.rotation = turns / 10 ** torch.arange(WIDTH // HEADS)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.2)


def _decoder(mixture: bool = False, blocks: int = 2) -> Decoder:
    with torch.device("meta"):
        return Decoder(mixture, blocks).double()


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


class _Trainer:
    """Steps of one model, and checkpoints of it."""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, data_rank: int) -> None:
        self.model, self.optimizer, self._batches = model, optimizer, _batches(data_rank)

    def backward(self, words: torch.Tensor) -> float:
        loss = _cross_entropy(self.model(words), words)
        loss.backward()
        return loss.item()

    def step(self) -> list[float]:
        self.optimizer.zero_grad()
        loss = self.backward(next(self._batches))
        norm = clip(list(self.model.parameters()))
        self.optimizer.step()
        return [loss, norm]

    def states(self) -> dict[str, Any]:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        return {
            **get_model_state_dict(self.model),
            **get_optimizer_state_dict(self.model, self.optimizer, options=flat),
        }

    def save(self, folder: Path) -> None:
        dcp.save(self.states(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        states = self.states()
        dcp.load(states, checkpoint_id=folder)
        names = get_model_state_dict(self.model)
        set_model_state_dict(self.model, {name: states.pop(name) for name in names})
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer, states, options=flat)

    def train(self, folder: Path) -> Any:
        """Two steps, a checkpoint, one more, and another behind the checkpoint's load."""
        told = [self.step() for _ in range(2)]
        before = {name: value.clone() for name, value in self.states().items() if isinstance(value, torch.Tensor)}
        self.save(folder)
        told.append(self.step())
        self.load(folder)
        told.append(self.step())
        return told, before, {name: each.full_tensor() for name, each in get_model_state_dict(self.model).items()}


def _tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {
        "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "feed_norm": SequenceParallel(),
            "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed.gate": ColwiseParallel(),
            "feed.up": ColwiseParallel(),
            "feed.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def llama(folder: Path, sizes: dict[str, int], backend: str) -> Any:
    """Tensor, sequence and loss parallel, recomputed, compiled and sharded, over replicas or not.

    ``sizes``: of the mesh, by the names ``replicate``, ``shard``, ``tensor``. ``backend``: of the compiler.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = _decoder(blocks=1)
    if "tensor" in sizes:
        _tensor_parallel(model, mesh["tensor"])
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)
    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    data = tuple(name for name in sizes if name != "tensor")
    over: dict[str, Any] = {
        "mesh": mesh[data],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64),
    }
    fully_shard(model.embeddings, **over, reshard_after_forward=True)
    for block in model.layers.values():
        fully_shard(block, **over, reshard_after_forward=True)
    last: Any = [model.norm, model.output]
    fully_shard(last, **over, reshard_after_forward=False)
    fully_shard(model, **over)
    assert isinstance(model, FSDPModule)
    data_rank = dist.get_rank() // sizes.get("tensor", 1)
    with loss_parallel() if "tensor" in sizes else nullcontext():
        return _Trainer(model, _start(model), data_rank).train(folder)


class _ExpertParallel(ParallelStyle):
    """Each rank has some experts; tokens go there and come back."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: tuple[list[int], list[int], torch.Tensor] = ([], [], torch.empty(0))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._dispatch, self._combine)  # type: ignore[arg-type]

    def _cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def _dispatch(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x, counts = inputs
        group = mesh.get_group()
        each = len(counts) // mesh.size()
        there = torch.tensor(counts)
        here = torch.empty_like(there)
        dist.all_to_all_single(here, there, group=group)
        sent, received = (part.view(mesh.size(), each).sum(1).tolist() for part in (there, here))
        arrived = all_to_all_single_autograd(x, received, sent, group)
        # By rank, then expert; wanted by expert.
        order = torch.arange(each).repeat(mesh.size()).repeat_interleave(here).argsort(stable=True)
        self._counts = sent, received, order
        return arrived[order], here.view(mesh.size(), each).sum(0).tolist()

    def _combine(self, module: nn.Module, made: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        sent, received, order = self._counts
        back = torch.empty_like(made).index_copy(0, order, made)
        returned: torch.Tensor = all_to_all_single_autograd(back, sent, received, mesh.get_group())
        return returned


class _Chunks(_Trainer):
    """The head computes two halves of each batch one after the other, and reduces its gradients with the second."""

    def backward(self, words: torch.Tensor) -> float:
        head: Any = self.model.output
        hidden = self.model(words, head=False)
        whole = hidden.detach().requires_grad_()
        losses = []
        head.set_requires_gradient_sync(False, recurse=False)
        head.set_reshard_after_backward(False, recurse=False)
        parts = list(zip(whole.chunk(2), words.chunk(2), strict=True))
        for number, (part, its) in enumerate(parts):
            if number == len(parts) - 1:
                head.set_requires_gradient_sync(True, recurse=False)
                head.set_reshard_after_backward(True, recurse=False)
            loss = _cross_entropy(head(part), its) / len(parts)
            loss.backward()
            losses.append(loss.item())
        hidden.backward(whole.grad)
        return sum(losses)


def mixture(folder: Path, expert_ranks: int) -> Any:
    """Experts over ``expert_ranks`` and sharded over the others, and everything else over all; a loss in chunks."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    ranks = dist.get_world_size()
    sparse = init_device_mesh("cpu", (ranks // expert_ranks, expert_ranks), mesh_dim_names=("efsdp", "ep"))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    model = _decoder(mixture=True)
    for block in model.layers.values():
        assert isinstance(block, Block)
        parallelize_module(block.feed.experts, sparse["ep"], _ExpertParallel())  # type: ignore[arg-type]
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)
    fully_shard(model.embeddings, mesh=mesh)
    experts_mesh = sparse["efsdp"]
    for block in model.layers.values():
        experts: Any = block.feed.experts
        several = experts_mesh.size() * expert_ranks > EXPERTS
        fully_shard(experts, mesh=experts_mesh, shard_placement_fn=(lambda _: Shard(1)) if several else None)
        experts.set_gradient_divide_factor(mesh.size())
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model.norm, mesh=mesh)
    fully_shard(model.output, mesh=mesh)
    fully_shard(model, mesh=mesh)
    blocks: list[Any] = list(model.layers.values())
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following, following.feed.experts])
        following.set_modules_to_backward_prefetch([block, block.feed.experts])
    assert all(isinstance(block, FSDPModule) for block in blocks)
    return _Chunks(model, _start(model), dist.get_rank()).train(folder)


def _stage(number: int, stages: int) -> Decoder:
    """Some blocks; the first has the embeddings, too, and the last the head."""
    model = _decoder(blocks=4)
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
