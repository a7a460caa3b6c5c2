"""Models and steps for the tests of ``polyshard_fsdp2``, and torch's FSDP2 beside it."""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from parity import seed_all
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

#: ``FSDP2_PACKAGE=torch.distributed.fsdp`` runs the tests over torch twice: what fails then is wrong in the test.
OURS: ModuleType = importlib.import_module(os.environ.get("FSDP2_PACKAGE", "polyshard_fsdp2"))
#: Both have the same names.
PACKAGES: tuple[ModuleType, ModuleType] = (torch.distributed.fsdp, OURS)
WIDTH, WORDS = 12, 17


class Block(nn.Module):
    """Rows that no small number of ranks divides, biases and norms."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width + 1)
        self.down = nn.Linear(4 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


class Words(nn.Module):
    """A small language model."""

    def __init__(self, tied: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(1))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) * self.scale
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def init_weights(self) -> None:
        """As torchtitan's models do: by hand, over attributes, by shapes, and some of it twice."""
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.scale.fill_(1.0)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.norm.reset_parameters()
            for linear in (block.up, block.down):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
        self.norm.reset_parameters()
        nn.init.orthogonal_(self.head.weight)
        with torch.no_grad():
            for block in self.blocks:
                assert isinstance(block, Block)
                block.down.weight.mul_(0.5)


def make(tied: bool = False, dtype: torch.dtype = torch.float64) -> Words:
    """The same on every rank."""
    torch.manual_seed(0)
    return Words(tied).to(dtype)


@functools.cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Made once in a process: a group of gloo takes threads, and is never given back."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def cpu_mesh(*shape: int) -> DeviceMesh:
    """Over all ranks; of two dimensions, (replicate, shard)."""
    if len(shape) == 2:
        return mesh_of(shape, ("replicate", "shard"))
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard_all(package: ModuleType, model: Words, mesh: DeviceMesh | None = None, **settings: Any) -> Words:
    """Blocks, embedding and the rest."""
    mesh = mesh or cpu_mesh()
    for block in model.blocks:
        package.fully_shard(block, mesh=mesh, **settings)
    package.fully_shard(model.embedding, mesh=mesh, **settings)
    package.fully_shard(model, mesh=mesh, **settings)
    return model


def batches(steps: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Another one on each rank."""
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for _ in range(steps):
        yield torch.randint(0, WORDS, (2, 5), generator=random)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1).double(), words.flatten())


def train(
    model: nn.Module,
    steps: int = 2,
    optimizer: torch.optim.Optimizer | None = None,
    step: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
) -> list[float]:
    """Losses, and the norms of gradients."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    told = []
    for words in batches(steps):
        loss = step(model, words)
        if loss.requires_grad:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.item(), as_whole(norm).item()]
    return told


def as_whole(tensor: Any) -> torch.Tensor:
    """The whole of a ``DTensor``; anything else as it is."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers."""
    return {name: as_whole(value).clone() for name, value in model.state_dict().items()}


def averaged(plain: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of an unsharded model, which become the means over all ranks; of zeros where a rank has none."""
    for parameter in plain.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}


def same(ours: Any, theirs: Any, **tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, **tolerance)


def as_unsharded(
    sharded: nn.Module, plain: nn.Module, step: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of
) -> None:
    """Training both by ``step`` comes to the same parameters."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sharded, plain)]
    for words in batches(2):
        for each in (sharded, plain):
            step(each, words).backward()
        averaged(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(wholes(sharded), dict(plain.state_dict()), rtol=0, atol=1e-12)


#: Marks what FSDP2 of torch 2.11 lacks, or fails in.
NEWER = pytest.mark.skipif(torch.__version__ < (2, 13), reason="FSDP2 of torch 2.11 does not serve it")


def each_of(bodies: Iterable[Callable[..., Any]], newer: Collection[Callable[..., Any]]) -> list[Any]:
    """The cases of a test, of which ``newer`` are for newer torch than 2.11."""
    return [pytest.param(body, id=body.__name__, marks=NEWER if body in newer else ()) for body in bodies]


def both(run: Callable[[ModuleType], tuple[Sequence[float], dict[str, torch.Tensor]]], **tolerance: float) -> None:
    """What ``run`` told of losses and parameters is the same of both packages."""
    theirs, ours = (run(package) for package in PACKAGES)
    same(ours[0], theirs[0], **tolerance)
    assert list(ours[1]) == list(theirs[1])
    same(ours[1], theirs[1], **tolerance)


def beside_torch(rank: int, body: Callable[..., Any], *args: Any, **tolerance: float) -> None:
    """``body(package, *args)`` finds the same over torch and over ours."""
    found = []
    for package in PACKAGES:
        seed_all(0)
        warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support on cpu")
        found.append(body(package, *args))
    alike(found[1], found[0], **tolerance)


def alike(ours: Any, theirs: Any, where: str = "", **tolerance: float) -> None:
    """What was found is the same: ``DTensor``s of one mesh, placement and piece, tensors to 1e-12 in fp64."""
    if isinstance(theirs, (Mapping, dict)):
        assert list(ours) == list(theirs), where
        for key in theirs:
            alike(ours[key], theirs[key], f"{where}.{key}", **tolerance)
    elif isinstance(theirs, (list, tuple)) and not isinstance(theirs, torch.Size):
        assert len(ours) == len(theirs), where
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            alike(one, other, f"{where}[{number}]", **tolerance)
    elif isinstance(theirs, torch.Tensor):
        assert type(ours) is type(theirs), f"{where}: {type(ours)}, {type(theirs)}"
        for name in ("shape", "dtype", "requires_grad", "device"):
            assert getattr(ours, name) == getattr(theirs, name), f"{where}.{name}"
        if isinstance(theirs, DTensor):
            assert (ours.placements, ours.device_mesh) == (theirs.placements, theirs.device_mesh), where
            ours, theirs = ours.to_local(), theirs.to_local()
        assert ours.stride() == theirs.stride(), where
        close = {"rtol": 1e-12, "atol": 1e-12} if theirs.dtype is torch.float64 and not tolerance else tolerance
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{where}: {text}", **close)
    elif isinstance(theirs, float):
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{where}: {text}", **tolerance)
    else:
        assert ours == theirs, where


def carried(folder: str, trained: Callable[[ModuleType, int, int], tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """Each package loads what the other saved, model and optimizer, bit for bit: ``trained(package, seed, steps)``."""
    whole = StateDictOptions(full_state_dict=True)
    for saves, loads in (PACKAGES, PACKAGES[::-1]):
        path = f"{folder}/{saves.__name__}"
        model, optimizer = trained(saves, 1, 2)
        wanted = get_state_dict(model, optimizer, options=whole)
        one, other = get_state_dict(model, optimizer)
        dcp.save({"model": one, "optimizer": other}, checkpoint_id=path)
        model, optimizer = trained(loads, 2, 1)
        one, other = get_state_dict(model, optimizer)
        dcp.load({"model": one, "optimizer": other}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=one, optim_state_dict=other)
        found = get_state_dict(model, optimizer, options=whole)
        same(found[0], wanted[0], rtol=0, atol=0)
        same(found[1]["state"], wanted[1]["state"], rtol=0, atol=0)


class Mlp(nn.Module):
    """What tensor parallelism cuts evenly, where ``hidden`` is even."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, hidden), nn.Linear(hidden, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + hidden


#: For ``Mlps``.
TENSOR_PARALLEL: dict[str, ParallelStyle] = {
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


class Mlps(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(hidden) for _ in range(2))
        self.head = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.head(x))


def parallel(package: ModuleType, *shape: int, seed: int = 0, hidden: int = 16, **settings: Any) -> Mlps:
    """Two blocks and a head over a mesh of 1 (shard), 2 (replicate, shard) or 3 (replicate, shard, tensor) dimensions.

    The last one cuts each layer before it is sharded. A replicate dimension of 0 is none.
    """
    torch.manual_seed(seed)
    model = Mlps(hidden).double()
    names = ("replicate", "shard", "tensor") if len(shape) > 1 else ("shard",)
    sizes = {name: size for name, size in zip(names, shape, strict=False) if size}
    mesh = mesh_of(tuple(sizes.values()), tuple(sizes))
    if "tensor" in sizes:
        parallelize_module(model, mesh["tensor"], TENSOR_PARALLEL)
    over = mesh[tuple(name for name in sizes if name != "tensor")]
    for module in (*model.blocks, model):
        package.fully_shard(module, mesh=over, **settings)
    return model


def inputs(model: nn.Module, steps: int = 1) -> Iterator[torch.Tensor]:
    """For ``parallel``: another one on each rank, but for those of one tensor parallel group."""
    mesh = next(iter(model.state_dict().values())).device_mesh
    tensor = math.prod(mesh[name].size() for name in ("tensor", "tp") if name in (mesh.mesh_dim_names or ()))
    random = torch.Generator().manual_seed(dist.get_rank() // tensor)
    for _ in range(steps):
        yield torch.randn(3, 12, generator=random, dtype=torch.float64)


def square_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def copied(found: Any) -> Any:
    """What training changes no more."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), found)


def seen(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Of each parameter what its user sees."""
    states = optimizer.state if optimizer is not None else {}
    return {
        name: [
            type(parameter) is nn.Parameter,
            isinstance(parameter, nn.Parameter),
            parameter.requires_grad,
            parameter.numel(),
            *copied([parameter, parameter.grad, dict(states.get(parameter, {}))]),
        ]
        for name, parameter in model.named_parameters()
    }


@contextmanager
def without_trainers() -> Iterator[None]:
    """As in a process that has imported none yet: tests of theirs may have, before the ranks were forked."""
    before = _take_trainers()
    try:
        yield
    finally:
        # They hold what stood in torch's place.
        _take_trainers()
        sys.modules.update(before)


def _take_trainers() -> dict[str, ModuleType]:
    trainers = ("transformers", "accelerate", "lightning", "peft")
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in trainers}


def unedited(rank: int, program: Callable[..., Any], *args: Any) -> None:
    """``program(*args)`` finds the same over torch's ``fully_shard`` and over ours in its place.

    A ``Path`` among the arguments is where it writes to: a folder for each.
    """
    import polyshard_fsdp2

    def found(name: str) -> Any:
        seed_all(0)
        return copied(program(*(each / name if isinstance(each, Path) else each for each in args)))

    # Of torch's compiler, of its random numbers over DTensors, and of its FSDP2.
    warnings.simplefilter("ignore")
    theirs = found("theirs")
    with without_trainers(), polyshard_fsdp2.install():
        ours = found("ours")
    alike(ours, theirs, rtol=1e-12, atol=1e-12)
