"""Parameters, gradients and optimizer states of ``fully_shard`` are the ``DTensor``s that torch's own are."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    OURS,
    PACKAGES,
    Words,
    alike,
    as_whole,
    batches,
    beside_torch,
    copied,
    cpu_mesh,
    inputs,
    loss_of,
    make,
    parallel,
    seen,
    shard_all,
    square_of,
    train,
    wholes,
)
from processes import KeptRanks
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

#: Ranks, and a mesh of them as ``parallel`` takes it: shards, replicas, tensor parallelism
#: inside of shards, and of replicas of these.
MESHES = {
    "shard": (2, (2,)),
    "replicate": (4, (2, 2)),
    "tensor": (4, (0, 2, 2)),
    "replicate, tensor": (4, (2, 1, 2)),
    "replicate of one, tensor": (4, (1, 2, 2)),
}


def beside(*meshes: str) -> list[Any]:
    """All of ``MESHES``; those that ``meshes`` are made of are left to the nightly tests."""
    return [pytest.param(mesh, marks=[] if mesh in meshes else [pytest.mark.nightly]) for mesh in MESHES]


def _shown(package: ModuleType, mesh: tuple[int, ...]) -> Any:
    # Rows that ranks divide unevenly, but for tensor parallelism.
    model = parallel(package, *mesh, hidden=16 if len(mesh) > 2 else 15)
    found = [seen(model)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = list(model.parameters())
    for x in inputs(model, 2):
        square_of(model, x).backward()
        found.append(seen(model, optimizer))
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
        optimizer.step()
        found.append(seen(model, optimizer))
        optimizer.zero_grad()
    # What the optimizer was given is what the model holds, in every step.
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    return found


@pytest.mark.parametrize("mesh", beside("shard", "replicate of one, tensor"))
def test_parameters_gradients_and_states_are_those_of_torch(ranks: KeptRanks, mesh: str) -> None:
    world_size, shape = MESHES[mesh]
    ranks.run(world_size, beside_torch, _shown, shape)


def _clipped(package: ModuleType, mesh: tuple[int, ...]) -> Any:
    # Rows that ranks divide unevenly, but for tensor parallelism.
    model = parallel(package, *mesh, hidden=16 if len(mesh) > 2 else 15)
    found = []
    for x in inputs(model):
        square_of(model, x).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        for kind, foreach in ((2.0, None), (2.0, False), (1.0, True), (float("inf"), None)):
            found.append(torch.nn.utils.get_total_norm(gradients, kind, foreach=foreach))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        found += [norm, as_whole(norm), norm.item(), seen(model)]
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        found += [seen(model)]
    return copied(found)


@pytest.mark.parametrize("mesh", beside("shard"))
def test_norms_are_those_of_torch(ranks: KeptRanks, mesh: str) -> None:
    world_size, shape = MESHES[mesh]
    ranks.run(world_size, beside_torch, _clipped, shape)


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "groups": lambda parameters: torch.optim.Adam([{"params": [each], "lr": 1e-2} for each in parameters]),
}


def optimizers(package: ModuleType) -> Any:
    found = []
    for make_optimizer in _OPTIMIZERS.values():
        model = parallel(package, dist.get_world_size())
        optimizer = make_optimizer(list(model.parameters()))
        told = train(model, 1, optimizer, _square)
        saved = copied(optimizer.state_dict())
        told += train(model, 1, optimizer, _square)
        # Loaded into another optimizer, over the same parameters.
        other = make_optimizer(list(model.parameters()))
        other.load_state_dict(saved)
        told += train(model, 1, other, _square)
        found.append([told, seen(model, other), other.state_dict()])
    return found


def _square(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    x = torch.nn.functional.one_hot(words % 12, 12).double()
    return square_of(model, x)


def initialised_by_loops(package: ModuleType) -> Any:
    """Before the first forward, over ``parameters()`` and over attributes; what is written there is trained."""
    model = shard_all(package, make())
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.constant_(parameter, number)
    found = [copied(dict(model.named_parameters()))]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.25)
        model.head.weight.data.add_(0.1)
        model.norm.weight.to_local().fill_(2.0)
        model.blocks[0].up.bias.copy_(
            distribute_tensor(torch.arange(49.0).double(), cpu_mesh(), model.norm.bias.placements)
        )
    found += [train(model, 2), seen(model)]
    model.blocks[1].norm.reset_parameters()
    nn.init.zeros_(model.blocks[1].down.weight)
    loss_of(model, next(batches(1))).backward()
    return [*found, seen(model)]


def updated_by_hand(package: ModuleType) -> Any:
    """An SGD of the user's own, an average of parameters, sums over all of them."""
    model = shard_all(package, make())
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    told = []
    for words in batches(3):
        loss = loss_of(model, words)
        loss.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
                average[name].lerp_(parameter, 0.5)
                parameter.grad = None
        told += [loss.item(), sum(as_whole(parameter.detach().square().sum()) for parameter in model.parameters())]
    kept = copied(dict(model.named_parameters()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average[name])
    loss_of(model, next(batches(1))).backward()
    return told, kept, seen(model)


def gradients_in_the_hands_of_users(package: ModuleType) -> Any:
    found = []
    model = shard_all(package, make())
    first, second, third, fourth, fifth = batches(5)
    loss_of(model, first).backward()
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    # Added up, in place.
    loss_of(model, second).backward()
    found.append(seen(model))
    assert all(parameter.grad is kept[name] for name, parameter in model.named_parameters())
    for parameter in model.parameters():
        parameter.grad.mul_(0.25)
    loss_of(model, third).backward()
    found.append(seen(model))
    # Some dropped, some replaced, between microbatches.
    model.head.weight.grad = None
    model.norm.weight.grad = torch.ones_like(model.norm.weight)
    model.norm.bias.grad = model.norm.bias.grad.clone()
    loss_of(model, fourth).backward()
    found.append(seen(model))
    model.zero_grad(set_to_none=False)
    found.append(seen(model))
    loss_of(model, fifth).backward()
    found.append(seen(model))
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


def hooks_on_gradients(package: ModuleType) -> Any:
    model = shard_all(package, make())
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():

        def told(parameter: torch.Tensor, name: str = name) -> None:
            found[name] = copied(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(told)
    for words in batches(2):
        loss_of(model, words).backward()
    return dict(sorted(found.items())), seen(model)


def replaced_by_hand(package: ModuleType) -> Any:
    """Before the first forward a parameter may be another object, as a ``DTensor`` that lies alike."""
    model = shard_all(package, make())
    weight = torch.full((17, 12), 0.5, dtype=torch.float64)
    model.head.weight = nn.Parameter(distribute_tensor(weight, cpu_mesh(), model.head.weight.placements))
    model.norm.weight = nn.Parameter(model.norm.weight.detach() * 2)
    return train(model, 2), seen(model)


def _kept(package: ModuleType, releases: bool | None) -> Any:
    """After a forward that keeps them modules hold whole parameters, until something needs the pieces."""
    settings = {} if releases is None else {"reshard_after_forward": releases}
    model = shard_all(package, make(), **settings)
    found = []

    def look() -> None:
        found.append({name: copied(parameter) for name, parameter in model.named_parameters()})

    for words in batches(2):
        loss = loss_of(model, words)
        look()
        loss.backward()
        look()
    for back in (model.reshard, model.blocks[0].reshard, model.state_dict, lambda: model.to("cpu")):
        loss_of(model, words)
        back()
        look()
    with torch.no_grad():
        model(words)
    look()
    model.eval()(words)
    look()
    return found


@pytest.mark.parametrize("releases", [None, pytest.param(True, marks=pytest.mark.nightly)])
def test_parameters_after_a_forward(ranks: KeptRanks, releases: bool | None) -> None:
    ranks.run(2, beside_torch, _kept, releases)


def cast_before_the_first_forward(package: ModuleType) -> Any:
    found = []
    for cast in (lambda model: model.to("cpu", torch.float32), lambda model: model.cpu()):
        model = shard_all(package, make())
        assert cast(model) is model
        found += [train(model, 1), seen(model)]
    return found


def cast_while_training(package: ModuleType) -> Any:
    """Torch fails in the next forward, and ours goes on in the new dtype."""
    model = shard_all(package, make(dtype=torch.float32))
    told = train(model, 1)
    model.double()
    found = [told, seen(model)]
    if package is PACKAGES[0]:
        with pytest.raises(RuntimeError):
            model(next(batches(1)))
        return found
    plain = make()
    plain.load_state_dict(wholes(model))
    words = next(batches(1))
    alike(loss_of(model, words), loss_of(plain, words))
    return found


def small_and_empty_pieces(package: ModuleType) -> Any:
    """One row, rows for some of the ranks, none; several dimensions."""
    found: list[Any] = []
    for shape in ((1, 5), (2, 3), (4, 2, 3), (1,), (5, 1)):
        torch.manual_seed(0)
        module = _Sum(torch.randn(shape).double())
        package.fully_shard(module, mesh=cpu_mesh())
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for number in range(2):
            module(torch.full((), 1.0 + number + dist.get_rank())).backward()
            found.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5))
            optimizer.step()
            found.append(seen(module, optimizer))
            optimizer.zero_grad()
    return found


class _Sum(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value, self.beside = nn.Parameter(value), nn.Parameter(torch.arange(7.0).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.value.square()).sum() + (x * self.beside).square().sum()


def shared_parameters(package: ModuleType) -> Any:
    model = shard_all_but_embedding(package, make(tied=True))
    assert model.head.weight is model.embedding.weight
    found = [train(model, 2), seen(model)]
    assert model.head.weight is model.embedding.weight
    return found


def shard_all_but_embedding(package: ModuleType, model: Words) -> Words:
    for block in model.blocks:
        package.fully_shard(block, mesh=cpu_mesh())
    return package.fully_shard(model, mesh=cpu_mesh())


def scaled_gradients(package: ModuleType) -> Any:
    model = shard_all(package, make(dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    told = []
    for number, words in enumerate(batches(3)):
        loss = loss_of(model, words)
        scaler.scale(loss).backward()
        if number == 1 and dist.get_rank() == 0:
            # An overflow that one rank alone sees.
            model.head.weight.grad.to_local().fill_(float("inf"))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told += [loss.item(), scaler.get_scale()]
    return told, seen(model)


def copies_are_refused(package: ModuleType) -> Any:
    model = shard_all(package, make())
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model.blocks[0])
    return train(model, 1), seen(model)


#: Bodies, and on how many ranks each runs.
def parts_that_outlive_the_model(package: ModuleType) -> Any:
    model: Any = shard_all(package, make())
    square_of(model, next(batches(1))).backward()
    kept, blocks = model.head, [weakref.ref(block) for block in model.blocks]
    saved = as_whole(kept.weight)
    del model
    gc.collect()
    if package is OURS:
        # Torch keeps them here.
        assert [block() for block in blocks] == [None] * len(blocks)
    # What is kept still answers for itself.
    assert as_whole(kept.state_dict()["weight"]).equal(saved)
    return saved


BODIES: dict[Callable[[ModuleType], object], int] = {
    optimizers: 2,
    initialised_by_loops: 2,
    updated_by_hand: 2,
    gradients_in_the_hands_of_users: 2,
    hooks_on_gradients: 2,
    replaced_by_hand: 2,
    cast_before_the_first_forward: 2,
    cast_while_training: 2,
    small_and_empty_pieces: 2,
    shared_parameters: 2,
    scaled_gradients: 2,
    copies_are_refused: 2,
    parts_that_outlive_the_model: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_beside_torch(ranks: KeptRanks, body: Callable[[ModuleType], object]) -> None:
    ranks.run(BODIES[body], beside_torch, body)
