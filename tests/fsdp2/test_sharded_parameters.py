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
from fsdp2_models import (
    OURS,
    PACKAGES,
    alike,
    as_whole,
    batches,
    beside_torch,
    copied,
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
from torch.distributed.tensor import DTensor

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
    gradients_in_the_hands_of_users: 2,
    cast_before_the_first_forward: 2,
    cast_while_training: 2,
    copies_are_refused: 2,
    parts_that_outlive_the_model: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_beside_torch(ranks: KeptRanks, body: Callable[[ModuleType], object]) -> None:
    ranks.run(BODIES[body], beside_torch, body)
